"""Runs one of the scripts as a user would, in a process of its own."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable

from benchmarks.environment import ROOT

ScriptRunner = Callable[..., str]  # `run_script`, or what takes its place


def run_script(options: argparse.Namespace, *command: str, device: str = "") -> str:
    """Runs a script, prints its output and returns it. ``device`` overrides the device of the options. Raises
    SystemExit if the script fails."""
    done = subprocess.run(
        [sys.executable, *command, "--device", device or options.device],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    print(done.stdout, flush=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}")
    return done.stdout
