"""How long a new user waits: the import, and the first call of each function.

    python benchmarks/start.py

Each first call is in a process of its own with empty caches of compiled kernels, so it pays for
all of its compiling. On a GPU bfloat16 with causal mask, head_dim 128, forward and backward; on
a CPU float32.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from harness import DEVICE, ON_GPU, finish, print_table, setup

FIRST_CALL = """
import time, torch, flashpage
device, name = {device!r}, {name!r}
dtype = torch.bfloat16 if device == "cuda" else torch.float32
def randn(*shape, grad=True):
    return torch.randn(shape, device=device).to(dtype).requires_grad_(grad)
cu = torch.tensor([0, 100, 256], dtype=torch.int32, device=device)
q, k, v, kv, qkv = randn(2, 128, 8, 128), randn(2, 128, 4, 128), randn(2, 128, 4, 128), \\
    randn(2, 128, 2, 4, 128), randn(2, 128, 3, 8, 128)
flat = [x.flatten(0, 1) for x in (q, k, v, kv, qkv)]
pages = [randn(32, 16, 4, 128, grad=False) for _ in range(2)]
table = torch.arange(32, device=device).int().view(2, 16)
lengths = torch.tensor([100, 30], dtype=torch.int32, device=device)
cos, sin = randn(256, 64, grad=False), randn(256, 64, grad=False)
calls = {{
    "flash_attn_func": (q, k, v),
    "flash_attn_kvpacked_func": (q, kv),
    "flash_attn_qkvpacked_func": (qkv,),
    "flash_attn_varlen_func": (*flat[:3], cu, cu, 156, 156),
    "flash_attn_varlen_kvpacked_func": (flat[0], flat[3], cu, cu, 156, 156),
    "flash_attn_varlen_qkvpacked_func": (flat[4], cu, 156),
    "flash_attn_with_kvcache": (q[:, :1], *pages, k[:, :1], v[:, :1], cos, sin, lengths),
}}
options = {{"block_table": table}} if name == "flash_attn_with_kvcache" else {{}}
function = getattr(flashpage, name)
def finished():
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
start = finished()
out = function(*calls[name], causal=True, **options)
forward = finished()
if out.requires_grad:
    out.sum().backward()
print(forward - start, finished() - forward)
"""

NAMES = (
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
)


def run(code: str, environment: dict[str, str] | None = None) -> tuple[str, float]:
    """Output, and seconds of the whole process."""
    start = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    if result.returncode:
        raise RuntimeError(result.stderr)
    return result.stdout, time.perf_counter() - start


def import_seconds() -> dict[str, Any]:
    """Of `import flashpage` and of its functions, after torch is imported; best of 5."""
    code = (
        "import time, torch; start = time.perf_counter(); import flashpage; "
        "flashpage.flash_attn_func; print(time.perf_counter() - start)"
    )
    best = min(float(run(code)[0]) for _ in range(5))
    return {"case": "import, beyond torch's own", "first_s": best, "backward_s": None}


def first_call(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TRITON_CACHE_DIR": folder, "NUMBA_CACHE_DIR": folder}
        output, _ = run(FIRST_CALL.format(device=DEVICE, name=name), caches)
    forward, backward = map(float, output.split())
    has_backward = name != "flash_attn_with_kvcache"
    return {"case": name, "first_s": forward, "backward_s": backward if has_backward else None}


def main() -> None:
    info = setup()
    results = [import_seconds(), *(first_call(name) for name in NAMES)]
    print_table(
        ("first call on a " + ("GPU" if ON_GPU else "CPU"), "seconds", "its backward"),
        [
            (
                r["case"],
                f"{r['first_s']:.2f}",
                "" if r["backward_s"] is None else f"{r['backward_s']:.2f}",
            )
            for r in results
        ],
    )
    finish("start", info, results)


if __name__ == "__main__":
    main()
