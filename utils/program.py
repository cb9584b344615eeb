"""This program: its version, and how another process starts one of its commands and gets the result."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

VERSION = "0.1.0"
STARTED = time.monotonic()  # about when this process started
IS_INSTALLED = __name__.startswith("lockstep.")
RESULT_VARIABLE = "LOCKSTEP_RESULT"  # names the file for the result, if another process has started this one


def command_prefix(command: str) -> list[str]:
    """Returns the first words of a command line, for `subprocess`, that runs ``command`` with this Python and the
    command's own code, whatever the working folder contains."""
    package = Path(__file__).parents[1] / ("" if IS_INSTALLED else "lockstep")
    return [sys.executable, str(package / "__main__.py"), command]


def resume_flag(last: str | os.PathLike[str]) -> str:
    """Returns the flag of train.py that continues the run with the checkpoint ``last``. Messages always name the
    checkpoint: without it, ``--resume`` continues the newest run, which may be another one."""
    return f"--resume {shlex.quote(os.fspath(last))}"


def write_result(**values: Any) -> bool:
    """Adds ``values`` to the result file of the process that has started this one: "folder" of a run that has begun or
    continues, exported "files", "issues" of a data set, or the "error" and whether the command was "refused". Returns
    whether they are in such a file: there may be none, or its disk may be full."""
    path = os.environ.get(RESULT_VARIABLE)
    if not path:
        return False
    line = f"\n{json.dumps(values)}".encode()
    try:
        with open(path, "ab", buffering=0) as file:
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


def report_error(line: str, *, is_disk_full: bool = False) -> None:
    """Prints why a command fails, or writes it to the result file of the process that has started this one.

    There it also says whether the command was refused: it has not begun or continued a run, or the disk is full. What
    was trained is then as it was, and another try would end in the same way.
    """
    path = os.environ.get(RESULT_VARIABLE)
    if path:
        has_begun = "folder" in read_result(path)
        if write_result(error=line, refused=is_disk_full or not has_begun):
            return
    print(f"error: {line}", file=sys.stderr, flush=True)
