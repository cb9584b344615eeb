"""Separate processes for runtimes that may crash, and for programs that convert models."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from utils.errors import UserError

TRIAL_TIMEOUT_S = 120.0
TRIAL_MEMORY_BYTES = 16 * 2**30  # limit of the address space, unless the system allows less
# Precedes the program of a trial.
_TRIAL_LIMITS = f"""
import resource
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
allowed = [limit for limit in (soft, hard, {TRIAL_MEMORY_BYTES}) if limit != resource.RLIM_INFINITY]
resource.setrlimit(resource.RLIMIT_AS, (min(allowed), hard))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
"""


def try_in_process(path: Path, program: str, arguments: Sequence[object], runtime: str) -> None:
    """Runs a Python ``program`` that opens the model ``path``, and runs it once, in a separate process, because some
    runtimes crash on damaged files.

    The program gets ``arguments`` in ``sys.argv``, and reports a mistake with ``sys.exit(REASON)``. Raises UserError if
    the program does so, crashes, needs more memory than any detector, or does not end.
    """
    # -P: modules are not looked up in the working folder.
    command = [sys.executable, "-P", "-c", _TRIAL_LIMITS + program, *map(str, arguments)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TRIAL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{path}: cannot be opened (it takes longer than {TRIAL_TIMEOUT_S:.0f} s)") from None
    if done.returncode < 0:
        raise UserError(f"{path}: cannot be opened (it is damaged: {runtime} crashed)")
    if done.returncode != 0:
        reason = "; ".join(done.stderr.strip().splitlines()) or "it is damaged"
        raise UserError(f"{path}: cannot be opened ({reason[-300:]})")  # what the runtime prints comes first


def run_converter(
    program: str,
    command: Sequence[object],
    output: Path,
    *,
    user: str,
    timeout_s: float,
    folder: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Runs a program that converts a model, in a separate process.

    Args:
        program: its name in messages.
        command: the program and its arguments.
        output: the file that it writes.
        user: the flag that needs it, for messages.
        timeout_s: how long it may take.
        folder: its working folder; None: this process's.
        variables: additions to the environment of this process.

    Raises UserError if it fails, does not end, or does not write ``output``.
    """
    try:
        done = subprocess.run(
            list(map(str, command)),
            cwd=folder,
            env=os.environ | dict(variables or {}),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{user}: {program} did not end within {timeout_s:.0f} s") from None
    if done.returncode != 0 or not output.is_file():
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise UserError(f"{user}: {program} failed ({lines[-1][:300] if lines else done.returncode})")
