"""train.py with something odd built in, chosen by ODD (several with ';'), for tests that start it as a process.

- ``log:FOLDER``: before each step writes its number and the images of this rank's share to FOLDER/<pid>.
- ``hang:RANK:STEP:SECONDS``, ``raise:RANK:STEP``, ``refuse:RANK:STEP``: that rank sleeps, raises RuntimeError, raises
  UserError before that step.
- ``slow:SECONDS``: every step takes so much longer; ``slowval:SECONDS``: every batch of validation does.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


def make_odd(kind: str, *args: str) -> None:
    from engine.evaluator import Evaluator
    from engine.step import TrainStep
    from utils.errors import UserError

    take, score = TrainStep.__call__, Evaluator.run

    def step(self, batches, pictures, updates, *rest) -> None:
        here = kind in ("hang", "raise", "refuse") and (self.ctx.rank, updates) == (int(args[0]), int(args[1]))
        if kind == "log":
            images = " ".join(str(int(i)) for batch in batches for i in batch.indices)
            with open(Path(args[0]) / str(os.getpid()), "a") as file:
                file.write(f"{updates}: {images}\n")
        elif kind == "slow":
            time.sleep(float(args[0]))
        elif here and kind == "hang":
            time.sleep(float(args[2]))
        elif here and kind == "raise":
            raise RuntimeError("built to fail")
        elif here:
            raise UserError("built to refuse")
        take(self, batches, pictures, updates, *rest)

    def run(self, model, loader, **options):
        def slowly():
            for batch in loader:
                time.sleep(float(args[0]))
                yield batch

        return score(self, model, slowly() if kind == "slowval" else loader, **options)

    TrainStep.__call__, Evaluator.run = step, run


def main(argv: list[str] | None = None) -> None:
    import train

    for oddity in filter(None, os.environ.get("ODD", "").split(";")):
        make_odd(*oddity.split(":"))
    train.main(argv)


if __name__ == "__main__":
    from utils.cli import run_main

    run_main(main)
