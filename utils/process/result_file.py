"""The result file, with which a command reports its result to the process that started it (utils/child.py).

Each line is a JSON mapping. All processes of a run append to the file, and the newest value of a key counts.

| key | written by | value |
| --- | --- | --- |
| folder | training, validation | the run's folder |
| begun | training (`report_begun`) | true once the run has created its folder, or continues in one |
| files | export.py | the exported files |
| issues, and the rest of the ``--json`` output | tools.check | findings in a data set |
| error | `utils.process.entrypoint.run_main` | the line about the error that ended a process |
| outcome | the same | the command's `Outcome` according to this error (`report_error`) |
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

RESULT_VARIABLE = "LOCKSTEP_RESULT"  # path of the result file of the process that is started with it


class Outcome(StrEnum):
    """How a command ended, and how a program that started it for training or scoring reacts.

    | outcome | `tools.kfold`, `tools.search` | Ray |
    | --- | --- | --- |
    | DONE | go on | ends |
    | PRUNED | the search goes on with the next trial | |
    | STOPPED | end; the same command continues | tries again |
    | REFUSED | end, and keep the results so far; another try would be refused again | ends |
    | LOST | try once more, then end and keep the results so far; the same command continues | tries again |
    | FAILED | cross-validation ends; a search counts the trial as failed, and removes its weights | tries again |
    """

    DONE = "done"
    PRUNED = "pruned"  # ended early by the process that started it
    STOPPED = "stopped"  # by a signal; a run that had started can be resumed
    REFUSED = "refused"  # before it started, or because of a full disk
    LOST = "lost"  # one of its processes was killed, hangs, or did not join the others
    FAILED = "failed"  # while it was running


_path = ""  # the result file of this process, or "" if its result is not read


def take_result_file() -> None:
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
    """Records that training has begun, or continues, in ``folder``. From now on, errors of the run other than a full
    disk or a lost process count as failures, not refusals."""
    write_result(folder=os.fspath(folder), begun=True)


def report_error(line: str, *, is_disk_full: bool = False, is_peer_lost: bool = False) -> None:
    """Writes the error line and the outcome of a failed command to the result file. If that fails, prints the line.

    | reason | outcome before training has begun | after |
    | --- | --- | --- |
    | another process of the run was lost (`utils.errors.PeerLost`) | LOST | LOST |
    | the disk is full | REFUSED | REFUSED |
    | any other | REFUSED | FAILED |

    If the lost process has written a line itself, that line is kept, because it states the reason.
    """
    results = read_result(_path) if _path else {}  # of all processes; only one reports that the run has begun
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
