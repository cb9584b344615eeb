"""Files replaced whole: whoever looks, also after a crash or on a full disk, finds the old file or the new one."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: str | Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """A file to write into that takes the place of ``path`` when the block ends; if it raises, ``path`` is untouched.

    Args:
        durable: also survive a power cut: fsync the content, and the folder where the file system can.

    Raises OSError naming ``path``, whichever call failed.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name[:60]}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
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
    """Replaces ``path`` by ``content``; text as UTF-8, where bytes of file names that are none are escaped."""
    with replacing(path) as file:
        file.write(content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace"))


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
