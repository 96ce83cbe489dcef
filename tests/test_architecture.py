"""The rooms of the package import downwards only, and the package itself imports nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import flashpage

ROOT = Path(flashpage.__file__).parent

# A room may import those of smaller rank, and itself.
RANK = {
    "errors": 0,
    "folders": 0,
    "attention": 1,
    "cache": 2,
    "compat": 2,  # beside the cache: neither sees the other
    "explain": 2,  # sees errors and attention only
    "layers": 3,
    "models": 4,
    "weights": 5,
    "engine": 6,
    "bench": 7,
    "play": 7,
    "workloads": 8,
    "cli": 9,
    "__main__": 10,
}


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "flashpage":
                homes = {**flashpage._HOME_OF, "__version__": ""}
                names = [homes.get(alias.name, f"flashpage.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        rooms |= {name.split(".")[1] for name in names if name.startswith("flashpage.")}
    return rooms


def test_rooms_import_downwards_only():
    seen = set()
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        assert room in RANK, f"{path} is in no known room"
        seen.add(room)
        for other in imported_rooms(path):
            assert RANK[other] < RANK[room] or other == room, f"{path} imports flashpage.{other}"
    assert seen == set(RANK)


def test_every_file_says_its_boundary():
    for path in ROOT.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


def test_import_is_light():
    """`import flashpage` brings no torch; the attention functions bring nothing else of weight."""
    script = (
        "import sys, flashpage\n"
        "assert 'torch' not in sys.modules\n"
        "from flashpage import flash_attn_func\n"
        "heavy = {'transformers', 'numba', 'triton', 'gguf', 'rich', 'typer'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    path = str(ROOT.parent)
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r})\n{script}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
