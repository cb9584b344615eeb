"""Puts the state of a checkpoint in place: where its run continues, and which of its epochs have to be scored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.optim.schedule import step_plan
from engine.train.checkpoint import Checkpoint, DataFingerprint, Progress, TrainState, UnscoredEpoch, scores_path
from engine.train.resume import RunPlan
from utils.config.epochs import is_closing_epoch
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext, broadcast_object
from utils.errors import UserError
from utils.files.torch_file import read_checkpoint
from utils.logger import get_logger
from utils.schema import build


def restore_run(
    ctx: DistributedContext, plan: RunPlan, state: TrainState, *, epoch_batches: int, fingerprint: DataFingerprint
) -> tuple[Progress, list[UnscoredEpoch]]:
    """Puts the state of the plan's checkpoint in place: weights, averaged weights, optimizer and loss scale. Returns
    the progress from which the run continues, and the epochs that have to be scored; the start of a new run if there is
    no checkpoint. Every rank must call this.

    Args:
        epoch_batches: batches of an epoch on each rank.
        fingerprint: of the data set as it is now.

    Raises UserError when the state does not fit the run.
    """
    checkpoint = plan.checkpoint
    if checkpoint is None:
        return Progress(), []
    checkpoint.restore(ctx, state)
    progress = continue_at(checkpoint, plan.settings.config, epoch_batches, fingerprint)
    if checkpoint.description.identity.val_labels != fingerprint.val_labels:
        for epoch in checkpoint.header.unscored if ctx.is_main else ():
            scores_path(checkpoint.path.parent, epoch.number).unlink(missing_ok=True)
        if plan.takes_steps:
            progress.reset_best()  # the scores are not comparable
    # A power cut may have lost best.pt, and a copy of an older checkpoint has none: the next best epoch writes it.
    has_best = broadcast_object(ctx, ctx.is_main and _is_best(checkpoint.path.with_name("best.pt"), progress))
    if progress.best_epoch >= 0 and not has_best:
        progress.reset_best()
    return progress, _unscored_epochs(plan, checkpoint)


def continue_at(
    checkpoint: Checkpoint, config: TrainConfig, epoch_batches: int, fingerprint: DataFingerprint
) -> Progress:
    """Returns the progress of a checkpoint, counted in the batches and steps that an epoch has with ``config``.

    An epoch that has begun continues at the same image, or at the last multiple of another batch size before it. If its
    training images or their order have changed, the run continues at the next epoch, so that no image is trained on
    twice: with another data set, or another batch size with ``--rect``, whose batches are of similar shapes. The other
    arguments are those of `restore_run`.
    """
    description = checkpoint.description
    conditions = checkpoint.header.run
    stored = description.config
    progress = replace(checkpoint.progress)
    data = description.identity

    def compare(split: str, old: str, new: str, consequence: str) -> None:
        if old != new:
            message = "%s: the %s images or labels have changed since the run began (fingerprint %s, now %s); %s"
            get_logger().warning(message, config.data, split, old[:8], new[:8], consequence)

    compare("training", data.train_labels, fingerprint.train_labels, "the run continues at the next epoch")
    compare("validation", data.val_labels, fingerprint.val_labels, "the search for the best epoch begins again")
    steps = step_plan(config, epoch_batches)
    is_recounted = stored.batch_size != config.batch_size or conditions.epoch_batches != epoch_batches
    has_other_order = data.train_labels != fingerprint.train_labels or (config.rect and is_recounted)
    if progress.batch == conditions.epoch_batches or (progress.batch and has_other_order):
        progress.batch = epoch_batches
    elif progress.batch and is_recounted:
        batches = min(progress.batch * stored.batch_size // config.batch_size, epoch_batches)
        progress.begin_epoch(batches - batches % steps.accumulate)
    if progress.batch and is_recounted:
        get_logger().info("resume: continues at batch %d of %d", progress.batch, epoch_batches)
    # The schedule is a function of the step relative to all steps.
    progress.updates = progress.epoch * steps.per_epoch + -(-progress.batch // steps.accumulate)
    return progress


def _is_best(path: Path, progress: Progress) -> bool:
    """Returns whether best.pt is that of the best epoch in ``progress``."""
    try:
        stored = build(Progress, read_checkpoint(path, verify=False).get("progress"), f"{path}: progress")
    except UserError:
        return False
    newest_best = (stored.epoch, stored.best_epoch, stored.best_fitness)
    return newest_best == (progress.best_epoch, progress.best_epoch, progress.best_fitness)


def _unscored_epochs(plan: RunPlan, checkpoint: Checkpoint) -> list[UnscoredEpoch]:
    """Returns the epochs of a checkpoint whose scores are missing."""
    unscored = checkpoint.header.unscored
    if unscored and not plan.takes_steps and not unscored[-1].has_own_file:
        return [*unscored[:-1], replace(unscored[-1], is_validated=True)]  # it is now the last
    if unscored or not checkpoint.lacks_scores(plan.settings.config.epochs):
        return unscored
    number = checkpoint.progress.epoch
    description = checkpoint.description
    row: dict[str, float] = next((row for row in checkpoint.rows if row["epoch"] == number), {})
    scores = ("metrics/", "val/")
    kept = {name: value for name, value in row.items() if name != "epoch" and not name.startswith(scores)}
    is_closing = is_closing_epoch(number, description.config.epochs, description.hyp.close_mosaic)
    return [UnscoredEpoch(number, kept, is_closing, is_validated=True, has_own_file=False)]
