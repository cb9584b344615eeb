"""Continues a run from its checkpoint: with which settings, in which state, and where."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from engine.checkpoint.checkpoint import Checkpoint, Progress, TrainState
from engine.checkpoint.checkpointer import Checkpointer
from engine.optim.schedule import epochs_in_time, new_layers_lr_mult, step_plan
from engine.run.run import ContinuedRun, RunStart, TrainingRun
from utils.config.parser import read_recipe, with_overrides
from utils.config.settings import FIND_BATCH_SIZE, Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext, broadcast_object
from utils.errors import UserError
from utils.files.paths import normal_path
from utils.logger import get_logger
from utils.program import resume_flag
from utils.strings import class_difference, counted

# Settings of the process that resumes, not of the run.
_PROCESS_SETTINGS = ("resume", "spawn", "eval_ranks", "device")
# With other values the stored weights would not fit the model or the optimizer's state its parameters, the order of
# images would be undefined, or the best epoch so far would not be known.
_FIXED_SETTINGS = ("model", "weights", "keep_old", "val_fraction", "classes", "single_cls", "freeze", "fitness", "name")
# Settings on which the order of an epoch's images depends.
_ORDER_SETTINGS = ("seed", "rect", "image_weights", "repeat_factor")


@dataclass(frozen=True, kw_only=True)
class EpochData:
    """The training split of a run that continues."""

    batches: int  # in an epoch, on each rank
    images: int  # or tiles of them
    fingerprint: str  # of the data set, see `RunDescription.data`


def check_is_newest(checkpoint: Checkpoint) -> None:
    """Raises UserError when the run has gone on after ``checkpoint``: resuming would overwrite its later epochs."""
    last = checkpoint.path.parent / "last.pt"
    if checkpoint.path.resolve() == last.resolve() or not last.is_file():
        return
    try:
        newest = Checkpoint.read(last).progress
    except UserError:  # damaged: an older checkpoint is what is left
        return
    position = checkpoint.progress
    if (newest.epoch, newest.batch) > (position.epoch, position.batch):
        raise UserError(
            f"{checkpoint.path}: the run has gone on to epoch {newest.epoch} ({last}), and resuming here would "
            "overwrite it; to go back anyway, move last.pt elsewhere first"
        )


def resumed_epochs(checkpoint: Checkpoint, config: TrainConfig, explicit_flags: Collection[str]) -> int:
    """Returns the number of epochs of a run that resumes with ``config``. ``--time`` for a run whose epochs are done
    gives it as many as fit."""
    done = checkpoint.progress.epoch
    gets_time = "time" in explicit_flags and config.time > 0
    if not gets_time or not done or done < config.epochs:
        return config.epochs
    return epochs_in_time(done, checkpoint.run.seconds, config.time * 3600)


def check_can_continue(checkpoint: Checkpoint, config: TrainConfig, explicit_flags: Collection[str]) -> None:
    """Raises UserError, which says how to continue, if the run has ended. ``config``: the settings to resume with."""
    progress = checkpoint.progress
    path = checkpoint.path
    resume = resume_flag(path)
    done = progress.epoch
    if done >= config.epochs:
        if config.time:
            hours = checkpoint.run.seconds / 3600
            ended = f"--time {config.time:g}: no other epoch fits ({counted(done, 'epoch')} took {hours:.3g} hours)"
            more = f"{resume} --time HOURS (of the whole run) or --epochs N"
        else:
            if "epochs" in explicit_flags and config.epochs < done:
                ended = f"--epochs {config.epochs}: {done} are done already"
            else:
                ended = f"all epochs are done ({done})"
            more = f"{resume} --epochs N"
        raise UserError(f"{path}: {ended}; to continue, set more: {more}")
    if progress.stops_early(config.patience, epochs=config.epochs, val_every=config.val_every):
        waited = done - progress.best_epoch
        raise UserError(
            f"{path}: stopped early after epoch {done}: no better {config.fitness} in {counted(waited, 'epoch')} "
            f"(--patience {config.patience}); to continue, wait for longer: {resume} --patience N, above {waited}, or 0"
        )


def check_classes(checkpoint: Checkpoint, names: Sequence[str], source: str) -> None:
    """Raises UserError when the data set ``source``, with classes ``names``, has other classes than the run, or has
    them in another order."""
    path = checkpoint.path
    difference = class_difference(checkpoint.names, names)
    if difference:
        raise UserError(
            f"{path}: the run and {source} do not have the same classes ({difference}); for other classes start a new "
            f"run with --weights {shlex.quote(str(path))}"
        )


def resumed_config(
    stored: TrainConfig, current: TrainConfig, explicit_flags: Collection[str]
) -> tuple[TrainConfig, list[str]]:
    """Returns the stored settings with those of the command line, and a message for each that changes.

    Raises UserError for a setting that a run cannot change.
    """
    changes: dict[str, Any] = {name: getattr(current, name) for name in _PROCESS_SETTINGS}
    changes["override"] = _joined_overrides(stored, current, explicit_flags)
    ignored = set(changes)
    if _has_time_limit_already(stored, current, explicit_flags):
        ignored.add("epochs")
    messages = []
    for name in sorted(set(explicit_flags) - ignored):
        old = getattr(stored, name)
        new = getattr(current, name)
        if _means_the_same(name, old, new):
            continue
        if name in _FIXED_SETTINGS:
            raise UserError(
                f"--{name.replace('_', '-')} {new}: the run being resumed has {old!r}; start a new run with --weights"
            )
        changes[name] = new
        messages.append(f"resume: {name} {old!r} -> {new!r}")
    if "epochs" in explicit_flags and "time" not in explicit_flags and stored.time:
        changes["time"] = 0.0
        messages.append(f"resume: time {stored.time!r} -> 0.0, as --epochs is given")
    return dataclasses.replace(stored, **changes), messages


def _has_time_limit_already(stored: TrainConfig, current: TrainConfig, explicit_flags: Collection[str]) -> bool:
    """Whether the command line gives the ``--time`` that has decided about the number of epochs since the first one of
    the run: torchrun restarts with the flags of then, and ``--epochs`` among them would undo that."""
    return "time" in explicit_flags and current.time > 0 and current.time == stored.time


def _joined_overrides(stored: TrainConfig, current: TrainConfig, explicit_flags: Collection[str]) -> list[str]:
    """Returns all ``--set`` of the run: another recipe (``--hyp``) drops the stored ones."""
    kept = [] if "hyp" in explicit_flags else stored.override
    added = current.override
    is_repeated = kept[len(kept) - len(added) :] == added  # torchrun restarts with the same command
    return kept if is_repeated else [*kept, *added]


def _means_the_same(name: str, old: Any, new: Any) -> bool:
    """Returns whether a setting of the command line leaves that of the run as it is."""
    if name == "data" and normal_path(old) == normal_path(new):
        return True
    if name == "batch_size" and new == FIND_BATCH_SIZE:  # found when the run began
        return True
    return old == new


def resumed_hyperparameters(
    stored: Hyperparameters, current: TrainConfig, explicit_flags: Collection[str], *, pretrained: bool
) -> tuple[Hyperparameters, list[str]]:
    """Returns the checkpoint's hyper-parameters, or those of ``--hyp`` if it is given, with ``--set`` on top; and
    messages, such as those that changed. ``pretrained``: see `read_recipe`."""
    messages: list[str] = []
    base = stored
    if "hyp" in explicit_flags:
        base = read_recipe(current.hyp, pretrained=pretrained, keep_old=current.keep_old, lines=messages)
    hyp = with_overrides(base, current.override if "override" in explicit_flags else ())
    if hyp.lr_mult is None:  # chosen when the run began
        hyp = dataclasses.replace(hyp, lr_mult=stored.lr_mult)
    for field in dataclasses.fields(hyp):
        old = getattr(stored, field.name)
        new = getattr(hyp, field.name)
        if old != new:
            messages.append(f"resume: {field.name} {old!r} -> {new!r}")
    return hyp, messages


def stored_new_lr_mult(checkpoint: Checkpoint) -> float:
    """Returns `LoadedParameters.new_lr_mult` of a run as it began: more epochs do not change it."""
    if checkpoint.new_lr_mult is not None:
        return checkpoint.new_lr_mult
    stored = checkpoint.config  # of an earlier version, which chose it for the epochs of each start
    steps = step_plan(stored, checkpoint.run.epoch_batches)
    return new_layers_lr_mult(math.inf if stored.time else steps.total)


def restore_run(
    ctx: DistributedContext, start: RunStart, state: TrainState, config: TrainConfig, data: EpochData
) -> Progress:
    """Returns where a run begins. If it continues, puts the state of its checkpoint in place, and frees that: weights,
    averaged weights, optimizer and loss scale. Raises UserError when the state does not fit the run."""
    if not isinstance(start, ContinuedRun):
        return Progress()
    checkpoint = start.checkpoint
    checkpoint.restore(ctx, state)
    checkpoint.free_tensors()
    progress, messages = resumed_position(checkpoint, config, data)
    for message in messages:
        get_logger().info("%s", message)
    if not config.image_weights:
        progress.class_weights = []
    return progress


def keep_best_epoch(ctx: DistributedContext, run: TrainingRun, checkpointer: Checkpointer, progress: Progress) -> None:
    """Makes best.pt and the best epoch in ``progress`` agree in a run that continues. Every rank must call this.

    They differ if the run goes back to an older checkpoint while best.pt is of a later epoch: best.pt is then written
    from the epochN.pt of the best epoch, or else the next validated epoch is the best. That also holds if other images,
    or another size, are validated from now on. A best.pt that the run will not write again is kept as bestN.pt.
    """
    if not isinstance(run.start, ContinuedRun):
        return
    checkpoint = run.start.checkpoint
    is_known = _recover_best(checkpointer, checkpoint, progress) if ctx.is_main else False
    if broadcast_object(ctx, is_known) or progress.best_epoch < 0:
        return
    get_logger().info(
        "resume: there is no best.pt of epoch %d with comparable scores; the next validated epoch is the best so far",
        progress.best_epoch,
    )
    progress.best_epoch = -1
    progress.best_fitness = -1.0


def _recover_best(checkpointer: Checkpointer, checkpoint: Checkpoint, progress: Progress) -> bool:
    """Makes best.pt that of the best epoch in ``progress``. Returns False if that is not possible, or if its scores say
    nothing about those that follow."""
    is_comparable = checkpointer.description.validates_like(checkpoint)
    if is_comparable and checkpointer.best.is_of_best_epoch(progress):
        return True
    if not checkpointer.description.trains_like(checkpoint):  # otherwise the run repeats the epoch of best.pt
        kept = checkpointer.best.set_aside()
        if kept is not None:
            get_logger().info("resume: %s is kept as %s", checkpointer.best.path, kept.name)
    return is_comparable and checkpointer.best.restore(checkpointer.periodic(progress.best_epoch), progress)


def resumed_position(checkpoint: Checkpoint, config: TrainConfig, data: EpochData) -> tuple[Progress, list[str]]:
    """Returns the position at which a run continues, and a message for each reason why it is not the checkpoint's.

    Other batches or steps keep the position among the epoch's images, rounded down to a step, or after its last step;
    the losses of the epoch are summed from there on. Another number of images, or another order of them, begins the
    epoch anew, except that in another order an epoch whose steps are done stays so. The schedule is a function of the
    step among all steps, so steps are counted again.
    """
    epoch_batches = data.batches
    steps = step_plan(config, epoch_batches)
    stored = checkpoint.progress
    stored_epoch_batches = checkpoint.run.epoch_batches
    stored_batch_size = checkpoint.config.batch_size
    has_same_images = _has_same_images(checkpoint, config, data)
    has_same_order = has_same_images and _has_same_order(checkpoint, config, data)
    has_same_batches = stored_epoch_batches == epoch_batches and stored_batch_size == config.batch_size
    has_same_steps = steps.accumulate == step_plan(checkpoint.config, stored_epoch_batches).accumulate
    position = dataclasses.replace(stored)
    messages = []
    if checkpoint.fingerprint != data.fingerprint:
        messages.append("resume: the images, the labels, or how the YAML reads them have changed since the run began")
    if has_same_images and stored.has_trained(stored_epoch_batches):
        position.batch = epoch_batches
    elif stored.batch and not (has_same_order and has_same_batches and has_same_steps):
        position.begin_epoch()
        if has_same_order:
            batches = min(stored.batch * stored_batch_size // config.batch_size, epoch_batches)
            position.batch = batches - batches % steps.accumulate
        messages.append(f"resume: {_described_start(position, epoch_batches)}")
    position.step = position.epoch * epoch_batches + position.batch
    position.updates = position.epoch * steps.per_epoch + -(-position.batch // steps.accumulate)
    if checkpoint.config.epochs != config.epochs or position.updates != stored.updates:
        share = position.updates / steps.total
        epochs = counted(config.epochs, "epoch")
        messages.append(f"resume: the learning rate continues from its value after {share:.0%} of {epochs}")
    return position, messages


def _has_same_images(checkpoint: Checkpoint, config: TrainConfig, data: EpochData) -> bool:
    """Whether an epoch has as many images as in the run so far, if not the same ones."""
    if checkpoint.fingerprint == data.fingerprint:
        return True
    if checkpoint.run.images is None:  # an earlier version: the number of batches says it as nearly as anything
        return checkpoint.run.epoch_batches == data.batches and checkpoint.config.batch_size == config.batch_size
    return checkpoint.run.images == data.images


def _has_same_order(checkpoint: Checkpoint, config: TrainConfig, data: EpochData) -> bool:
    """Whether an epoch with as many images takes them in the same order as in the run so far (`EpochOrder`)."""
    names = list(_ORDER_SETTINGS)
    if config.rect:
        names += ["imgsz", "batch_size"]  # images of similar shapes form batches
    if any(getattr(checkpoint.config, name) != getattr(config, name) for name in names):
        return False
    depends_on_content = config.rect or config.image_weights or config.repeat_factor > 0 or checkpoint.tile > 0
    return checkpoint.fingerprint == data.fingerprint or not depends_on_content


def _described_start(position: Progress, epoch_batches: int) -> str:
    epoch = position.epoch + 1
    if position.batch:
        return f"continues at batch {position.batch} of the {epoch_batches} of epoch {epoch}"
    return f"begins epoch {epoch} again"
