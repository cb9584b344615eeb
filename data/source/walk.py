"""Reads folders and their entries from the disk, each once, in the order of their names.

Copies of a data set may list their entries in another order, which must not decide which of several findings is the
first, or by which of several links a folder is visited. Entries whose names begin with a dot are hidden and not read,
such as macOS's ``._x.jpg`` and ``.ipynb_checkpoints``.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterator
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, TypeVar

from data.labels.image_names import loose
from data.labels.yolo import folder_with_labels
from data.split_files import FileStamp
from utils.errors import UserError
from utils.files.paths import normal_path, relative_name
from utils.machine.limits import explain_limit

NO_FILE = "a pipe or device, not a file"  # what is at a path, for messages
MAX_ALIASES = 16  # paths under which one folder is visited; a bound for symbolic links that lead to each other
T = TypeVar("T")


class Visit(NamedTuple):
    """A folder visited by `walk`."""

    path: str
    real: str  # without symbolic links
    entries: list[os.DirEntry]  # sorted by name
    hidden: list[os.DirEntry]  # hidden entries without macOS's resource forks


def walk(folder: Path) -> Iterator[Visit]:
    """Yields ``folder`` and the folders below it. Symbolic links are followed, except to a folder above any that is
    visited: a cycle, or a way from the folder of one split to those of others. A folder is visited once per path, but
    at most `MAX_ALIASES` times."""
    start = os.path.realpath(folder)
    pending: list[tuple[str, tuple[str, ...]]] = [(str(folder), (start,))]  # with its real path and those above it
    num_visits: dict[str, int] = {}  # by real path
    while pending:
        path, reals = pending.pop()
        real = reals[-1]
        num_visits[real] = num_visits.get(real, 0) + 1
        if num_visits[real] > MAX_ALIASES:
            continue
        everything = _scan_all(path)
        entries = [entry for entry in everything if not entry.name.startswith(".")]
        for entry in reversed(entries):  # the last one pending is visited next
            if not none_if_missing(entry.is_dir):
                continue
            inner = os.path.join(real, entry.name)
            if entry.is_symlink():
                inner = os.path.realpath(entry.path)
                if any(Path(outer).is_relative_to(inner) for outer in reals):
                    continue
            pending.append((entry.path, (*reals, inner)))
        hidden = []
        if len(entries) < len(everything):
            hidden = [e for e in everything if e.name.startswith(".") and not e.name.startswith("._")]
        yield Visit(path, real, entries, hidden)


def scan(folder: str) -> list[os.DirEntry]:
    """Lists a folder without hidden entries, sorted by name. Raises UserError if it cannot be listed."""
    return [entry for entry in _scan_all(folder) if not entry.name.startswith(".")]


def _scan_all(folder: str) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=attrgetter("name"))
    except OSError as error:
        if explain_limit(error):
            raise
        raise UserError(f"{folder}: cannot be listed ({error.strerror})") from None


def none_if_missing(call: Callable[..., T], *args: str | os.PathLike[str] | int) -> T | None:
    """Returns the result of a call on a file, or None if there is no such file, it is a broken link, or access to it is
    denied (`access_problem`). Raises OSError if the disk fails, because skipping the file would change the data set."""
    try:
        return call(*args)
    except OSError as error:
        if explain_limit(error):
            raise
        return None
    except ValueError:  # a null character in the name
        return None


def false_if_denied(call: Callable[[], bool]) -> bool:
    """Returns the result of a call such as ``path.is_dir``, or False if access to the path is denied, which
    `DatasetSpec.check_split` reports if the split that names it is used."""
    try:
        return call()
    except PermissionError:
        return False


def stamp_of(file: os.DirEntry | Path) -> FileStamp | None:
    """Returns the size and modification time of a file, or None if it does not exist."""
    status = status_of(file)
    return FileStamp(status.st_size, status.st_mtime_ns) if status else None


def status_of(file: os.DirEntry | Path) -> os.stat_result | None:
    """Returns the status of a file, like ``none_if_missing(os.stat, file)`` but faster."""
    try:
        return os.stat(file)  # `DirEntry.stat` caches its result, which would be half the memory of a listing
    except (OSError, ValueError):
        return none_if_missing(os.stat, file)


def access_problem(path: str | os.PathLike) -> str:
    """Returns why nothing can be read at ``path``, for messages, or "" if there is nothing or it can be read."""
    path = os.path.abspath(path)
    try:
        os.stat(path)
    except PermissionError:
        return "permission denied"
    except OSError:  # look for a broken link above it
        while not os.path.lexists(path):
            path = os.path.dirname(path)
    return "" if os.path.exists(path) else "a broken link"


class Folders:
    """Looks up directory entries by absolute path. Each folder is read once.

    ``root``: the data set's folder, to which `name_in` is relative.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._entries: dict[str, dict[str, os.DirEntry]] = {}  # by folder and name
        self._loose: dict[str, dict[str, list[str]]] = {}  # by folder and loose name
        self._by_stem: dict[str, dict[str, list[str]]] = {}  # by folder and stem
        self._prefixes: dict[str, str] = {}
        self._real: dict[str, str] = {}
        self._first_names: dict[str, str] = {}  # by real path
        self._normal: dict[tuple[str, bool], str] = {}  # by folder and ``next_to_labels``

    def entries(self, folder: str) -> dict[str, os.DirEntry]:
        """Returns the entries of a folder by name, or an empty dict if the folder does not exist or access to the one
        above it is denied: rows of lists that were written elsewhere may name such folders."""
        if folder not in self._entries:
            status = none_if_missing(os.stat, folder)  # os.path.isdir returns False if the disk fails
            entries = scan(folder) if status and stat.S_ISDIR(status.st_mode) else []
            self._entries[folder] = {entry.name: entry for entry in entries}
        return self._entries[folder]

    def stamp(self, path: str) -> FileStamp | None:
        folder, name = os.path.split(path)
        entry = self.entries(folder).get(name)
        return stamp_of(entry) if entry else None

    def exists(self, path: str) -> bool:
        return self.stamp(path) is not None

    def is_file(self, path: str) -> bool:
        """Returns whether an existing path is a regular file, or a link to one."""
        folder, name = os.path.split(path)
        return bool(none_if_missing(self.entries(folder)[name].is_file))

    def case_insensitive_match(self, path: str) -> str | None:
        """Returns the only file whose name differs from that of ``path`` at most in case or composition of accents, or
        None if there is no such file or several."""
        folder, name = os.path.split(path)
        if folder not in self._loose:
            by_name: dict[str, list[str]] = {}
            for other in self.entries(folder):
                by_name.setdefault(loose(other), []).append(other)
            self._loose[folder] = by_name
        names = self._loose[folder].get(loose(name), [])
        return os.path.join(folder, names[0]) if len(names) == 1 else None

    def files_of_stem(self, path: str, suffixes: Collection[str]) -> list[str]:
        """Returns the sorted paths of the files with the name of ``path`` and one of the ``suffixes``, in any case."""
        folder, stem = os.path.split(path)
        if folder not in self._by_stem:
            by_stem: dict[str, list[str]] = {}
            for name in self.entries(folder):
                by_stem.setdefault(os.path.splitext(name)[0], []).append(name)
            self._by_stem[folder] = by_stem
        names = self._by_stem[folder].get(stem, ())
        paths = [os.path.join(folder, name) for name in names if os.path.splitext(name)[1].lower() in suffixes]
        return list(filter(self.exists, paths))

    def name_in(self, folder: str) -> str:
        """Returns the prefix, "" or "a/b/", of the names of files in ``folder`` relative to the data set's folder."""
        if folder not in self._prefixes:  # slow to compute
            name = relative_name(folder, self.root)
            self._prefixes[folder] = "" if name == "." else f"{name}/"
        return self._prefixes[folder]

    def real(self, folder: str) -> str:
        """Returns the path of a folder without symbolic links."""
        if folder not in self._real:
            self._real[folder] = os.path.realpath(folder)
        return self._real[folder]

    def real_image(self, path: str) -> str:
        """Returns the path of an image without symbolic links to its folder."""
        folder, name = os.path.split(path)
        return os.path.join(self.real(folder), name)

    def first_name(self, folder: str) -> str:
        """Returns one path for all paths that symbolic links give a folder: the first one this was called with."""
        return self._first_names.setdefault(self.real(folder), folder)

    def normal(self, path: str, *, next_to_labels: bool) -> str:
        """Returns the `normal_path` of an image. ``next_to_labels``: replaces its folder by the one next to labels
        (`folder_with_labels`)."""
        folder, name = os.path.split(path)
        key = (folder, next_to_labels)
        if key not in self._normal:
            normal = str(normal_path(folder))
            self._normal[key] = folder_with_labels(normal) if next_to_labels else normal
        return os.path.join(self._normal[key], name)
