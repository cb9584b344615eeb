"""Folders of runs (exp, exp2, ...) and caches, and the location of the data set that a checkpoint names."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.errors import UserError

PROJECT = Path(__file__).parents[2]
CONFIGS = PROJECT / "configs"


def check_run_dir(project: str | Path, name: str, exist_ok: bool = False) -> None:
    """Raises the UserError that `increment_path` would raise, as far as it can be predicted without side effects."""
    base = Path(project) / name
    try:
        if exist_ok and base.exists() and not base.is_dir():
            raise FileExistsError
        there = next(folder for folder in base.parents if folder.exists())
        if not there.is_dir():
            raise NotADirectoryError
        with tempfile.TemporaryDirectory(prefix=".", dir=there):
            pass
    except OSError as error:
        raise _refusal(base, error) from None


def increment_path(project: str | Path, name: str, exist_ok: bool = False) -> Path:
    """Creates and returns ``project/name``, or the first of ``name2``, ``name3``, ... that does not exist.

    Creating the folder claims it, so two runs started at the same time get different ones. With ``exist_ok`` an
    existing ``project/name`` is returned.
    """
    base = Path(project) / name
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        if exist_ok:
            base.mkdir(exist_ok=True)
            return base
        for number in itertools.count(1):
            path = base if number == 1 else base.with_name(f"{base.name}{number}")
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
    except OSError as error:
        raise _refusal(base, error) from None
    raise AssertionError("unreachable")


def _refusal(base: Path, error: OSError) -> UserError:
    if isinstance(error, FileExistsError | NotADirectoryError):
        return UserError(f"{base}: a file of that name is in the way; choose another --project or --name")
    reason = (error.strerror or str(error)).lower()
    return UserError(f"{base}: cannot be created ({reason}); choose another --project")


def describe_location(source: str | Path, root: str, folder: str | Path) -> dict[str, str]:
    """The location that a checkpoint stores: absolute paths, and the same relative to the folder of the run.

    Args:
        source: the data set's YAML.
        root: the folder that its entries are relative to; "" to leave it out.
        folder: of the run.
    """
    paths = {"source": os.path.abspath(source)} | ({"root": os.path.abspath(root)} if root else {})
    return paths | {f"{name}_from_run": os.path.relpath(path, folder) for name, path in paths.items()}


def find_location(stored: Mapping[str, Any], checkpoint: str | Path) -> tuple[str, str]:
    """The data set's YAML and the folder that its entries are relative to; "" if the checkpoint does not have them.

    A path is looked up as it was stored, then from the checkpoint's folder. Earlier checkpoints hold the YAML as the
    command line named it: relative paths are looked up from here, then from the folders above the checkpoint.

    Args:
        stored: a checkpoint's ``data``.
        checkpoint: its path.
    """
    folder = Path(checkpoint).absolute().parent
    return _find(stored, "source", folder), _find(stored, "root", folder)


def _find(stored: Mapping[str, Any], name: str, folder: Path) -> str:
    path, from_run = str(stored.get(name, "")), str(stored.get(f"{name}_from_run", ""))
    if not path or Path(path).exists():
        return path
    candidates = [folder / from_run] if from_run else []
    if not Path(path).is_absolute():
        candidates += [above / path for above in folder.parents]
    return next((os.path.normpath(candidate) for candidate in candidates if candidate.exists()), path)


SHARED_MEMORY = Path("/dev/shm")  # a file system in memory


def cache_folder(cache_dir: str = "") -> Path:
    """``cache_dir`` if given, else $XDG_CACHE_HOME/lockstep, or ~/.cache/lockstep."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lockstep"
