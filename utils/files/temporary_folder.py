"""Folders for files that are written: temporary ones, from which they are renamed, and new ones that remain only if the
writing succeeds."""

from __future__ import annotations

import contextlib
import glob
import math
import os
import platform
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir

from utils.errors import UserError
from utils.files.locks import FileLock

_LOCK_NAME = ".lock"  # in a temporary folder


@contextlib.contextmanager
def temporary_folder(path: str | Path) -> Iterator[Path]:
    """Creates a folder next to ``path`` during the block, which only this user can open. Its contents can be renamed to
    ``path`` (`replace_path`).

    The folder is locked. Folders that killed processes left behind are removed first; those of other programs are kept.
    If the folder cannot be created, the OSError names ``path``.
    """
    path = Path(path)
    _remove_left_behind(path)
    try:
        folder, lock = _create_locked(path)
    except OSError as error:  # a read-only disk: the user knows only ``path``
        error.filename = str(path)
        raise
    try:
        yield folder
    finally:
        lock.release()  # first, because Windows removes no open file
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def creating_folder(folder: Path) -> Iterator[None]:
    """Creates ``folder`` and those above it. If the block fails or is interrupted, removes those that it has created,
    unless they contain something by then. Raises OSError if the folder cannot be created."""
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for path in created:
            with contextlib.suppress(OSError):  # it was not created, or another program has written files there
                path.rmdir()
        raise


@contextlib.contextmanager
def program_temporary_folder(purpose: str) -> Iterator[Path]:
    """Creates a `temporary_folder` in the system's folder for temporary files during the block.

    Folders of a killed process are removed by the next one with this ``purpose`` on this machine. The name contains the
    machine's, because machines that share the system's folder may not see each other's locks.
    """
    machine = zlib.crc32(platform.node().encode())  # names of pods may be long
    with temporary_folder(Path(gettempdir(), f"lockstep-{purpose}-{machine:08x}")) as folder:
        yield folder


def _prefix(path: Path) -> str:
    return f".{path.name[:60]}"


def _remove_left_behind(path: Path) -> None:
    """Removes the temporary folders of ``path`` that no process has locked."""
    prefix = _prefix(path)
    is_ours = re.compile(re.escape(prefix) + r"\.[0-9a-f]{16}\.tmp").fullmatch
    for folder in path.parent.glob(f"{glob.escape(prefix)}.*.tmp"):
        if not is_ours(folder.name):
            continue
        lock = FileLock(folder / _LOCK_NAME)
        with contextlib.suppress(OSError):  # it is a file, or belongs to another user
            is_in_use = folder.is_symlink() or bool(lock.acquire()) or not lock.excludes_others
            lock.release()
            if not is_in_use:
                shutil.rmtree(folder)


def _create_locked(path: Path) -> tuple[Path, FileLock]:
    """Creates a temporary folder of ``path``. Returns the folder and its lock."""
    while True:
        folder = path.with_name(f"{_prefix(path)}.{os.urandom(8).hex()}.tmp")
        folder.mkdir(mode=0o700)
        lock = FileLock(folder / _LOCK_NAME)
        with contextlib.suppress(FileNotFoundError):  # another process removed it as left behind
            lock.acquire(math.inf)
            return folder, lock


def replace_path(new: Path, path: Path) -> None:
    """Renames ``new``, a file or folder in a `temporary_folder`, to ``path``. A file replaces ``path`` atomically. If
    ``new`` is a folder, an existing ``path`` is first moved to the temporary folder, and removed with it. Raises
    UserError if a folder is in the way of a file, or has entries that ``new`` does not have."""
    if new.is_dir() and os.path.lexists(path):
        for entry in () if path.is_symlink() else path.rglob("*"):
            if not os.path.lexists(new / entry.relative_to(path)):
                raise UserError(f"{entry}: is not written by this command, which replaces the folder {path}; move it")
        os.replace(path, new.with_name(f"{new.name}.old"))
    try:
        os.replace(new, path)
    except IsADirectoryError:
        raise UserError(f"{path}: a folder of this name is in the way of a file; rename or remove it") from None
