"""Runs the processes that a benchmark measures or compares."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.environment import ROOT

ERROR_WIDTH = 300  # characters of an error on one line
SHOWN_ERRORS = 3000  # characters of a failed process's standard error


def run_process(command: Sequence[str], *, folder: Path = ROOT, variables: Mapping[str, str] | None = None) -> None:
    """Runs a process in ``folder`` with further environment ``variables``, and hides its output.

    Raises SystemExit, with the end of its errors, if it fails.
    """
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | dict(variables or {}),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-SHOWN_ERRORS:]}")


def end_of(error: SystemExit) -> str:
    """Returns the end of an error's message, on one line."""
    return " ".join(str(error).split())[-ERROR_WIDTH:]
