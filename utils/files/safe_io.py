"""Atomic writes, and reads that are restricted to regular files.

A reader of a file that `atomic_write` replaces finds either the old or the new content, also after a crash or on a full
disk. `open_regular` refuses pipes, which block, devices, which have no end, and files that are far too large.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from utils.errors import UserError
from utils.files.checked_open import open_descriptor

_FORMULA = (*"=+-@\t\r\n", *"\uff1d\uff0b\uff0d\uff20")  # the last four are full-width


@contextlib.contextmanager
def atomic_write(path: str | Path, *, durable: bool = False, locked: bool = False) -> Iterator[BinaryIO]:
    """A temporary file that replaces ``path`` when the block ends; if the block raises, ``path`` is unchanged.

    Args:
        durable: survive a power cut: fsync the content, and the folder if the file system supports it.
        locked: lock the temporary file while it is written, and first remove those that killed processes left behind.

    Raises OSError naming ``path``, whichever call failed.
    """
    path = Path(path)
    prefix = f".{path.name[:60]}"
    temporary = path.with_name(f"{prefix}.{os.urandom(8).hex()}.tmp")  # other nodes may write the same file
    if locked:
        from utils.files.locks import flock, remove_abandoned  # with logging; --help reads YAML with this module

        remove_abandoned(path.parent.glob(f"{prefix}.*.tmp"))
    try:
        with open(temporary, "xb") as file:
            if locked:
                with contextlib.suppress(OSError):  # a file system without locks
                    flock(file.fileno())
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename, error.filename2 = str(path), None
        raise
    if durable:
        _sync_folder(path.parent)


def write_whole(path: str | Path, content: bytes | str) -> None:
    """Replaces ``path`` atomically by ``content``. Text is UTF-8; undecodable bytes of file names are escaped."""
    with atomic_write(path) as file:
        file.write(content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace"))


def write_csv(path: str | Path, rows: Iterable[Iterable[Any]]) -> None:
    """Replaces ``path`` atomically by a table; text is that of `csv_cell`."""
    import csv  # not for --help

    text = io.StringIO()
    csv.writer(text).writerows(map(csv_cell, row) for row in rows)
    write_whole(path, text.getvalue())


def csv_cell(value: Any) -> Any:
    """``value``, with an apostrophe before text that spreadsheets would compute as a formula (OWASP, CSV injection).
    Numbers stay, also as text."""
    if not isinstance(value, str) or not value.startswith(_FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def open_regular(path: str | os.PathLike, most: int | None = None) -> BinaryIO:
    """Opens a file for reading. Raises OSError, with a reason for the user, if it is not a regular file or has more
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
        while parts[-1]:  # it grows, or is larger than one read returns
            parts.append(os.read(handle, 1 << 24))
        return b"".join(parts)
    finally:
        os.close(handle)


def read_text(path: str | os.PathLike, most: int | None = None) -> str:
    """The text of a UTF-8 file, without a byte order mark. Raises UserError if it cannot be read."""
    try:
        return read_regular(path, most).decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except MemoryError:
        raise UserError(f"{path}: is larger than the memory of this machine") from None


def _descriptor(path: str | os.PathLike, most: int | None) -> tuple[int, int]:
    """An open file and its size in bytes."""
    handle, status = open_descriptor(path)
    if most is not None and status.st_size > most:
        os.close(handle)
        reason = f"has {status.st_size / 2**30:,.2f} GiB, more than such a file can need"
        raise OSError(errno.EFBIG, reason, os.fspath(path))
    return handle, status.st_size
