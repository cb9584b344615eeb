"""train.py with faults and probes, for tests that start it as a process.

The variable FAULTS calls some of the functions below: ``name:argument:argument``, separated by ``;``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))


def before_each_step(act: Callable[[int, int, Sequence[Any]], None]) -> None:
    """Calls ``act`` with the rank, the number of the step, and this rank's batches."""
    from engine.train.step import TrainStep

    take = TrainStep.__call__

    def step(self, batches, images, updates, **options) -> None:
        act(self.ctx.rank, updates, batches)
        take(self, batches, images, updates, **options)

    TrainStep.__call__ = step


def log(folder: str) -> None:
    """Before each step, writes its number and the images of this rank's share to a file of this process."""

    def write(rank: int, step: int, batches: Sequence[Any]) -> None:
        images = " ".join(str(int(i)) for batch in batches for i in batch.indices)
        with open(Path(folder) / str(os.getpid()), "a") as file:
            file.write(f"{step}: {images}\n")

    before_each_step(write)


def refuse(rank: str, step: str) -> None:
    """That rank raises UserError before that step."""
    from utils.errors import UserError

    def check(*at: Any) -> None:
        if at[:2] == (int(rank), int(step)):
            raise UserError("built to refuse")

    before_each_step(check)


def hold(rank: str, step: str, file: str) -> None:
    """That rank waits before that step until ``file`` exists."""

    def wait(*at: Any) -> None:
        while at[:2] == (int(rank), int(step)) and not os.path.exists(file):
            time.sleep(0.02)

    before_each_step(wait)


def around_each_validation(run_with: Callable[..., Any]) -> None:
    """Calls ``run_with`` with the true `Evaluator.run` and its arguments in its place."""
    from engine.evaluation.evaluator import Evaluator

    run = Evaluator.run
    Evaluator.run = lambda *args, **options: run_with(run, *args, **options)


def slowval(seconds: str) -> None:
    """Delays every batch of validation."""

    def slowly(loader):
        for batch in loader:
            time.sleep(float(seconds))
            yield batch

    around_each_validation(lambda run, self, model, loader, **options: run(self, model, slowly(loader), **options))


def scored(file: str) -> None:
    """Each validation appends the id of its process to ``file``."""

    def note(run, *args, **options):
        with open(file, "a") as notes:
            notes.write(f"{os.getpid()}\n")
        return run(*args, **options)

    around_each_validation(note)


def rated() -> None:
    """The AP is a number that depends on all weights, as the small models of tests detect nothing."""

    def rate(run, self, model, loader, **options):
        evaluation = run(self, model, loader, **options)
        if evaluation is not None:
            evaluation.result.metrics["AP"] = sum(float(p.double().abs().sum()) for p in model.parameters()) * 1e4 % 1
        return evaluation

    around_each_validation(rate)


FILE_CALLS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.utime")


def kill(counts: str, number: str) -> None:
    """Rank 0 appends a byte to the file ``counts`` for each of `FILE_CALLS` that changes a file below its folder, and
    is killed at call ``number``."""
    if os.environ.get("RANK", "0") != "0":
        return
    own = os.getpid()
    calls = itertools.count(1)
    folder = os.path.dirname(counts)
    file = os.open(counts, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def hook(event: str, given: tuple) -> None:
        if event not in FILE_CALLS or os.getpid() != own or isinstance(given[0], int):
            return
        changes = event != "open" or given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if changes and isinstance(given[0], (str, bytes, os.PathLike)) and os.fsdecode(given[0]).startswith(folder):
            os.write(file, b".")
            if next(calls) == int(number):
                os.kill(own, signal.SIGKILL)

    sys.addaudithook(hook)


def snapshot(run: str, folder: str) -> None:
    """Before a file in the folder ``run`` is replaced, keeps what a kill would leave there, in ``folder``."""

    def hook(event: str, given: tuple) -> None:
        if event == "os.rename" and os.fsdecode(given[1]).startswith(run):
            kept = Path(folder, str(time.monotonic_ns()))  # the same clock in all processes
            kept.mkdir(parents=True)
            for path in Path(run).iterdir():
                if path.suffix in (".pt", ".scores", ".csv", ".yaml"):  # files that are replaced, never changed
                    with contextlib.suppress(FileNotFoundError):
                        os.link(path, kept / path.name)

    sys.addaudithook(hook)


def set_constant(module: str, name: str, value: str) -> None:
    setattr(importlib.import_module(module), name, int(value))


def inject_step_fault(kind: str, *args: str) -> None:
    globals()["set_constant" if kind == "set" else kind](*args)


def main(argv: list[str] | None = None) -> None:
    import train

    faulthandler.register(signal.SIGUSR2)  # prints the stacks of all threads: `Processes.until`
    for fault in filter(None, os.environ.get("FAULTS", "").split(";")):
        inject_step_fault(*fault.split(":"))
    train.main(argv)


if __name__ == "__main__":
    from utils.process.main import run_main

    run_main(main)
