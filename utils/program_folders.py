"""Folders of this program: its source, its configuration files, and its caches."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
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


def private_folder(folder: Path, flag: str) -> Path:
    """Returns a folder, made with mode 0700 if necessary, whose files are used as they are: caches, and copies of data.
    Raises UserError if it belongs to another user, or others may write in it. ``flag``: names another folder.

    A folder that cannot be made holds nothing; whoever writes there says why.
    """
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not folder.is_dir():
        return folder
    check_owner(folder, flag)
    if hasattr(os, "getuid") and folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        remedy = f"type chmod go-w {shlex.quote(str(folder))}, or name another folder with {flag}"
        raise UserError(f"{folder}: others may write there, and change what is read; {remedy}")
    return folder


def check_owner(folder: Path, flag: str) -> None:
    """Raises UserError if a folder belongs to another user, except root. ``flag``: names another folder."""
    if hasattr(os, "getuid") and folder.stat().st_uid not in (0, os.getuid()):
        reason = "belongs to another user, who may change what is read there"
        raise UserError(f"{folder}: {reason}; name another folder with {flag}")
