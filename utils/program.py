"""This program: its version, its commands as users type them, and how another process starts one."""

from __future__ import annotations

import sys
from pathlib import Path

VERSION = "0.1.0"
COMMANDS = {  # packaging/backend.py replaces these, as in all texts: an installed program has `lockstep train`
    "train": "python train.py",
    "val": "python val.py",
    "detect": "python detect.py",
    "export": "python export.py",
    "check": "python -m data.check",
    "compare": "python -m engine.compare",
    "kfold": "python -m engine.kfold",
    "search": "python -m engine.search",
    "convert": "python -m data.convert",
    "shard": "python -m data.shard",
    "cache": "python -m data.cache",
    "weights": "python -m models.weights",
    "demo": "python -m data.demo",
}


def start_of(command: str) -> list[str]:
    """The first words of a command line, for `subprocess`, that runs ``command`` with this Python: the command's own
    code, whatever the working folder contains."""
    folder = Path(__file__).parents[1]
    package = folder if __name__.startswith("lockstep.") else folder / "lockstep"
    return [sys.executable, str(package / "__main__.py"), command]
