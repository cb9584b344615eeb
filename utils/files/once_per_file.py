"""Remembers what was read of a file until it changes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Content = TypeVar("Content")


def once_per_file(read: Callable[[Path], Content]) -> Callable[[Path], Content]:
    """Decorates a function that reads a large file: it is called again only after the size or time of the file has
    changed. Its result should be small, and is shared by all callers, who must not change it. Errors are not
    remembered."""
    contents: dict[Path, tuple[tuple[int, int, int], Content]] = {}

    @functools.wraps(read)
    def remembered(path: Path) -> Content:
        try:
            status = os.stat(path)
        except OSError:  # `read` says what is wrong
            return read(path)
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        if path not in contents or contents[path][0] != stamp:
            contents[path] = (stamp, read(path))
        return contents[path][1]

    return remembered
