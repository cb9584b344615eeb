"""Puts the state of a checkpoint in place, and finds the epoch and step at which the run continues."""

from __future__ import annotations

import enum
import math
from dataclasses import asdict, dataclass, replace

from data.loading.loader import InfiniteDataLoader
from engine.checkpoint.checkpoint import Checkpoint, TrainState
from engine.checkpoint.data_identity import DataIdentity
from engine.checkpoint.progress import PendingEpoch, Progress
from engine.optim.schedule import step_plan
from engine.run.results_csv import ResultsTable
from engine.run.run import NewRun, Remaining, RunPlan, RunSettings
from utils.config.epochs import is_closing_epoch
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext
from utils.distributed.join import check_agreement
from utils.logger import get_logger
from utils.strings import counted

# Settings on which the order of an epoch's images depends. Tiles also depend on the hyper-parameter `tile_backgrounds`.
_ORDER_SETTINGS = ("seed", "rect", "image_weights", "repeat_factor")


@dataclass(frozen=True, kw_only=True)
class EpochData:
    """The training split of a run that continues."""

    batches: int  # batches of an epoch on each rank
    images: int  # or tiles of them
    identity: DataIdentity

    @staticmethod
    def of(train: InfiniteDataLoader, *, identity: DataIdentity) -> EpochData:
        return EpochData(batches=len(train), images=len(train.samples), identity=identity)


def read_run_checkpoint(ctx: DistributedContext, plan: RunPlan) -> Checkpoint | None:
    """Reads the checkpoint from which a run continues, on each rank from its own disk; None for a new run. Every rank
    must call this.

    Raises UserError if it cannot be read, or if the ranks read different ones.
    """
    if isinstance(plan, NewRun):
        return None
    checkpoint = Checkpoint.read(plan.started_from.path)
    facts = {
        "the run of the checkpoint": checkpoint.description.run_id,
        "the checkpoint's progress": asdict(checkpoint.header.progress),
    }
    check_agreement(ctx, facts)
    return checkpoint


@dataclass(frozen=True, kw_only=True)
class StartPosition:
    """The position at which a run begins or continues."""

    progress: Progress
    pending: PendingEpoch | None = None  # the newest epoch if it has to be scored first


def restore_run(
    ctx: DistributedContext, plan: RunPlan, checkpoint: Checkpoint | None, state: TrainState, data: EpochData
) -> StartPosition:
    """Puts the state of a checkpoint in place: weights, averaged weights, optimizer and loss scale. Returns the
    position from which the run continues, and logs how it differs from that of the checkpoint if the run takes steps;
    returns that of a new run if there is no checkpoint. Raises UserError when the state does not fit the run."""
    if isinstance(plan, NewRun) or checkpoint is None:
        return StartPosition(progress=Progress())
    if ctx.is_main:
        warn_of_lost_results(checkpoint)
    checkpoint.restore(ctx, state)
    change = EpochChange(checkpoint, plan.settings, data)  # of a run that continues, no setting is left open
    if not change.has_same_data:
        get_logger().info(
            "resume: the labels, the sizes of the images, or how the YAML reads them have changed since the run began"
        )
    progress, messages = adapt_progress(change)
    if plan.remaining is Remaining.STEPS:
        for message in messages:
            get_logger().info("%s", message)
    pending = pending_epoch(ctx, checkpoint) if plan.lacks_scores else None
    return StartPosition(progress=progress, pending=pending)


def pending_epoch(ctx: DistributedContext, checkpoint: Checkpoint) -> PendingEpoch:
    """Returns the newest epoch of a checkpoint that lacks its scores (`StartedFrom.lacks_scores`). Only rank 0 keeps
    its weights."""
    pending = checkpoint.header.pending or _unvalidated_epoch(checkpoint)
    return pending if ctx.is_main else replace(pending, ema={})


def _unvalidated_epoch(checkpoint: Checkpoint) -> PendingEpoch:
    """Returns the newest epoch of a checkpoint that was saved at its end, but not validated: ``--val-every``."""
    progress = checkpoint.header.progress
    trained_with = checkpoint.description
    rows = ResultsTable.read_if_exists(checkpoint.path.parent / "results.csv").rows
    stored = rows.get(progress.epoch, {})
    kept = [name for name in stored if name != "epoch" and not name.startswith(("metrics/", "val/"))]
    return PendingEpoch(
        row={name: stored[name] for name in kept},
        is_closing=is_closing_epoch(progress.epoch, trained_with.config.epochs, trained_with.hyp.close_mosaic),
        progress=progress,
        ema=checkpoint.state.ema,
    )


def warn_of_lost_results(checkpoint: Checkpoint) -> None:
    """Warns if results.csv lacks epochs of the checkpoint, which a power cut may have erased."""
    header = checkpoint.header
    num_recorded = header.progress.epoch - int(header.pending is not None)
    path = checkpoint.path.parent / "results.csv"
    rows = ResultsTable.read_if_exists(path).rows
    missing = [epoch for epoch in range(1, num_recorded + 1) if epoch not in rows]
    if missing:
        get_logger().warning(
            "%s: lacks the results of %s, from epoch %d to %d",
            path,
            counted(len(missing), "epoch"),
            missing[0],
            missing[-1],
        )


class EpochStart(enum.Enum):
    """The position at which a run continues in the epoch that its checkpoint has begun."""

    KEEP = "keep"  # continue at its batch; that is 0 between two epochs
    END = "end"  # after all steps: only the end of the epoch is missing
    RECOUNT = "recount"  # continue at the same image, recounted in current batches and steps; 0 if the order changed


@dataclass(frozen=True)
class EpochChange:
    """The epoch that a checkpoint has begun, compared with an epoch as the run takes it now."""

    checkpoint: Checkpoint
    settings: RunSettings  # settings with which the run continues
    data: EpochData

    @property
    def config(self) -> TrainConfig:
        return self.settings.config

    @property
    def start(self) -> EpochStart:
        """Where the run continues in its epoch. An epoch whose steps are done stays so, unless the number of images has
        changed."""
        progress = self.checkpoint.header.progress
        if progress.has_trained(self.checkpoint.header.run.epoch_batches) and self.has_same_images:
            return EpochStart.END
        if not progress.batch or self.has_same_steps:
            return EpochStart.KEEP
        return EpochStart.RECOUNT

    @property
    def has_same_data(self) -> bool:
        """Whether the run has the labels and the sizes of images that it had so far (`DataIdentity`)."""
        return self.checkpoint.description.identity == self.data.identity

    @property
    def has_same_images(self) -> bool:
        """Whether an epoch has as many images as in the run so far, even if not the same ones."""
        return self.has_same_data or self.checkpoint.header.run.images == self.data.images

    @property
    def has_same_order(self) -> bool:
        """Whether an epoch takes as many images, in the same order, as in the run so far (`EpochOrder`)."""
        if not self.has_same_images:
            return False
        stored = self.checkpoint.description
        config = self.config
        names = list(_ORDER_SETTINGS)
        if config.rect:
            names += ["imgsz", "batch_size"]  # images of similar shapes form batches
        if any(getattr(stored.config, name) != getattr(config, name) for name in names):
            return False
        if stored.tile > 0 and stored.hyp.tile_backgrounds != self.settings.hyp.tile_backgrounds:
            return False
        depends_on_content = config.rect or config.image_weights or config.repeat_factor > 0 or stored.tile > 0
        return not depends_on_content or self.has_same_data

    @property
    def has_same_steps(self) -> bool:
        """Whether an epoch is split into the same batches and steps as in the run so far."""
        stored_config = self.checkpoint.description.config
        stored_batches = self.checkpoint.header.run.epoch_batches
        has_same_batches = stored_batches == self.data.batches and stored_config.batch_size == self.config.batch_size
        accumulate_before = step_plan(stored_config, stored_batches).accumulate
        accumulates_alike = accumulate_before == step_plan(self.config, self.data.batches).accumulate
        return has_same_batches and accumulates_alike and self.has_same_order

    @property
    def batches_taken(self) -> int:
        """How many batches, cut as from now on, hold only images that the epoch has seen, in whole steps; 0 if it takes
        its images in another order."""
        if not self.has_same_order:
            return 0
        images_seen = self.checkpoint.header.progress.batch * self.checkpoint.description.config.batch_size
        batches = min(images_seen // self.config.batch_size, self.data.batches)
        return batches - batches % step_plan(self.config, self.data.batches).accumulate


def adapt_progress(change: EpochChange) -> tuple[Progress, list[str]]:
    """Returns the progress of a checkpoint, counted in the batches and steps that an epoch has now, and a message for
    each change.

    If the position in the epoch is recounted (`EpochStart`), the losses of the epoch are summed from there on. The
    schedule is a function of the step relative to all steps, so steps are always recounted.
    """
    config = change.config
    data = change.data
    stored = change.checkpoint.header.progress
    progress = replace(stored, class_weights=stored.class_weights if config.image_weights else [])
    messages = []
    if change.start is EpochStart.END:
        progress = replace(progress, batch=data.batches)
    elif change.start is EpochStart.RECOUNT:
        progress.begin_epoch(change.batches_taken)
        messages.append(f"resume: {_describe_start(progress, data.batches)}")
    progress = _with_steps(progress, config, data)
    if change.checkpoint.description.config.epochs != config.epochs or progress.updates != stored.updates:
        share = progress.updates / step_plan(config, data.batches).total
        epochs = counted(config.epochs, "epoch")
        messages.append(f"resume: the learning rate continues from its value after {share:.0%} of {epochs}")
    return progress, messages


def _with_steps(progress: Progress, config: TrainConfig, data: EpochData) -> Progress:
    """Returns ``progress`` with its steps counted by the current batches of an epoch."""
    steps = step_plan(config, data.batches)
    steps_in_epoch = math.ceil(progress.batch / steps.accumulate)
    return replace(
        progress,
        step=progress.epoch * data.batches + progress.batch,
        updates=progress.epoch * steps.per_epoch + steps_in_epoch,
    )


def _describe_start(progress: Progress, epoch_batches: int) -> str:
    """Describes where in its epoch a run continues."""
    epoch = progress.epoch + 1
    if progress.batch:
        return f"continues at batch {progress.batch} of the {epoch_batches} of epoch {epoch}"
    return f"begins epoch {epoch} again"
