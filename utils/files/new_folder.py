"""Folders of runs: exp, exp2, ..."""

from __future__ import annotations

from pathlib import Path

from utils.errors import UserError, os_reason
from utils.files.paths import check_output_folder


def check_run_dir(project: str | Path, name: str, exist_ok: bool = False) -> None:
    """Raises UserError if `increment_path` could not create the folder, for use before long work."""
    base = Path(project, name)
    if exist_ok and (base.is_symlink() or (base.exists() and not base.is_dir())):
        raise _explain(base, FileExistsError())
    check_output_folder(base.parent)


def increment_path(project: str | Path, name: str, exist_ok: bool = False) -> Path:
    """Creates and returns ``project/name``, or the first of ``name2``, ``name3``, ... that does not exist; runs that
    start at the same time get different folders. ``exist_ok``: an existing ``project/name`` may be returned.

    Raises UserError if the folder cannot be created.
    """
    base = Path(project, name)
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        path = base
        number = 1
        while True:
            try:
                path.mkdir(exist_ok=exist_ok)
                if path.is_symlink():
                    raise FileExistsError
                return path
            except FileExistsError:
                if exist_ok:  # a file, or a link, which would lead out of the project
                    raise
            number += 1
            path = base.with_name(f"{base.name}{number}")
    except OSError as error:
        raise _explain(base, error) from None


def _explain(base: Path, error: OSError) -> UserError:
    """Returns the error for a run's folder that cannot be created."""
    if isinstance(error, FileExistsError | NotADirectoryError):
        return UserError(f"{base}: a file or a link with this name exists; choose another --project or --name")
    reason = os_reason(error)
    return UserError(f"{base}: cannot be created ({reason}); choose another --project or --name")
