"""The other program of a comparison: where it is, and how it is started."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from pathlib import Path

from utils.errors import UserError

PEER_SIDE = Path(__file__).with_name("speed") / "ultralytics_side.py"  # runs in the peer's environment
FIND_ULTRALYTICS = "import importlib.util, sys; sys.exit(importlib.util.find_spec('ultralytics') is None)"


def add_peer_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer", default="", help="Python of an environment that has Ultralytics; empty: ours alone")


def find_peer(python: str) -> str:
    """Returns the absolute path of the interpreter of ``--peer``, which may be a command of PATH; an empty string stays
    empty.

    Raises UserError, before anything is measured, if it is missing or lacks Ultralytics.
    """
    if not python:
        return ""
    path = shutil.which(python)
    if path is None:
        raise UserError(f"peer {python}: no such program")
    try:
        has_ultralytics = subprocess.run([path, "-c", FIND_ULTRALYTICS], check=False).returncode == 0
    except OSError as error:
        raise UserError(f"peer {python}: cannot be started ({error.strerror})") from None
    if not has_ultralytics:
        raise UserError(f"peer {python}: has no Ultralytics; install it there (pip install ultralytics)")
    return os.path.abspath(path)
