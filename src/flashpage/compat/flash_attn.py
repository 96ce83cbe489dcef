"""Makes `import flash_attn` resolve to flashpage, by putting one folder on the module search path.

The folder, `shim`, holds a package `flash_attn` and its distribution metadata. On `sys.path` it
serves this process (`install`); in the environment variable PYTHONPATH it serves any Python
program (`search_path`, and the runner `python -m flashpage.compat`).
"""

from __future__ import annotations

import importlib
import os
import site
import sys
from pathlib import Path

import flashpage
from flashpage.errors import ArgumentError

SHIM = Path(__file__).parent / "shim"


def install(*, override: bool = False) -> None:
    """From now on `import flash_attn`, and what asks whether it is installed, find flashpage.

    Call it before anything else imports flash_attn, and before transformers, which remembers its
    first look. Calling it again changes nothing.

    Args:
        override: also when another flash_attn has been imported in this process: its modules are
            forgotten, so later imports find ours. Names that other modules have already taken
            from it stay as they are.

    Raises:
        ArgumentError: another flash_attn is imported, and `override` is False.
    """
    foreign = [name for name in _imported() if not _is_ours(name)]
    if foreign and not override:
        raise ArgumentError(
            f"override must be True to replace {foreign[0]}, which is already imported from "
            f"{getattr(sys.modules[foreign[0]], '__file__', None)}; or call install() before that"
        )
    for name in foreign:
        del sys.modules[name]
    if str(SHIM) in sys.path:
        sys.path.remove(str(SHIM))  # it may stand behind another flash_attn
    sys.path.insert(0, str(SHIM))
    importlib.invalidate_caches()


def uninstall() -> None:
    """Undo `install`; without one it does nothing. Names taken from the shim keep working."""
    if str(SHIM) in sys.path:
        sys.path.remove(str(SHIM))
        importlib.invalidate_caches()
    for name in [name for name in _imported() if _is_ours(name)]:
        del sys.modules[name]


def search_path() -> str:
    """What PYTHONPATH must hold for a new interpreter to find the shim, and flashpage behind it."""
    folders = [str(SHIM)]
    root = str(Path(flashpage.__file__).resolve().parents[1])
    # A site folder is searched anyway, and must not move in front of the standard library.
    sites = [*site.getsitepackages(), site.getusersitepackages()]
    if root not in {str(Path(folder).resolve()) for folder in sites}:
        folders.append(root)
    return os.pathsep.join(folders)


def _imported() -> list[str]:
    return sorted(name for name in sys.modules if name.split(".")[0] == "flash_attn")


def _is_ours(name: str) -> bool:
    file = getattr(sys.modules[name], "__file__", None)
    return file is not None and Path(file).resolve().is_relative_to(SHIM.resolve())
