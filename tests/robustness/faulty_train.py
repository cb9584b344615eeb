"""train.py with a built-in fault or probe, selected by FAULTS (several with ';'), for tests that start it as a process.

- ``log:FOLDER``: before each step writes its number and the images of this rank's share to FOLDER/<pid>.
- ``refuse:RANK:STEP``: that rank raises UserError before that step.
- ``hold:RANK:STEP:FILE``: that rank waits before that step until FILE exists.
- ``save:STEPS``: saves a checkpoint every STEPS steps.
- ``slow:SECONDS``: delays every step; ``slowval:SECONDS``: delays every batch of validation.
- ``scored:FILE``: each validation appends the id of its process to FILE.
- ``rated``: the AP is a number that depends on all weights, as the small models of tests detect nothing.
- ``kill:FILE:NUMBER``: rank 0 counts the calls by which it changes files in FILE and is killed at one of them.
- ``snapshot:RUN:FOLDER``: before each such call in the folder RUN, keeps what a kill would leave there, in FOLDER.
- ``set:MODULE:NAME:NUMBER``: another value of a constant.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


def inject_step_fault(kind: str, *args: str) -> None:
    """Applies a kind that concerns the steps or the validations."""
    from engine.evaluation.evaluator import Evaluator
    from engine.train.step import TrainStep
    from utils.errors import UserError

    take = TrainStep.__call__
    score = Evaluator.run

    def step(self, batches, images, updates, **options) -> None:
        here = kind in ("hold", "refuse") and (self.ctx.rank, updates) == (int(args[0]), int(args[1]))
        if kind == "log":
            seen = " ".join(str(int(i)) for batch in batches for i in batch.indices)
            with open(Path(args[0]) / str(os.getpid()), "a") as file:
                file.write(f"{updates}: {seen}\n")
        elif kind == "slow":
            time.sleep(float(args[0]))
        elif here and kind == "hold":
            while not os.path.exists(args[2]):
                time.sleep(0.02)
        elif here:
            raise UserError("built to refuse")
        take(self, batches, images, updates, **options)

    def run(self, model, loader, **options):
        def slowly():
            for batch in loader:
                time.sleep(float(args[0]))
                yield batch

        if kind == "scored":
            with open(args[0], "a") as file:
                file.write(f"{os.getpid()}\n")
        evaluation = score(self, model, slowly() if kind == "slowval" else loader, **options)
        if kind == "rated" and evaluation is not None:
            evaluation.result.metrics["AP"] = sum(float(p.double().abs().sum()) for p in model.parameters()) * 1e4 % 1
        return evaluation

    TrainStep.__call__ = step
    Evaluator.run = run


def save_every(steps: int) -> None:
    """Saves a checkpoint whenever the number of steps is a multiple of ``steps``."""
    from engine.train.control import Action
    from engine.train.loop import Trainer

    ask = Trainer._ask_hooks

    def ask_hooks(self, point, *given) -> Action:
        is_due = point == "after_step" and self.progress.updates % steps == 0
        return ask(self, point, *given) | (Action.SAVE if is_due else Action.CONTINUE)

    Trainer._ask_hooks = ask_hooks


FILE_CALLS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.utime")


def kill_at(counts: str, number: int) -> None:
    """Appends a byte to the file ``counts`` for each of ``FILE_CALLS`` that changes a file below its
    folder, and kills this process at call ``number``."""
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
            if next(calls) == number:
                os.kill(own, signal.SIGKILL)

    sys.addaudithook(hook)


def keep_snapshots(run: str, folder: str) -> None:
    def hook(event: str, given: tuple) -> None:
        if event == "os.rename" and os.fsdecode(given[1]).startswith(run):
            kept = Path(folder, str(time.monotonic_ns()))  # the same clock in all processes
            kept.mkdir(parents=True)
            for path in Path(run).iterdir():
                if path.suffix in (".pt", ".scores", ".csv", ".yaml"):  # files that are replaced, never changed
                    with contextlib.suppress(FileNotFoundError):
                        os.link(path, kept / path.name)

    sys.addaudithook(hook)


def inject_process_fault(kind: str, *args: str) -> bool:
    """Applies a kind that concerns the whole process. Returns False for any other kind."""
    if kind == "set":
        setattr(importlib.import_module(args[0]), args[1], int(args[2]))
    elif kind == "kill" and os.environ.get("RANK", "0") == "0":
        kill_at(args[0], int(args[1]))
    elif kind == "snapshot":
        keep_snapshots(*args)
    elif kind == "save":
        save_every(int(args[0]))
    return kind in ("set", "kill", "snapshot", "save")


def main(argv: list[str] | None = None) -> None:
    import train

    faulthandler.register(signal.SIGUSR2)  # prints the stacks of all threads: `Processes.until`
    for fault in filter(None, os.environ.get("FAULTS", "").split(";")):
        if not inject_process_fault(*fault.split(":")):
            inject_step_fault(*fault.split(":"))
    train.main(argv)


if __name__ == "__main__":
    from utils.process.main import run_main

    run_main(main)
