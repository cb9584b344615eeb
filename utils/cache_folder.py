"""Where caches go unless the user says otherwise."""

from __future__ import annotations

import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # a file system in memory


def cache_folder(cache_dir: str = "") -> Path:
    """``cache_dir`` if given, else $XDG_CACHE_HOME/lockstep, or ~/.cache/lockstep."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lockstep"
