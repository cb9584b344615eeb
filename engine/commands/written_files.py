"""The list of the files that val.py and detect.py write, which differ by their input.

The next command that uses the folder again (``--exist-ok``) removes the listed files and nothing else.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from utils.files.safe_io import open_direct, read_regular

LIST_NAME = ".written"
_MAX_LIST_BYTES = 1 << 28


class WrittenFiles:
    """The list of the files that a command writes into its ``folder``. It is created with the first file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: set[str] = set()

    def add(self, path: Path) -> Path:
        """Lists ``path``, before it is written, and returns it."""
        name = path.relative_to(self._folder).as_posix()
        if name not in self._names:
            self._names.add(name)
            with open(self._folder / LIST_NAME, "ab", opener=open_direct) as file:
                file.write(os.fsencode(name) + b"\0")
        return path


@contextlib.contextmanager
def listing_written(folder: Path) -> Iterator[None]:
    """Lists the files that the block makes or replaces in ``folder`` itself."""

    def stamps() -> dict[Path, tuple[int, int]]:
        files = (entry for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False))
        return {Path(entry.path): (entry.inode(), entry.stat().st_mtime_ns) for entry in files}

    before = stamps()
    try:
        yield
    finally:
        written = WrittenFiles(folder)
        for path, stamp in sorted(stamps().items()):
            if before.get(path) != stamp:
                written.add(path)


def remove_written(folder: Path) -> int:
    """Removes the files that an earlier command has listed in ``folder``, and the folders that this leaves empty.
    Returns the number of files. Listed files outside of ``folder`` are left alone: no command lists such files."""
    listed = folder / LIST_NAME
    if listed.is_symlink() or not listed.is_file():
        return 0
    try:
        names = read_regular(listed, _MAX_LIST_BYTES).split(b"\0")[:-1]
    except OSError:
        return 0
    removed = 0
    parents: set[Path] = set()
    for path in (folder / os.fsdecode(name) for name in names):
        is_inside = ".." not in path.parts and path.parent.resolve().is_relative_to(folder.resolve())
        if is_inside and path.is_file():
            path.unlink()
            removed += 1
            parents |= {parent for parent in path.parents if folder in parent.parents}
    for parent in sorted(parents, key=lambda path: len(path.parts), reverse=True):
        with contextlib.suppress(OSError):  # other files are in it
            parent.rmdir()
    listed.unlink()
    return removed
