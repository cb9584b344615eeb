"""The result file: how a command tells the process that has started it (utils/child.py) what it has done.

Each line is a mapping in JSON; all processes of a run append to the file, and the newest value of a key counts.

| key | written by | value |
| --- | --- | --- |
| folder | a training, a validation | the folder of the run |
| begun | a training (`report_begun`) | true as soon as it has a folder, or continues in one |
| files | export.py | the exported files |
| issues, and all else that ``--json`` prints | tools.check | what was found in a data set |
| error | `utils.process.entrypoint.run_main` | the line about the error that has ended a process |
| outcome | the same | the `Outcome` of the command that this error means (`report_error`) |
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

RESULT_VARIABLE = "LOCKSTEP_RESULT"  # names the result file of the process that is started with it


class Outcome(StrEnum):
    """The end of a command, and what follows where it is a training, or a scoring, of another program.

    | outcome | `tools.kfold`, `tools.search` | Ray |
    | --- | --- | --- |
    | DONE | go on | ends |
    | PRUNED | the search goes on with the next trial | |
    | STOPPED | end; the same command continues | tries again |
    | REFUSED | end, and keep what there is; unchanged, another try would be refused again | ends |
    | LOST | try once more, then end and keep what there is; the same command continues | tries again |
    | FAILED | the cross-validation ends; the trial of a search has failed, and loses its weights | tries again |
    """

    DONE = "done"
    PRUNED = "pruned"  # ended early by the process that has started it
    STOPPED = "stopped"  # by a signal; a training that had started can be resumed
    REFUSED = "refused"  # before it started, or by a full disk
    LOST = "lost"  # a process of it was killed, hangs, or has not joined the others
    FAILED = "failed"  # while it worked


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
    """Records that a training has begun, or continues, in ``folder``: other errors of the run than a full disk or a
    lost process are failures from now on, no refusals."""
    write_result(folder=os.fspath(folder), begun=True)


def report_error(line: str, *, is_disk_full: bool = False, is_peer_lost: bool = False) -> None:
    """Writes why a command fails, and the outcome, to the result file; prints the line if that is not possible.

    | reason | outcome before a training has begun | after |
    | --- | --- | --- |
    | another process of the run was lost (`utils.errors.PeerLost`) | LOST | LOST |
    | the disk is full | REFUSED | REFUSED |
    | another one | REFUSED | FAILED |

    If the lost process has written a line itself, that one stays, as it says why.
    """
    results = read_result(_path) if _path else {}  # of all processes of the run; one reports for all that it has begun
    if is_peer_lost and "error" in results:
        return
    if is_peer_lost:
        outcome = Outcome.LOST
    elif is_disk_full or not results.get("begun", False):
        outcome = Outcome.REFUSED
    else:
        outcome = Outcome.FAILED
    if not write_result(error=line, outcome=outcome):
        print(f"error: {line}", file=sys.stderr, flush=True)


def report_bug(line: str) -> None:
    """Writes the last line of a traceback, which is printed, to the result file."""
    write_result(error=line, outcome=Outcome.FAILED)
