"""FlashAttention without the build, and the paged engine on top of it.

The names below are loaded on first use, so that `import flashpage` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME_OF = {
    "flash_attn_func": "flashpage.attention.functional",
    "flash_attn_kvpacked_func": "flashpage.attention.functional",
    "flash_attn_qkvpacked_func": "flashpage.attention.functional",
    "flash_attn_varlen_func": "flashpage.attention.functional",
    "flash_attn_varlen_kvpacked_func": "flashpage.attention.functional",
    "flash_attn_varlen_qkvpacked_func": "flashpage.attention.functional",
    "flash_attn_with_kvcache": "flashpage.attention.functional",
    "backends": "flashpage.attention.dispatch",
    "LLM": "flashpage.engine.llm",
    "RequestOutput": "flashpage.engine.outputs",
    "SamplingParams": "flashpage.engine.sampling_params",
    "FlashpageError": "flashpage.errors",
}

__all__ = [
    "LLM",
    "FlashpageError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "backends",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

if TYPE_CHECKING:
    from flashpage.attention.dispatch import backends
    from flashpage.attention.functional import (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
        flash_attn_with_kvcache,
    )
    from flashpage.engine.llm import LLM
    from flashpage.engine.outputs import RequestOutput
    from flashpage.engine.sampling_params import SamplingParams
    from flashpage.errors import FlashpageError


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'flashpage' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
