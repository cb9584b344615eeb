"""Caches what was read from a file until the file changes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Content = TypeVar("Content")


def once_per_file(read: Callable[[Path], Content]) -> Callable[[Path], Content]:
    """Decorates a function that reads a large file. It is called again only after the file's inode, size or
    modification time has changed. Its result should be small, and is shared by all callers, which must not modify it.
    Errors are not cached."""
    contents: dict[Path, tuple[tuple[int, int, int], Content]] = {}

    @functools.wraps(read)
    def remembered(path: Path) -> Content:
        try:
            status = os.stat(path)
        except OSError:  # let `read` raise the error
            return read(path)
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        if path not in contents or contents[path][0] != stamp:
            contents[path] = (stamp, read(path))
        return contents[path][1]

    return remembered
