"""Folders of runs (exp, exp2, ...) and caches, and where the data and weights of a checkpoint come from."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from utils.errors import UserError
from utils.files.paths import normal_path, path_of, relative_name

PROJECT = Path(__file__).parents[2]
CONFIGS = PROJECT / "configs"
USABLE_FRACTION = 0.98  # of the free space of a disk that we may fill
UNKNOWN = "unknown"


class Origin(NamedTuple):
    """Origin of weights, as stored in checkpoints and exported files; `UNKNOWN` if it was not recorded."""

    weights: str  # that training started from
    license: str  # of the trained weights


RANDOM = Origin("random weights", "yours to choose (trained from random weights)")


def check_run_dir(project: str | Path, name: str, exist_ok: bool = False) -> None:
    """Raises the UserError that `increment_path` would raise, as far as that can be predicted without side effects."""
    base = _base(project, name)
    try:
        if exist_ok and base.exists() and not base.is_dir():
            raise FileExistsError
        existing = next(folder for folder in base.parents if folder.exists())
        if not existing.is_dir():
            raise NotADirectoryError
        with tempfile.TemporaryDirectory(prefix=".", dir=existing):
            pass
    except OSError as error:
        raise _refusal(base, error) from None


def increment_path(project: str | Path, name: str, exist_ok: bool = False) -> Path:
    """Creates and returns ``project/name``, or the first of ``name2``, ``name3``, ... that does not exist; runs that
    start at the same time get different folders. ``exist_ok``: an existing ``project/name`` may be returned.

    Raises UserError if the folder cannot be created.
    """
    base = _base(project, name)
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        path = base
        number = 1
        while True:
            try:
                path.mkdir(exist_ok=exist_ok)
                return path
            except FileExistsError:
                if exist_ok:  # a file
                    raise
            number += 1
            path = base.with_name(f"{base.name}{number}")
    except OSError as error:
        raise _refusal(base, error) from None


def _base(project: str | Path, name: str) -> Path:
    if not Path(name).name.strip() or ".." in Path(name).parts:  # "", "." and "/" have no name
        raise UserError(f"--name {name!r}: is not the name of a new folder; choose another, such as --name exp")
    return Path(project) / name


def _refusal(base: Path, error: OSError) -> UserError:
    if isinstance(error, FileExistsError | NotADirectoryError):
        return UserError(f"{base}: a file of this name exists; choose another --project or --name")
    reason = (error.strerror or str(error)).lower()
    return UserError(f"{base}: cannot be created ({reason}); choose another --project")


@contextlib.contextmanager
def temporary_folder(path: str | Path) -> Iterator[Path]:
    """Creates a folder next to ``path`` for the block. Its contents can be renamed to ``path`` (`replace_path`).

    It is locked; folders that killed processes left behind are removed first, but not those of other programs. An
    OSError names ``path`` if the folder cannot be made.
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
    """Renames ``new``, a file or folder in a `temporary_folder`, to ``path``. A file is replaced atomically; what is in
    the way of a folder goes with the temporary folder. Raises UserError for a folder that is in the way of a file."""
    if new.is_dir() and os.path.lexists(path):
        os.replace(path, new.with_name(f"{new.name}.old"))
    try:
        os.replace(new, path)
    except IsADirectoryError:
        raise UserError(f"{path}: a folder of this name is in the way of a file; rename or remove it") from None


def file_bytes(path: str | Path) -> int:
    """Returns the size of a file, or of all files in a folder."""
    path = Path(path)
    return sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else (path,)))


def describe_location(source: str | Path, root: str, folder: str | Path) -> dict[str, str]:
    """Describes where a data set is, for a checkpoint: absolute paths, and paths relative to the run's ``folder``.

    ``source``: the YAML. ``root``: the folder that its entries are relative to, or "".
    """
    paths = {"source": str(normal_path(source))}
    if root:
        paths["root"] = str(normal_path(root))
    return paths | {f"{name}_from_run": relative_name(path, folder) for name, path in paths.items()}


def find_location(stored: Mapping[str, Any], checkpoint: str | Path) -> tuple[str, str]:
    """Finds the data set's YAML, and the folder that its entries are relative to, that ``checkpoint`` has ``stored``;
    "" for what it does not have. A path is looked up as it was stored, then relative to the checkpoint's folder."""
    folder = normal_path(checkpoint).parent
    return _stored_path(stored, "source", folder), _stored_path(stored, "root", folder)


def _stored_path(stored: Mapping[str, Any], name: str, folder: Path) -> str:
    """Returns the stored absolute path, or the one relative to the run's ``folder`` if only that exists."""
    path = str(stored.get(name, ""))
    from_run = str(stored.get(f"{name}_from_run", ""))
    moved = path_of(from_run, folder)
    if path and from_run and not Path(path).exists() and os.path.exists(moved):
        return moved
    return path


def cache_folder(cache_dir: str = "") -> Path:
    """Returns ``cache_dir`` if given, else $XDG_CACHE_HOME/lockstep or ~/.cache/lockstep."""
    if cache_dir:
        return Path(os.path.expanduser(cache_dir))
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"
    except RuntimeError:
        raise UserError("this user has no home folder for caches; set HOME or XDG_CACHE_HOME") from None
