"""The result file: how a command tells the process that has started it (utils/child.py) what it has done.

Each line is a mapping in JSON; all processes of a run append to the file, and the newest value of a key counts.

| key | written by | value |
| --- | --- | --- |
| folder | a training, a validation | the folder of the run |
| begun | `report_begun` | true as soon as a training has a folder, or a scoring of `tools.kfold` its model and data |
| files | export.py | the exported files |
| issues, and all else that ``--json`` prints | tools.check | what was found in a data set |
| error | `utils.process.entrypoint.run_main` | the line about the error that has ended a process |
| cause | `utils.process.entrypoint.run_main` | the `Cause` of this error, for `outcome_of` |
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from utils.process.outcome import Cause

RESULT_VARIABLE = "LOCKSTEP_RESULT"  # names the result file of the process that is started with it

_path = ""  # the result file of this process; "": nobody reads its result


def take_result_file() -> None:
    """Reads `RESULT_VARIABLE` and removes it from the environment, so that commands started by a callback do not
    inherit it."""
    global _path
    _path = os.environ.pop(RESULT_VARIABLE, "")


def result_variables() -> dict[str, str]:
    """Returns the environment variables for a process that does part of this one's work, and shares its result file."""
    return {RESULT_VARIABLE: _path} if _path else {}


def write_result(**values: Any) -> bool:
    """Adds ``values`` to the result file. Returns whether they are in it: there may be none, or its disk may be
    full."""
    if not _path:
        return False
    line = f"\n{json.dumps(values)}".encode()
    try:
        with open(_path, "ab", buffering=0) as file:
            return file.write(line) == len(line)  # at once, as all processes of a run have the same file
    except OSError:
        return False


def read_result(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads what processes have written with `write_result`, without lines that are incomplete."""
    values: dict[str, Any] = {}
    with suppress(OSError):
        for line in Path(path).read_bytes().splitlines():
            with suppress(ValueError):
                values |= json.loads(line)
    return values


def report_begun(folder: str | os.PathLike[str]) -> None:
    """Records that the work of a command has begun, in ``folder``: from now on it can fail (`outcome_of`)."""
    write_result(folder=os.fspath(folder), begun=True)


def report_error(line: str, cause: Cause = Cause.COMMAND, *, is_peer_lost: bool = False) -> bool:
    """Writes why a command is not done to the result file. Returns False if that is not possible.

    ``is_peer_lost``: the error is that another process of the run was lost. If that one has written a line itself, the
    line stays, as it says why.
    """
    if is_peer_lost and _path and "error" in read_result(_path):
        return True
    return write_result(error=line, cause=cause)
