"""What the commands of this folder share: flags, the peer's Python, processes, and one line for a mistake."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from utils.errors import ExplainedError, UserError

ROOT = Path(__file__).parents[1]  # the repository, in which all commands are run
PEER_SIDE = Path(__file__).with_name("speed") / "ultralytics_side.py"  # runs in the peer's environment
SHOWN_ERRORS = 3000  # characters of a failed process's output
ERROR_WIDTH = 300  # characters of an error on one line


def positive(text: str) -> int:
    """Returns the integer of a flag. Raises argparse.ArgumentTypeError unless it is 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer, at least 1, got {text}")
    return int(text)


# The flags that several commands have.
FLAGS: dict[str, dict[str, Any]] = {
    "data": {"required": True, "help": "data set with YOLO labels: YAML, folder, or name in configs/data"},
    "imgsz": {"type": positive, "default": 640, "help": "side of the images, pixels"},
    "batch_size": {"type": positive, "default": 16, "help": "images per batch"},
    "workers": {"type": int, "default": 2, "help": "worker processes of each side"},
    "device": {"default": "cpu", "help": "cpu, or the number of a GPU"},
    "amp": {"nargs": "+", "default": ["off", "auto"], "help": "autocast types of our side"},
    "rounds": {"type": positive, "default": 5, "help": "turns of each side; medians are compared"},
    "peer": {"default": "", "help": "Python of an environment that has Ultralytics; empty: ours alone"},
}


def parse_flags(
    module: str, doc: str, words: Mapping[str, Mapping[str, Any]] | None = None, **flags: Mapping[str, Any]
) -> argparse.Namespace:
    """Parses the command line of a module of this folder.

    Args:
        module: its name in ``benchmarks``.
        doc: its docstring, whose first paragraph describes the command.
        words: arguments of argparse for each positional argument.
        flags: the same for each flag, where they differ from `FLAGS`.

    Raises UserError, before anything is measured, if the Python of ``--peer`` is missing or lacks Ultralytics.
    """
    parser = argparse.ArgumentParser(f"python -m benchmarks.{module}", description=doc.split("\n\n")[0])
    for name, settings in (words or {}).items():
        parser.add_argument(name, **settings)
    for name, changes in flags.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **FLAGS.get(name, {}) | dict(changes))
    options = parser.parse_args()
    if "peer" in flags:
        options.peer = find_peer(options.peer)
    return options


def find_peer(python: str) -> str:
    """Returns the absolute path of the peer's interpreter, which may be a command of PATH; an empty string stays empty.

    Raises UserError if it is missing or lacks Ultralytics.
    """
    if not python:
        return ""
    path = shutil.which(python)
    if path is None:
        raise UserError(f"peer {python}: no such program")
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('ultralytics') is None)"
    try:
        has_ultralytics = subprocess.run([path, "-c", find], check=False).returncode == 0
    except OSError as error:
        raise UserError(f"peer {python}: cannot be started ({error.strerror})") from None
    if not has_ultralytics:
        raise UserError(f"peer {python}: has no Ultralytics; install it there (pip install ultralytics)")
    return os.path.abspath(path)


def run_process(command: Sequence[object], *, folder: Path = ROOT, **variables: str) -> str:
    """Runs a process in ``folder`` with further environment ``variables``. Returns its output, including errors.

    Raises SystemExit, with the end of the output, if it fails.
    """
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        cwd=folder,
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-SHOWN_ERRORS:]}")
    return done.stdout


def end_of(error: SystemExit) -> str:
    """Returns the end of an error's message, on one line."""
    return " ".join(str(error).split())[-ERROR_WIDTH:]


def commit() -> str:
    """Returns the commit of the working tree, with a + if tracked files have changed.

    Returns "unknown" outside a repository and on a machine without git.
    """

    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return ""
        return done.stdout.strip()

    changed = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
    return (git("rev-parse", "--short", "HEAD") or "unknown") + changed


def run_benchmark(main: Callable[[], None]) -> None:
    """Runs ``main``. Raises SystemExit with one line for an error that explains itself.

    `utils.process.main.run_main` also sets environment variables that make our programs faster, and the peer's
    processes would inherit them.
    """
    try:
        main()
    except ExplainedError as error:
        sys.exit(f"error: {error}")
