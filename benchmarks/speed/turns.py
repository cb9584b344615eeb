"""The protocol between a benchmark and the measuring processes that it starts: a line in, one measurement, a line of
JSON out.

Both sides of a comparison are started once and then alternate; an idle process only waits for its standard input.
Scripts that run in a peer's environment also import this module, so it uses only torch and the standard library.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[2]
PEER_SIDE = Path(__file__).with_name("ultralytics_side.py")  # for the Python of the peer's environment
MARK = "@measured "
END_S = 10.0
_TAIL = 3000
BOXES_AN_IMAGE = 12  # boxes per image in the steps that both sides time
SKIPPED = 10  # batches that may have been prefetched during the other side's turn


def take_turns(measure: Callable[..., dict]) -> None:
    """Serves a measuring process that is set up: for each line of standard input, until its end, calls ``measure`` with
    the arguments in the line."""
    _send({})
    for line in sys.stdin:
        _send(measure(**json.loads(line)))


def seconds_of(action: Callable[[], None], times: int, device: str) -> float:
    """Returns the median seconds of ``action``; on a GPU, where it only queues work, the mean over all runs."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(times):
            action()
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / times
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def rate_of(counts: Iterator[int], seconds: float) -> float:
    """Returns images per second over the next ``seconds``, after skipping batches that were already prefetched."""
    for _ in range(SKIPPED):
        next(counts)
    images = 0
    started = time.perf_counter()
    elapsed = 0.0
    while elapsed < seconds:
        images += next(counts)
        elapsed = time.perf_counter() - started
    return images / elapsed


def _send(values: dict) -> None:
    """Writes a line that `Side.result` reads."""
    print(MARK + json.dumps(values), flush=True)


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
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
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
        sys.exit(f"{' '.join(self.command)} ended without a result:\n{self._errors.read()[-_TAIL:]}")

    def measure(self, **arguments: object) -> dict:
        """Measures one turn, with ``arguments`` for the process's measuring function."""
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
            sides[name].result()
        for _ in range(rounds):
            for name, side in sides.items():
                results[name].append(side.measure())
    return results
