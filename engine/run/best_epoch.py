"""Keeps best.pt and the best epoch in agreement when a run continues."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from engine.checkpoint.checkpointer import Checkpointer
from engine.checkpoint.description import RunDescription
from engine.checkpoint.newest_run import note_own_best
from engine.checkpoint.progress import Progress, read_progress
from utils.distributed.context import DistributedContext, broadcast_object
from utils.logger import get_logger


def keep_best_epoch(
    ctx: DistributedContext, stored: RunDescription, checkpointer: Checkpointer, progress: Progress
) -> None:
    """Makes best.pt and the best epoch in ``progress`` agree in a run that continues. Every rank must call this.

    They differ if the run goes back to an older checkpoint while best.pt is of a later epoch: best.pt is then written
    from the epochN.pt of the best epoch, or else the next validated epoch is the best. That also holds if other images,
    or another size, are validated from now on. A best.pt that the run will not write again is kept as bestN.pt.

    ``stored``: of the checkpoint.
    """
    is_known = _find_best(checkpointer, stored, progress) if ctx.is_main else False
    if broadcast_object(ctx, is_known) or progress.best_epoch < 0:
        return
    get_logger().info(
        "resume: there is no best.pt of epoch %d with comparable scores; the next validated epoch is the best so far",
        progress.best_epoch,
    )
    progress.forget_best()


def _find_best(checkpointer: Checkpointer, stored: RunDescription, progress: Progress) -> bool:
    """Makes best.pt that of the best epoch in ``progress``. Returns False if that is not possible, or if its scores say
    nothing about those that follow."""
    best = checkpointer.best
    is_comparable = checkpointer.description.validates_like(stored)
    if is_comparable and _is_of_best_epoch(best, progress):
        note_own_best(best.parent)
        return True
    if not checkpointer.description.trains_like(stored):  # otherwise the run repeats the epoch of best.pt
        _set_aside(best)
    periodic = checkpointer.periodic(progress.best_epoch)
    if not is_comparable or not _is_of_best_epoch(periodic, progress):
        return False
    checkpointer.copy_to_best(periodic)
    return True


def _is_of_best_epoch(path: Path, progress: Progress) -> bool:
    """Whether the file was saved after the best epoch that ``progress`` knows, by a run with the same one."""
    stored = read_progress(path)
    if stored is None:
        return False
    is_best = stored.epoch == stored.best_epoch == progress.best_epoch
    return is_best and stored.best_fitness == progress.best_fitness


def _set_aside(best: Path) -> None:
    """Renames best.pt to bestN.pt, N being its epoch, or bestN-2.pt and so on if there is one, so that the run does not
    overwrite it. Does nothing without such a file."""
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
