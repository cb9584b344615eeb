"""The exported files that this user has made, which are opened without ``trust``.

The SHA-256 of each is in the user's own cache folder. A checksum next to the file would prove nothing: whoever supplies
the file supplies the checksum.
"""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

from engine.inference.runtimes.backends import openvino_files
from utils.errors import UserError
from utils.files.folders import cache_folder
from utils.files.safe_io import OTHERS_WRITE, make_own_folder, open_regular
from utils.logger import get_logger

RECORD = Path("exports", "sha256")  # in the cache folder: a line for each file


def record_export(written: Path, path: Path) -> None:
    """Records that this user has made ``written``, which will be at ``path``. Logs a warning if that fails."""
    record = cache_folder() / RECORD
    try:
        record.parent.parent.mkdir(parents=True, exist_ok=True)
        make_own_folder(record.parent)
        with open(record, "a", encoding="ascii", opener=_open_private) as file:
            file.write(f"\n{_digest(written)}\n")  # after an incomplete line
    except OSError as error:
        reason = error.strerror or error
        get_logger().warning("%s: cannot be recorded as yours in %s (%s); open it with --trust", path, record, reason)


def is_own_export(path: Path) -> bool:
    """Whether `record_export` has recorded what ``path`` holds now, by this or another name. Raises UserError for a
    file that cannot be read."""
    try:
        with open(cache_folder() / RECORD, "rb", opener=_open_private) as file:
            recorded = file.read().split(b"\n")
    except OSError:
        return False
    try:
        return _digest(path).encode() in recorded
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None


def _open_private(path: str, flags: int) -> int:
    """Opens a file. Raises OSError if it or its folder is another user's, or others may write to it."""
    _check_private(path, os.lstat(os.path.dirname(path)))
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        _check_private(path, os.fstat(handle))
    except BaseException:
        os.close(handle)
        raise
    return handle


def _check_private(path: str, status: os.stat_result) -> None:
    if status.st_uid != os.getuid() or status.st_mode & OTHERS_WRITE:
        raise PermissionError(errno.EPERM, "it or its folder belongs to other users, or they may write to it", path)


def _digest(path: Path) -> str:
    """The SHA-256 of a file as hex; of an OpenVINO model, of the SHA-256 of all files that are read."""
    if path.suffix.lower() != ".xml" and not path.is_dir():
        return _sha256(path)
    return hashlib.sha256("".join(map(_sha256, openvino_files(path))).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
