"""Where flashpage keeps files for the user who runs it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

CACHE_VARIABLES = ("FLASHPAGE_CACHE", "XDG_CACHE_HOME")


def user_cache() -> Path:
    """`FLASHPAGE_CACHE`, or the platform's place for caches; it need not exist.

    Raises:
        RuntimeError: it depends on a home directory, of a user who has none.
    """
    own, shared = (os.environ.get(name) for name in CACHE_VARIABLES)
    if own:
        return Path(own).expanduser()
    if shared:
        return Path(shared).expanduser() / "flashpage"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "flashpage"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
        return Path(local) / "flashpage" / "Cache"
    return Path.home() / ".cache" / "flashpage"
