"""Starts the measuring processes of a comparison (`benchmarks.speed.turns`), which then alternate: an idle process only
waits for its standard input.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from benchmarks.environment import ROOT
from benchmarks.processes import SHOWN_ERRORS
from benchmarks.speed.turns import MARK

EXIT_TIMEOUT_S = 10.0


class Side:
    """A process that measures on request. ``command`` runs in the repository's folder."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by __exit__)
        self._process = subprocess.Popen(
            self.command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            errors="replace",
        )

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(BrokenPipeError):  # what a process that was killed has not read
            self._process.stdin.close()
        try:
            self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its workers notice
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def result(self) -> dict:
        """Returns the next result. Raises SystemExit, with the end of the process's errors, if it ends without one."""
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        self._process.wait()
        self._errors.seek(0)
        sys.exit(f"{' '.join(self.command)} ended without a result:\n{self._errors.read()[-SHOWN_ERRORS:]}")

    def measure(self, **arguments: object) -> dict:
        """Measures one turn, with ``arguments`` for the process's measuring function. Raises SystemExit like
        `result`."""
        with suppress(BrokenPipeError):  # the process has ended; `result` says why
            self._process.stdin.write(json.dumps(arguments) + "\n")
            self._process.stdin.flush()
        return self.result()


def alternate(commands: dict[str, Sequence[str]], rounds: int) -> dict[str, list[dict]]:
    """Returns results by side. Starts and sets up all sides one after another, then lets them measure alternately."""
    sides: dict[str, Side] = {}
    results: dict[str, list[dict]] = {name: [] for name in commands}
    with ExitStack() as stack:
        for name, command in commands.items():
            sides[name] = stack.enter_context(Side(command))
            sides[name].result()  # it is ready
        for _ in range(rounds):
            for name, side in sides.items():
                results[name].append(side.measure())
    return results
