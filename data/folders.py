"""Reads folders, each once, and finds files in them by name.

Entries whose names begin with a dot are hidden and not read, such as macOS's ``._x.jpg`` and ``.ipynb_checkpoints``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from stat import S_ISREG

from utils.errors import UserError, os_reason
from utils.files.paths import casefold_nfc, relative_name

ABSENT = (-1, -1)  # stamp where nothing can be read
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG)


class Folders:
    """Looks up folders and files by absolute path. Each folder is read once.

    ``root``: the data set's folder, to which names are relative; ``is_bounded``: whether labels must be in it.
    """

    def __init__(self, root: Path, *, is_bounded: bool = False) -> None:
        self.root = root
        self.is_bounded = is_bounded
        self._entries: dict[str, dict[str, os.DirEntry]] = {}
        self._folded: dict[str, dict[str, list[str]]] = {}
        self._prefixes: dict[str, str] = {}

    def entries(self, folder: str) -> dict[str, os.DirEntry]:
        """Returns the entries of a folder by name, sorted. Raises UserError if it cannot be listed."""
        if folder not in self._entries:
            try:
                with os.scandir(folder) as scanned:
                    visible = [entry for entry in scanned if not entry.name.startswith(".")]
            except OSError as error:
                raise UserError(f"{folder}: cannot be listed ({os_reason(error)})") from None
            self._entries[folder] = {entry.name: entry for entry in sorted(visible, key=attrgetter("name"))}
        return self._entries[folder]

    def walk(self, folder: str, *, skips_unlisted: bool = False) -> Iterator[str]:
        """Yields ``folder`` and the folders below it, also through links, but not through a link to a folder that it
        is in, which would have no end. Raises UserError for a folder that cannot be listed, or skips it."""
        pending: list[tuple[str, tuple[str, ...]]] = [
            (folder, (os.path.realpath(folder),))
        ]  # with its real path and those above it
        while pending:
            path, reals = pending.pop()
            try:
                entries = self.entries(path)
            except UserError:
                if skips_unlisted:
                    continue
                raise
            yield path
            for entry in reversed(entries.values()):
                if not entry.is_symlink():
                    if entry.is_dir():
                        pending.append((entry.path, (*reals, os.path.join(reals[-1], entry.name))))
                elif os.path.isdir(entry.path):  # `DirEntry.is_dir` raises for some links
                    real = os.path.realpath(entry.path)
                    if not any(Path(above).is_relative_to(real) for above in reals):
                        pending.append((entry.path, (*reals, real)))

    def find(self, folder: str, name: str) -> str | None:
        """Returns the name of the entry called ``name``, or else of the only one that differs from it at most in case
        or Unicode composition; None if there is none or several, or no such folder."""
        if folder not in self._entries and not os.path.isdir(folder):
            return None
        entries = self.entries(folder)
        if name in entries:
            return name
        if folder not in self._folded:
            by_name: dict[str, list[str]] = {}
            for other in entries:
                by_name.setdefault(casefold_nfc(other), []).append(other)
            self._folded[folder] = by_name
        alike = self._folded[folder].get(casefold_nfc(name), ())
        return alike[0] if len(alike) == 1 else None

    def find_below(self, folder: str, parts: list[str]) -> str | None:
        """Returns the path below ``folder`` that consists of ``parts``, each found by `find`; None if there is none."""
        for part in parts:
            name = part if os.path.lexists(os.path.join(folder, part)) else self.find(folder, part)
            if name is None:
                return None
            folder = os.path.join(folder, name)
        return folder

    def prefix(self, folder: str) -> str:
        """Returns the start, "" or "a/b/", of the names of files in ``folder``."""
        if folder not in self._prefixes:
            name = relative_name(folder, self.root)
            self._prefixes[folder] = "" if name == "." else f"{name}/"
        return self._prefixes[folder]


def stamp_of(file: str | os.PathLike) -> tuple[int, int]:
    """Returns the size and modification time (ns) of a regular file; `ABSENT` if there is none, or only a broken link
    or one that this user may not read. Raises OSError if the disk fails."""
    try:
        status = os.stat(file)
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return ABSENT
        raise
    return (status.st_size, status.st_mtime_ns) if S_ISREG(status.st_mode) else ABSENT
