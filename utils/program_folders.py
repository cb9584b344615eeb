"""Folders of this program: its source, its configuration files, and its caches."""

from __future__ import annotations

import os
from pathlib import Path

from utils.errors import UserError

PROJECT = Path(__file__).parents[1]
CONFIGS = PROJECT / "configs"


def cache_folder(cache_dir: str = "") -> Path:
    """Returns ``cache_dir`` if given, else $XDG_CACHE_HOME/lockstep or ~/.cache/lockstep."""
    if cache_dir:
        return Path(os.path.expanduser(cache_dir))
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"
    except RuntimeError:
        raise UserError("this user has no home folder for caches; set HOME or XDG_CACHE_HOME") from None
