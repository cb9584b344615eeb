"""Stand-ins and readers that several tests of benchmarks/gpu share."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.parts import Parts, Sizes


class Scripts:
    """Stands in for the scripts that checks run: each prints ``output``, and val.py finds ``aps``, by the weights'
    suffix."""

    def __init__(self, aps: dict[str, float], output: str = "") -> None:
        self.aps = aps
        self.output = output
        self.commands: list[tuple[str, ...]] = []

    def run(self, options: Namespace, *command: str, device: str = "") -> str:
        self.commands.append((*command, device or options.device))
        if command[0] == "val.py":
            ap = self.aps[Path(command[command.index("--weights") + 1]).suffix]
            folder = options.folder / "val" / "exp"
            folder.mkdir(parents=True, exist_ok=True)
            found = dict.fromkeys(("precision", "recall", "ap50", "ap"), ap)
            (folder / "results.json").write_text(json.dumps(found))
        return self.output


def lines_and_failure(figures: Iterator[str]) -> tuple[list[str], str]:
    """Returns the lines of a check, and the reason if it fails, else an empty string."""
    lines = []
    try:
        for line in figures:
            lines.append(line)
    except SystemExit as failure:
        return lines, str(failure)
    return lines, ""


def all_parts(*, peer: str = "python") -> Parts:
    return Parts(Sizes(), Path("folder"), peer)
