"""Files of tests: the folder in which they are made, and those that are made once per session and shared by the
processes that run its tests."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

_VARIABLE = "LOCKSTEP_TEST_SESSION"
_MEMORY = "/dev/shm"
_MIN_FREE_BYTES = 2 << 30  # the tests take 0.2 GB; a container has 64 MiB by default


def keep_files_in_memory() -> None:
    """Puts the folders of tests and the session into memory, where creating, syncing and removing hundreds of thousands
    of files takes a fraction of the time. Keeps the usual folder without enough memory, if programs cannot be run there
    (as in Docker's /dev/shm), or if TMPDIR names another."""
    if "TMPDIR" in os.environ or not os.access(_MEMORY, os.W_OK):
        return
    is_noexec = os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC
    if is_noexec or shutil.disk_usage(_MEMORY).free < _MIN_FREE_BYTES:
        return
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _MEMORY)


def session_file(name: str, write: Callable[[Path], object]) -> Path:
    """Returns a file or folder of this session, which ``write`` has made in the process that asked for it first. If
    ``write`` raises or is interrupted, what it has left is removed before the next call.

    The result must not be changed.
    """
    path = Path(os.environ[_VARIABLE], name)
    with open(path.with_name(f"{name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        complete = path.with_name(f"{name}.complete")
        if not complete.exists():
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
            write(path)
            complete.touch()
    return path


@contextlib.contextmanager
def open_session_folder() -> Iterator[Path]:
    """Creates the folder for this process and pytest's workers, and yields it. A worker uses that of its parent."""
    if _VARIABLE in os.environ:
        yield Path(os.environ[_VARIABLE])
        return
    root = os.environ.get("PYTEST_DEBUG_TEMPROOT")
    with tempfile.TemporaryDirectory(dir=os.path.abspath(root) if root else None) as folder:
        os.environ[_VARIABLE] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ[_VARIABLE]
