"""`python -m flashpage`: the command line."""

from __future__ import annotations

from flashpage.cli import main

if __name__ == "__main__":
    main()
