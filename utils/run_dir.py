"""Folders of runs: exp, exp2, exp3, ..."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

from utils.errors import UserError


def check_run_dir(project: str | Path, name: str, exist_ok: bool = False) -> None:
    """Raises the UserError that `increment_path` would raise, as far as that can be known without leaving a trace."""
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

    Making the folder is what claims it, so two runs started together get different ones. With ``exist_ok`` an
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
