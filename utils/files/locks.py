"""Exclusive file locks that name their holder and end with its process, however that ends.

They are filelock's, which use BSD's ``flock``: it belongs to the open file, and Linux maps flocks on NFS to whole-file
locks, so they exclude other machines. Forked children close the descriptor; otherwise they would keep the lock of a
killed parent.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import math
import os
import platform
from pathlib import Path

import filelock

from utils.logger import get_logger

_POLL_S = 0.1
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)  # errno of flock where the file system has none


class FileLock:
    """A lock shared by all machines that see the file. If the file system has no locks, `acquire` always succeeds, and
    ``excludes_others`` is False. The holder may remove the file: processes that wait for it then lock a new one."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.excludes_others = True  # for the last acquired lock
        self._lock = filelock.FileLock(
            self.path, poll_interval=_POLL_S, thread_local=False, fallback_to_soft=False, on_acquired=_write_holder
        )

    def acquire(self, patience_s: float = 0.0) -> str:
        """Acquires the lock and returns "", or returns a description of its holder after ``patience_s`` seconds. Raises
        OSError if the file cannot be opened for writing."""
        self.excludes_others = True
        try:
            self._lock.acquire(timeout=-1 if patience_s == math.inf else patience_s)
        except filelock.Timeout:
            return self._holder() or "another process"
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self.excludes_others = False
        return ""

    def wait(self, purpose: str) -> FileLock:
        """Acquires the lock, for a ``with`` statement. If it has to wait, logs a warning that names ``purpose``."""
        holder = self.acquire()
        if holder:
            get_logger().warning("waiting for %s (%s)", purpose, holder)
            self.acquire(math.inf)
        return self

    def __enter__(self) -> FileLock:
        """Does not acquire the lock. On exit it is released if it was acquired."""
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Releases the lock if this process holds it. The file is kept."""
        self._lock.release()

    def _holder(self) -> str:
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            return file.read(1000).decode("utf-8", "replace").strip()
        return ""


def _write_holder(descriptor: int) -> None:
    since = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    with contextlib.suppress(OSError):  # the lock holds without a name
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, f"process {os.getpid()} on {platform.node()}, since {since}\n".encode())
