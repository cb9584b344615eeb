"""Lets measuring processes (`benchmarks.speed.turns`) take turns, and formats what they measure as a table."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import IO, Any

from benchmarks.command import PEER_SIDE, ROOT, SHOWN_ERRORS
from benchmarks.speed.turns import MARK

PEER = "peer"
EXIT_TIMEOUT_S = 10.0


def our_command(action: str, **settings: Any) -> list[str]:
    """Returns the command of a measuring process of ours: a function of our_side.py and its arguments."""
    return [sys.executable, "-m", "benchmarks.speed.our_side", action, json.dumps(settings, default=str)]


def peer_command(python: str, action: str, **settings: Any) -> list[str]:
    """Returns the command of the peer: a function of ultralytics_side.py and its arguments."""
    return [python, str(PEER_SIDE), action, json.dumps(settings, default=str)]


class Sides(AbstractContextManager):
    """Processes that measure in turns: an idle one only waits for its standard input. Each starts with its first turn,
    in the repository's folder.

    Args:
        commands: by the names of the sides.
    """

    def __init__(self, commands: dict[str, list[str]]) -> None:
        self.commands = commands
        self._processes: dict[str, tuple[subprocess.Popen[str], IO[str]]] = {}  # and their standard errors

    def __exit__(self, *_: object) -> None:
        for process, errors in self._processes.values():
            with suppress(BrokenPipeError):  # what a process that was killed has not read
                process.stdin.close()
            try:
                process.wait(EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()  # its workers notice
                process.wait()
            process.stdout.close()
            errors.close()

    def measure(self, name: str, **arguments: Any) -> dict:
        """Measures one turn of one side, with ``arguments`` for its measuring function. If the process ends without a
        result, the result is an "error"."""
        if name not in self._processes:
            errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by __exit__)
            pipe = subprocess.PIPE
            process = subprocess.Popen(
                self.commands[name], cwd=ROOT, stdin=pipe, stdout=pipe, stderr=errors, text=True, errors="replace"
            )
            self._processes[name] = process, errors
        process, errors = self._processes[name]
        with suppress(BrokenPipeError):  # the process has ended
            process.stdin.write(json.dumps(arguments) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        process.wait()
        errors.seek(0)
        return {"error": f"{' '.join(self.commands[name])} ended:\n{errors.read()[-SHOWN_ERRORS:]}"}

    def alternate(self, rounds: int, **arguments: Any) -> dict[str, list[dict]]:
        """Lets all sides measure alternately. Returns the results by side."""
        results: dict[str, list[dict]] = {name: [] for name in self.commands}
        for _ in range(rounds):
            for name in self.commands:
                results[name].append(self.measure(name, **arguments))
        return results


@dataclass(frozen=True)
class Comparison:
    """One line of a table: repeated measurements of the same thing on both sides."""

    label: str
    unit: str  # empty: none
    ours: Sequence[float]
    peer: Sequence[float] = ()  # empty: not measured
    higher_is_better: bool = False

    @property
    def advantage(self) -> float | None:
        """Returns the ratio of the medians, above 1 if ours is better; None without a peer."""
        if not self.peer:
            return None
        ours = statistics.median(self.ours)
        peer = statistics.median(self.peer)
        if ours == peer:  # also if both are 0
            return 1.0
        better, worse = (ours, peer) if self.higher_is_better else (peer, ours)
        return better / worse if worse else float("inf")

    def cells(self) -> list[str]:
        advantage = "" if self.advantage is None else f"{self.advantage:.2f}"
        label = f"{self.label} [{self.unit}]" if self.unit else self.label
        return [label, _median(self.ours), _median(self.peer), advantage]


def _median(values: Sequence[float]) -> str:
    if not values:
        return ""
    text = f"{statistics.median(values):.4g}"
    return text if len(values) == 1 else f"{text} ({min(values):.3g} to {max(values):.3g})"


def show(title: str, rows: Sequence[Comparison]) -> None:
    """Prints a table in Markdown."""
    cells = [["median (min to max)", "ours", "peer", "times better"], *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    cells.insert(1, ["-" * width for width in widths])
    print(f"\n{title}")
    for line in cells:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |", flush=True)
