"""Keeps best.pt and the best epoch in agreement when a run continues."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from engine.checkpoint.checkpointer import Checkpointer
from engine.checkpoint.description import RunDescription
from engine.checkpoint.newest_run import run_id_of
from engine.checkpoint.progress import Progress, read_progress
from utils.distributed.context import DistributedContext, broadcast_object
from utils.logger import get_logger


def keep_best_epoch(
    ctx: DistributedContext, stored: RunDescription, checkpointer: Checkpointer, progress: Progress
) -> None:
    """Makes best.pt and the best epoch in ``progress`` agree in a run that continues. Every rank must call this.

    They differ if the run goes back to an older checkpoint while best.pt is from a later epoch: best.pt is then written
    from the epochN.pt of the best epoch, or else the next validated epoch becomes the best, as it does if the
    validation images or their size change. A best.pt that the run will not write again is kept as bestN.pt.

    ``stored``: the description in the checkpoint.
    """
    is_known = _restore_best(checkpointer, stored, progress) if ctx.is_main else False
    if broadcast_object(ctx, is_known) or progress.best_epoch < 0:
        return
    get_logger().info(
        "resume: there is no best.pt of epoch %d with comparable scores; the next validated epoch is the best so far",
        progress.best_epoch,
    )
    progress.forget_best()


def _restore_best(checkpointer: Checkpointer, stored: RunDescription, progress: Progress) -> bool:
    """Makes best.pt the checkpoint of the best epoch in ``progress``. Returns False if that is not possible, or if its
    scores are not comparable with those that follow."""
    best = checkpointer.best
    is_comparable = checkpointer.description.validates_like(stored)
    if is_comparable and _is_of_best_epoch(best, stored.run_id, progress):
        return True
    if not checkpointer.description.trains_like(stored):  # otherwise the run writes best.pt again
        _set_aside(best)
    periodic = checkpointer.periodic(progress.best_epoch)
    if not is_comparable or not _is_of_best_epoch(periodic, stored.run_id, progress):
        return False
    checkpointer.copy_to_best(periodic)
    return True


def _is_of_best_epoch(path: Path, run_id: str, progress: Progress) -> bool:
    """Returns whether the run ``run_id`` saved the file after the best epoch in ``progress``. The run may have trained
    that epoch twice, with different settings, so the fitness is compared as well."""
    stored = read_progress(path)
    if stored is None or run_id_of(path) != run_id or stored.epoch != stored.best_epoch:
        return False
    return (stored.best_epoch, stored.best_fitness) == (progress.best_epoch, progress.best_fitness)


def _set_aside(best: Path) -> None:
    """Renames best.pt to bestN.pt, where N is its epoch, or to bestN-2.pt and so on if that exists, so that the run
    does not overwrite it. Does nothing if best.pt does not exist."""
    stored = read_progress(best)
    if stored is None:
        return
    path = best.with_name(f"best{stored.epoch}.pt")
    for number in itertools.count(2):
        if not os.path.lexists(path):
            break
        path = best.with_name(f"best{stored.epoch}-{number}.pt")
    best.rename(path)
    get_logger().info("resume: %s is kept as %s", best, path.name)
