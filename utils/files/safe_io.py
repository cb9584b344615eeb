"""Atomic writes, and reads of regular files only.

A reader of a file that `atomic_write` replaces finds either the old or the new content, even after a crash or on a full
disk. Reads check the kind and size of a file first: opening a pipe blocks, a device has no end, and a file can be far
too large.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import filelock

from utils.errors import UserError, os_reason
from utils.files.encoding import EncodingError, decode_utf8

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8,16}\.tmp")  # names of `atomic_write`
# Flags that some systems lack: without O_BINARY, Windows translates line ends; it has no pipes among its files.
_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_FORMULA = (*"=+-@\t\r\n", *"\uff1d\uff0b\uff0d\uff20")  # the last four are full-width


@contextlib.contextmanager
def atomic_write(path: str | Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """Yields a temporary file that replaces ``path`` when the block ends. If the block raises, ``path`` is unchanged.
    An OSError names ``path``, whichever call failed.

    ``durable`` makes the file survive a power cut, by fsync of the content, and of the folder if the file system
    supports it. Use it for content that took long to compute, and for files whose existence marks others as complete.
    """
    path = Path(path)
    start_of_name = os.fsencode(path.name)[:200].decode(errors="ignore")  # a name may have 255 bytes
    temporary = path.with_name(f".{start_of_name}.{os.urandom(8).hex()}.tmp")  # other nodes may write the same file
    try:
        with open(temporary, "x+b") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                filelock.lock_descriptor(file.fileno(), blocking=False)
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename = str(path)
            del error.filename2  # the name that `os.replace` was to give; None would be shown
        raise
    if durable:
        with contextlib.suppress(OSError):
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def remove_half_written(folder: str | Path) -> None:
    """Removes temporary files of `atomic_write` that killed processes left in ``folder``. Files that a process is
    writing are locked, and are kept, as are those of other programs."""
    for path in Path(folder).glob(".*.tmp"):
        if not _TEMPORARY.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):
            with open(path, "rb", opener=open_direct) as file:
                is_left = filelock.lock_descriptor(file.fileno(), blocking=False)
                is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            if is_left and is_file:  # Windows removes no open file
                path.unlink()


def write_whole(path: str | Path, content: bytes | str, *, durable: bool = False) -> None:
    """Replaces ``path`` atomically with ``content``. Text is UTF-8; undecodable bytes of file names are escaped.
    ``durable``: see `atomic_write`."""
    with atomic_write(path, durable=durable) as file:
        file.write(content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace"))


def write_csv(path: str | Path, rows: Iterable[Iterable[Any]]) -> None:
    """Replaces ``path`` atomically with the table `csv_text`."""
    write_whole(path, csv_text(rows))


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Returns a table as text whose lines end with LF and whose cells are escaped by `csv_cell`."""
    import csv  # not needed for --help

    text = io.StringIO(newline="")
    writer = csv.writer(text)  # with "\n" as its line terminator, it would not quote a "\r" in a cell
    lines: list[str] = []
    for row in rows:
        text.seek(0)
        text.truncate()
        writer.writerow(map(csv_cell, row))
        lines.append(text.getvalue().removesuffix("\r\n"))
    return "".join(f"{line}\n" for line in lines)


def csv_cell(value: Any) -> Any:
    """Prefixes text that spreadsheets would evaluate as a formula with an apostrophe (OWASP, CSV injection). Numbers,
    including those written as text, are unchanged."""
    if not isinstance(value, str) or not value.startswith(_FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def open_regular(path: str | os.PathLike, max_bytes: int | None = None) -> BinaryIO:
    """Opens a regular file of at most ``max_bytes`` bytes for reading. Raises OSError, with a reason, for others."""
    return os.fdopen(open_descriptor(path, max_bytes)[0], "rb")


def read_regular(path: str | os.PathLike, max_bytes: int | None = None) -> bytes:
    """Reads a regular file of at most ``max_bytes`` bytes. Raises as `open_regular` does."""
    handle, status = open_descriptor(path, max_bytes)
    try:
        data = os.read(handle, status.st_size + 1)
        if len(data) == status.st_size:
            return data
        parts = [data]
        while parts[-1]:  # the file grows, or is larger than one read returns
            parts.append(os.read(handle, 1 << 24))
        return b"".join(parts)
    finally:
        os.close(handle)


def read_text(path: str | os.PathLike, max_bytes: int | None = None) -> str:
    """Reads a UTF-8 file, with or without a byte order mark. Raises UserError if it cannot be read."""
    try:
        return decode_utf8(read_regular(path, max_bytes))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except EncodingError as error:
        raise UserError(f"{path}: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({os_reason(error)})") from None
    except MemoryError:
        raise UserError(f"{path}: is larger than the memory of this machine") from None


def open_direct(path: str | os.PathLike, flags: int) -> int:
    """Opens a file of a run; an ``opener`` for `open`. It neither follows a symbolic link, which could lead out of the
    folder, nor waits for the reader of a pipe: both raise PermissionError."""
    try:
        return os.open(path, flags | _FLAGS | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise PermissionError(errno.EPERM, "is a symbolic link or a pipe, not a file", os.fspath(path)) from None


def open_new(path: str | os.PathLike) -> BinaryIO:
    """Opens a new file in place of the one, or the link, that has its name. Other names of the old file keep its
    content."""
    Path(path).unlink(missing_ok=True)
    return open(path, "xb")


def folder_below(root: str | os.PathLike, name: str | os.PathLike) -> Path:
    """Makes the folder ``name`` below ``root``, unless it exists, and returns its path. Raises PermissionError for a
    symbolic link or a file below ``root``."""
    path = Path(root)
    for part in Path(name).parts:
        path /= part
        with contextlib.suppress(FileExistsError):
            path.mkdir()
        if path.is_symlink() or not path.is_dir():
            raise PermissionError(errno.EPERM, "is a symbolic link or a file, not a folder", str(path))
    return path


def sha256_of(path: str | os.PathLike) -> str:
    """Returns the sha256 of a file, in hex digits."""
    import hashlib  # not needed for --help

    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def path_of_open(descriptor: int) -> str:
    """Returns a path of an open file that remains its own when another file takes its name; "" on Windows, where no
    other can."""
    return f"/dev/fd/{descriptor}" if os.name == "posix" else ""


def open_descriptor(path: str | os.PathLike, max_bytes: int | None = None) -> tuple[int, os.stat_result]:
    """Opens a regular file of at most ``max_bytes`` bytes. Returns a descriptor and its status. Raises OSError, with a
    reason, for others."""
    # Without O_NONBLOCK, opening a pipe would wait for the process at its other end.
    handle = os.open(path, os.O_RDONLY | _FLAGS)
    status = os.fstat(handle)
    try:
        if stat.S_ISDIR(status.st_mode):
            raise OSError(errno.EISDIR, "is a folder, not a file", os.fspath(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is a pipe or device, not a file", os.fspath(path))
        if max_bytes is not None and status.st_size > max_bytes:
            reason = f"has {status.st_size:,} bytes, more than such a file can need"
            raise OSError(errno.EFBIG, reason, os.fspath(path))
    except OSError:
        os.close(handle)
        raise
    return handle, status
