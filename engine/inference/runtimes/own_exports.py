"""The exported files that this user has made, which are opened without ``trust``.

The SHA-256 of each is in the user's own cache folder. A checksum beside the file would prove nothing: whoever supplies
the file supplies the checksum.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path

from engine.inference.runtimes.backends import openvino_files
from utils.errors import UserError
from utils.files.folders import cache_folder
from utils.files.safe_io import open_regular, read_regular
from utils.logger import get_logger

RECORD = "exports.sha256"  # in the cache folder: a line for each file


def record_export(written: Path, path: Path) -> None:
    """Records that this user has made ``written``, which will be at ``path``. Logs a warning if that fails."""
    record = cache_folder() / RECORD
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        _check_private(record.parent, stat.S_IWOTH)
        with open(record, "a", encoding="ascii", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            _check_private(record, stat.S_IWGRP | stat.S_IWOTH)
            file.write(f"{_digest(written)}\n")
    except OSError as error:
        reason = error.strerror or error
        get_logger().warning("%s: cannot be recorded as yours in %s (%s); open it with --trust", path, record, reason)


def is_own_export(path: Path) -> bool:
    """Whether `record_export` has recorded what ``path`` holds now, by this or another name. Raises UserError for a
    file that cannot be read."""
    record = cache_folder() / RECORD
    try:
        _check_private(record.parent, stat.S_IWOTH)
        _check_private(record, stat.S_IWGRP | stat.S_IWOTH)
        recorded = read_regular(record)
    except OSError:
        return False
    try:
        return _digest(path).encode() in recorded
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None


def _check_private(path: Path, forbidden: int) -> None:
    """Raises OSError if a file or folder is another user's, or its mode has one of the bits ``forbidden``."""
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & forbidden:
        raise PermissionError(errno.EPERM, f"{path.name} belongs to other users, or they may write to it")


def _digest(path: Path) -> str:
    """The SHA-256 of a file as hex; of an OpenVINO model, of the SHA-256 of all files that are read."""
    if path.suffix.lower() != ".xml" and not path.is_dir():
        return _sha256(path)
    return hashlib.sha256("".join(map(_sha256, openvino_files(path))).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
