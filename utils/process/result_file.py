"""The result file, with which a command reports its result to the process that started it (child.py).

Each line is a JSON mapping. All processes of a run append to the file, and the newest value of a key counts.

| key | written by | value |
| --- | --- | --- |
| folder | training, validation | the run's folder |
| begun | `report_begun` | true once a run has its folder, or a scoring of `tools.kfold` its model and data |
| files | export.py | the exported files |
| issues, and the rest of the ``--json`` output | tools.check | issues of a data set |
| error | `utils.process.entrypoint.run_main` | the line about the error that ended a process |
| cause | `utils.process.entrypoint.run_main` | the `Cause` of this error, for `outcome_of` |
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from utils.machine.limits import Cause

RESULT_VARIABLE = "LOCKSTEP_RESULT"  # path of the result file of the process that is started with it

_path = ""  # the result file of this process, or "" if its result is not read


def claim_result_file() -> None:
    """Reads `RESULT_VARIABLE` and removes it from the environment, so that commands started by a callback do not
    inherit it."""
    global _path
    _path = os.environ.pop(RESULT_VARIABLE, "")


def result_variables() -> dict[str, str]:
    """Returns the environment variables for a process that does part of this one's work and shares its result file."""
    return {RESULT_VARIABLE: _path} if _path else {}


def write_result(**values: Any) -> bool:
    """Appends ``values`` to the result file. Returns False if there is none or they cannot be written (a full disk)."""
    if not _path:
        return False
    line = f"\n{json.dumps(values)}".encode()
    try:
        with open(_path, "ab", buffering=0) as file:
            return file.write(line) == len(line)  # in one write, because all processes of a run share the file
    except OSError:
        return False


def read_result(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the values that processes wrote with `write_result`. Skips incomplete lines."""
    values: dict[str, Any] = {}
    with suppress(OSError):
        for line in Path(path).read_bytes().splitlines():
            with suppress(ValueError):
                values |= json.loads(line)
    return values


def report_begun(folder: str | os.PathLike[str]) -> None:
    """Records that the work of a command has begun in ``folder``. From now on, it can fail (`outcome_of`)."""
    write_result(folder=os.fspath(folder), begun=True)


def report_error(line: str, cause: Cause = Cause.COMMAND, *, is_peer_lost: bool = False) -> bool:
    """Writes the error line of a failed command, and the cause, to the result file. Returns False if that fails.

    ``is_peer_lost``: the error is that another process of the run was lost. If that process has written a line itself,
    its line is kept, because it states the reason.
    """
    if is_peer_lost and _path and "error" in read_result(_path):
        return True
    return write_result(error=line, cause=cause)
