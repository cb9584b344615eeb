"""A folder of files that are made once per session, and shared by the processes that run its tests."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

_VARIABLE = "LOCKSTEP_TEST_SESSION"


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
    with tempfile.TemporaryDirectory() as folder:
        os.environ[_VARIABLE] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ[_VARIABLE]
