"""This program: its version, and the command lines that start its commands."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path

VERSION = "0.1.0"
STARTED = time.monotonic()  # about when this process started
IS_INSTALLED = __name__.startswith("lockstep.")


def command_prefix(command: str) -> list[str]:
    """Returns the first words of a command line, for `subprocess`, that runs ``command`` with this Python and the
    command's own code, whatever the working folder contains."""
    package = Path(__file__).parents[1] / ("" if IS_INSTALLED else "lockstep")
    return [sys.executable, str(package / "__main__.py"), command]


def resume_flag(last: str | os.PathLike[str]) -> str:
    """Returns the flag of train.py that continues the run with the checkpoint ``last``. Messages always name the
    checkpoint: without it, ``--resume`` continues the newest run, which may be another one."""
    return f"--resume {shlex.quote(os.fspath(last))}"
