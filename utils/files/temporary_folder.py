"""A folder in which files are made before they get their names."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from utils.errors import UserError


@contextlib.contextmanager
def temporary_folder(path: str | Path) -> Iterator[Path]:
    """Creates a folder next to ``path`` for the block. Its contents can be renamed to ``path`` (`replace_path`).

    The folder is locked. Folders that killed processes left behind are removed first; those of other programs stay. If
    the folder cannot be created, the OSError names ``path``.
    """
    path = Path(path)
    prefix = f".{path.name[:60]}"
    left_behind = re.compile(re.escape(prefix) + r"\.[0-9a-f]{16}\.tmp")
    for left in path.parent.glob(f"{glob.escape(prefix)}.*.tmp"):
        if not left_behind.fullmatch(left.name):
            continue
        with contextlib.suppress(OSError), _opened(left) as descriptor:  # it may be in use, or a file
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)
    folder = path.with_name(f"{prefix}.{os.urandom(8).hex()}")
    try:
        folder.mkdir()
    except OSError as error:  # a read-only disk: the user knows the folder by the other name
        error.filename = str(path)
        raise
    with _opened(folder) as descriptor:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder = folder.rename(f"{folder}.tmp")  # once it is locked, others will not remove it
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def replace_path(new: Path, path: Path) -> None:
    """Renames ``new``, a file or folder in a `temporary_folder`, to ``path``. A file is replaced atomically; a
    folder replaces whatever has its name, which is removed with the temporary folder. Raises UserError if a folder is
    in the way of a file."""
    if new.is_dir() and os.path.lexists(path):
        os.replace(path, new.with_name(f"{new.name}.old"))
    try:
        os.replace(new, path)
    except IsADirectoryError:
        raise UserError(f"{path}: a folder of this name is in the way of a file; rename or remove it") from None
