"""This program: its version, and the command lines that start its commands."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path

VERSION = "0.1.0"
IS_INSTALLED = __name__.startswith("lockstep.")
_started = time.monotonic()  # approximate start time of this process, or of the newest command in a user's program


def seconds_since_start() -> float:
    """Returns how long ago the command was started."""
    return time.monotonic() - _started


def restart_clock() -> None:
    """Makes `seconds_since_start` count from now: a user's program starts another command."""
    global _started
    _started = time.monotonic()


def command_prefix(command: str) -> list[str]:
    """Returns the first words of a command line, for `subprocess`, that runs ``command`` with this Python and the
    command's own code, whatever the working folder contains."""
    package = Path(__file__).parents[1] / ("" if IS_INSTALLED else "lockstep")
    return [sys.executable, str(package / "__main__.py"), command]


def resume_flag(last: str | os.PathLike[str]) -> str:
    """Returns the train.py flag that resumes the run with the checkpoint ``last``. Messages always name the checkpoint,
    because ``--resume`` alone continues the newest run, which may be a different one."""
    return f"--resume {shlex.quote(os.fspath(last))}"
