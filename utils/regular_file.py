"""Ordinary files alone: a pipe would keep its reader waiting, a device has no end, and a file may be far too large."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO


def open_regular(path: str | os.PathLike, most: int | None = None) -> BinaryIO:
    """Opens a file for reading. Raises OSError, with a reason for the user, for what is no ordinary file or has more
    than ``most`` bytes."""
    return os.fdopen(_descriptor(path, most)[0], "rb")


def read_regular(path: str | os.PathLike, most: int | None = None) -> bytes:
    """The content of a file. Raises as `open_regular` does."""
    handle, size = _descriptor(path, most)
    try:
        data = os.read(handle, size + 1)
        if len(data) == size:
            return data
        parts = [data]
        while parts[-1]:  # it grows, or is larger than one read gives
            parts.append(os.read(handle, 1 << 24))
        return b"".join(parts)
    finally:
        os.close(handle)


def _descriptor(path: str | os.PathLike, most: int | None) -> tuple[int, int]:
    """An open file and its size in bytes."""
    # Without O_NONBLOCK, opening a pipe would wait until somebody writes to it.
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    try:
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, "is a folder, not a file", os.fspath(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is a pipe or device, not a file", os.fspath(path))
        if most is not None and status.st_size > most:
            reason = f"has {status.st_size / 2**30:,.2f} GiB, more than such a file can need"
            raise OSError(errno.EFBIG, reason, os.fspath(path))
    except BaseException:
        os.close(handle)
        raise
    return handle, status.st_size
