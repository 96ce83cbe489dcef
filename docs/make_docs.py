"""`make docs`: draws docs/pictures and fills in the numbers of docs/attention.md, from the code."""

from __future__ import annotations

from pathlib import Path

import claims
import pictures
from memory_curve import memory_picture

DOCS = Path(__file__).parent


def make(folder: Path, text: str) -> str:
    """Draw into a folder that exists, and return the text with its numbers filled in."""
    pictures.draw(
        folder,
        work=claims.WORK,
        causal=claims.causal_problem(),
        sequences=claims.sequences(),
        decode=claims.decode(),
    )
    memory_picture(folder / "memory.svg")
    return claims.fill(text, claims.all_claims())


if __name__ == "__main__":
    (DOCS / "pictures").mkdir(exist_ok=True)
    document = DOCS / "attention.md"
    document.write_text(make(DOCS / "pictures", document.read_text(encoding="utf-8")), "utf-8")
