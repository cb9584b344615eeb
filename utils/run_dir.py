"""Folders of runs: exp, exp2, exp3, ..."""

from __future__ import annotations

import itertools
from pathlib import Path

from utils.errors import UserError


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
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{base}: a file of that name is in the way; choose another --project or --name") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"{base}: cannot be created ({reason}); choose another --project") from None
    raise AssertionError("unreachable")
