"""Puts a run that continues where its checkpoint was saved: its state, its progress, and its best.pt."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.checkpoint.checkpoint import Checkpoint, TrainState
from engine.checkpoint.checkpointer import Checkpointer
from engine.checkpoint.description import RunDescription
from engine.checkpoint.progress import Progress
from engine.optim.schedule import step_plan
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext, broadcast_object
from utils.errors import UserError
from utils.logger import get_logger
from utils.strings import class_difference, counted

# Settings on which the order of an epoch's images depends.
_ORDER_SETTINGS = ("seed", "rect", "image_weights", "repeat_factor")


@dataclass(frozen=True, kw_only=True)
class EpochData:
    """The training split of a run that continues."""

    batches: int  # in an epoch, on each rank
    images: int  # or tiles of them
    fingerprint: str  # of the data set, see `RunDescription.data`


def check_classes(checkpoint: Checkpoint, names: Sequence[str], source: str) -> None:
    """Raises UserError when the data set ``source``, with classes ``names``, has other classes than the run, or has
    them in another order."""
    path = checkpoint.path
    difference = class_difference(checkpoint.description.names, names)
    if difference:
        raise UserError(
            f"{path}: the run and {source} do not have the same classes ({difference}); for other classes start a new "
            f"run with --weights {shlex.quote(str(path))}"
        )


def restore_run(
    ctx: DistributedContext, checkpoint: Checkpoint, state: TrainState, config: TrainConfig, data: EpochData
) -> Progress:
    """Puts the state of a checkpoint in place: weights, averaged weights, optimizer and loss scale. Returns where the
    run continues. Raises UserError when the state does not fit the run."""
    checkpoint.restore(ctx, state)
    progress, messages = resumed_progress(checkpoint, config, data)
    for message in messages:
        get_logger().info("%s", message)
    if not config.image_weights:
        progress.class_weights = []
    return progress


def resumed_progress(checkpoint: Checkpoint, config: TrainConfig, data: EpochData) -> tuple[Progress, list[str]]:
    """Returns where a run continues, and a message for each reason why that is not where it was saved.

    Other batches or steps keep the position among the epoch's images, rounded down to a step; the losses of the epoch
    are summed from there on. Another number of images, or another order of them, begins the epoch anew. An epoch whose
    steps are done stays so, unless the number of images is another. The schedule is a function of the step among all
    steps, so steps are counted again.
    """
    stored = checkpoint.header.progress
    progress = replace(stored)
    messages = []
    if checkpoint.description.fingerprint != data.fingerprint:
        messages.append("resume: the images, the labels, or how the YAML reads them have changed since the run began")
    if stored.has_trained(checkpoint.header.run.epoch_batches) and _has_same_images(checkpoint, data):
        progress.batch = data.batches
    elif stored.batch and not _takes_same_steps(checkpoint, config, data):
        progress.begin_epoch()
        progress.batch = _batches_taken(checkpoint, config, data)
        messages.append(f"resume: {_described_start(progress, data.batches)}")
    steps = step_plan(config, data.batches)
    progress.step = progress.epoch * data.batches + progress.batch
    progress.updates = progress.epoch * steps.per_epoch + -(-progress.batch // steps.accumulate)
    if checkpoint.description.config.epochs != config.epochs or progress.updates != stored.updates:
        share = progress.updates / steps.total
        epochs = counted(config.epochs, "epoch")
        messages.append(f"resume: the learning rate continues from its value after {share:.0%} of {epochs}")
    return progress, messages


def _has_same_images(checkpoint: Checkpoint, data: EpochData) -> bool:
    """Whether an epoch has as many images as in the run so far, if not the same ones."""
    return checkpoint.description.fingerprint == data.fingerprint or checkpoint.header.run.images == data.images


def _has_same_order(checkpoint: Checkpoint, config: TrainConfig, data: EpochData) -> bool:
    """Whether an epoch takes as many images in the same order as in the run so far (`EpochOrder`)."""
    if not _has_same_images(checkpoint, data):
        return False
    stored = checkpoint.description
    names = list(_ORDER_SETTINGS)
    if config.rect:
        names += ["imgsz", "batch_size"]  # images of similar shapes form batches
    if any(getattr(stored.config, name) != getattr(config, name) for name in names):
        return False
    depends_on_content = config.rect or config.image_weights or config.repeat_factor > 0 or stored.tile > 0
    return stored.fingerprint == data.fingerprint or not depends_on_content


def _takes_same_steps(checkpoint: Checkpoint, config: TrainConfig, data: EpochData) -> bool:
    """Whether an epoch is cut into the same batches, and these into the same steps, as in the run so far."""
    stored_config = checkpoint.description.config
    stored_batches = checkpoint.header.run.epoch_batches
    has_same_batches = stored_batches == data.batches and stored_config.batch_size == config.batch_size
    accumulate_before = step_plan(stored_config, stored_batches).accumulate
    has_same_steps = accumulate_before == step_plan(config, data.batches).accumulate
    return has_same_batches and has_same_steps and _has_same_order(checkpoint, config, data)


def _batches_taken(checkpoint: Checkpoint, config: TrainConfig, data: EpochData) -> int:
    """Returns how many batches, cut as from now on, hold only images that the epoch has seen, in whole steps; 0 if it
    takes its images in another order."""
    if not _has_same_order(checkpoint, config, data):
        return 0
    images_seen = checkpoint.header.progress.batch * checkpoint.description.config.batch_size
    batches = min(images_seen // config.batch_size, data.batches)
    return batches - batches % step_plan(config, data.batches).accumulate


def _described_start(progress: Progress, epoch_batches: int) -> str:
    epoch = progress.epoch + 1
    if progress.batch:
        return f"continues at batch {progress.batch} of the {epoch_batches} of epoch {epoch}"
    return f"begins epoch {epoch} again"


def keep_best_epoch(
    ctx: DistributedContext, stored: RunDescription, checkpointer: Checkpointer, progress: Progress
) -> None:
    """Makes best.pt and the best epoch in ``progress`` agree in a run that continues. Every rank must call this.

    They differ if the run goes back to an older checkpoint while best.pt is of a later epoch: best.pt is then written
    from the epochN.pt of the best epoch, or else the next validated epoch is the best. That also holds if other images,
    or another size, are validated from now on. A best.pt that the run will not write again is kept as bestN.pt.

    ``stored``: of the checkpoint.
    """
    is_known = _recover_best(checkpointer, stored, progress) if ctx.is_main else False
    if broadcast_object(ctx, is_known) or progress.best_epoch < 0:
        return
    get_logger().info(
        "resume: there is no best.pt of epoch %d with comparable scores; the next validated epoch is the best so far",
        progress.best_epoch,
    )
    progress.best_epoch = -1
    progress.best_fitness = -1.0


def _recover_best(checkpointer: Checkpointer, stored: RunDescription, progress: Progress) -> bool:
    """Makes best.pt that of the best epoch in ``progress``. Returns False if that is not possible, or if its scores say
    nothing about those that follow."""
    is_comparable = checkpointer.description.validates_like(stored)
    if is_comparable and checkpointer.best.is_of_best_epoch(progress):
        return True
    if not checkpointer.description.trains_like(stored):  # otherwise the run repeats the epoch of best.pt
        kept = checkpointer.best.set_aside()
        if kept is not None:
            get_logger().info("resume: %s is kept as %s", checkpointer.best.path, kept.name)
    return is_comparable and checkpointer.best.restore(checkpointer.periodic(progress.best_epoch), progress)
