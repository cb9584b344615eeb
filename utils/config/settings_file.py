"""Passes settings as values to a process that this program starts: ``train.py @FILE``.

Flags cannot do that: no flag sets an empty list, and a command line that omits default values cannot reset a resumed
run to a default.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.errors import UserError, os_reason
from utils.files.safe_io import read_text
from utils.files.temporary_folder import program_temporary_folder

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PREFIX = "@"  # of the word on the command line; the rest of the word is the path of the file
_MAX_BYTES = 1 << 26


@contextlib.contextmanager
def settings_file(config: DataclassInstance, names: Collection[str] | None = None) -> Iterator[str]:
    """Writes the settings ``names`` (None: all) of ``config`` to a file during the block, and yields the argument
    ``@FILE`` that passes them to a command. Only this user can access the file, because it can name code to run
    (``--callbacks``). Raises UserError if the system's folder for temporary files is missing, full or read-only."""
    values = {name: value for name, value in dataclasses.asdict(config).items() if names is None or name in names}
    with program_temporary_folder("settings") as folder:
        path = folder / "settings.json"
        try:
            path.write_text(json.dumps(values), encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"{path}: the settings cannot be written ({os_reason(error)}); set TMPDIR to another folder"
            ) from None
        yield f"{PREFIX}{path}"


def read_settings_file(path: Path) -> dict[str, Any]:
    """Returns the content of a file that `settings_file` wrote. Raises UserError for other files."""
    text = read_text(path, _MAX_BYTES)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a file of settings")
    return values
