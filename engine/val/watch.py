"""``val.py --watch RUN``: scores the checkpoints of a training run as it writes them, from outside its job."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.checkpoint.run import LOCK_NAME
from engine.hooks.result_files import CsvTracker, TensorBoardTracker
from engine.val.validate import open_models, score
from utils.config.settings import ValConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.logger import get_logger

POLL_S = 2.0


def watch(config: ValConfig, ctx: DistributedContext) -> None:
    """Scores last.pt when an epoch is complete, and each epochN.pt; once per epoch, also if it is started again. Ends
    with the run.

    Raises UserError if there is no such run, or its data set cannot be opened.
    """
    folder, log = Path(config.watch), get_logger()
    if not any(path.exists() for path in (folder / LOCK_NAME, *_checkpoints(folder, {}))):
        raise UserError(
            f"--watch {config.watch}: not the folder of a run (it has no last.pt, and no process trains it)"
        )
    results, tensorboard = CsvTracker(folder / "watch.csv"), TensorBoardTracker(folder / "watch")
    seen: dict[Path, tuple[int, int]] = {}  # when files that need not be read again were written
    last: dict[str, Any] = {}  # what last.pt says
    while True:
        is_trained = (folder / LOCK_NAME).exists()  # before the files are listed, or the last one may be missed
        for path in _checkpoints(folder, results.table.rows):
            stamp = _stamp(path)
            if stamp is None or seen.get(path) == stamp:
                continue
            seen[path] = stamp
            try:
                models, spec = open_models(replace(config, weights=[str(path)]), ctx)
            except UserError as error:
                if not str(error).startswith(str(path)):
                    raise
                log.warning("%s", error)
                continue
            progress = models[0].info.get("progress", {})
            last = models[0].info if path.name == "last.pt" else last
            epoch = progress.get("epoch", 0)
            if progress.get("batch") or not epoch or epoch in results.table.rows:
                continue
            result, _, _ = score(config, models[0], spec, models[0].input_hw, ctx)
            for tracker in (results, tensorboard):
                tracker.epoch(epoch, {f"metrics/{name}": value for name, value in result.metrics.items()})
            shown = "  ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
            log.info("%s, epoch %d: %s", path.name, epoch, shown)
        if not is_trained:
            break
        time.sleep(POLL_S)
    tensorboard.close()
    done, epochs = (last.get(part, {}).get(name, 0) for part, name in (("progress", "epoch"), ("config", "epochs")))
    log.info("%s: no process trains it (%d of %d epochs done); results are in %s", folder, done, epochs, results.path)


def _checkpoints(folder: Path, scored: dict[int, Any]) -> list[Path]:
    """Those of epochs that have not been scored, in their order, then last.pt."""
    periodic = {int(number): path for path in folder.glob("epoch*.pt") if (number := path.stem[5:]).isdecimal()}
    return [*(periodic[epoch] for epoch in sorted(periodic.keys() - scored.keys())), folder / "last.pt"]


def _stamp(path: Path) -> tuple[int, int] | None:
    """Changes when the file is replaced; None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino
