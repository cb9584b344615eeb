"""How a run continues from a checkpoint: one that ``--resume`` names, or the last one of a run that torchrun restarts.

In the order in which these are called, by engine/run/plan.py and engine/train/build.py:

1. `find_checkpoint`: from which file
2. `plan_from_checkpoint`: with which settings, and `check_unfinished`: whether there is anything left to train
3. `restore_run`: the state is put in place, and `adapt_progress` says at which epoch and step the run continues
4. `keep_best_epoch`: which epoch is the best so far, with its best.pt
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from data.loading.loader import InfiniteDataLoader
from data.source.dataset_spec import DataSource
from engine.checkpoint.checkpoint import Checkpoint, TrainState
from engine.checkpoint.checkpointer import Checkpointer
from engine.checkpoint.description import RunDescription
from engine.checkpoint.newest_run import has_earlier_checkpoint, note_own_best
from engine.checkpoint.progress import Progress, RunConditions, read_progress
from engine.optim.schedule import epochs_in_time, step_plan
from engine.run.run import Command, RunPlan, RunSettings
from utils.config.recipes import read_recipe, with_overrides
from utils.config.settings import FIND_BATCH_SIZE, Hyperparameters, TrainConfig, names_with
from utils.distributed.context import DistributedContext, broadcast_object
from utils.errors import UserError
from utils.files.data_location import find_location
from utils.files.paths import normal_path
from utils.logger import get_logger
from utils.program import resume_flag
from utils.strings import counted

# Settings of the process that resumes, not of the run.
_PROCESS_SETTINGS = names_with(TrainConfig, on_resume="current")
# With other values the stored weights would not fit the model or the optimizer's state its parameters, the order of
# images would be undefined, or the best epoch so far would not be known.
_FIXED_SETTINGS = names_with(TrainConfig, on_resume="fixed")

# Flags that leave a run as it is, although they may have another value than its stored settings: by name, a function of
# these and of the settings of the command line.
_KEEPS_STORED: dict[str, Callable[[TrainConfig, TrainConfig], bool]] = {
    "data": lambda stored, current: normal_path(current.data) == normal_path(stored.data),
    "batch_size": lambda _, current: current.batch_size == FIND_BATCH_SIZE,  # found when the run began
    "optimizer": lambda _, current: current.optimizer == "auto",  # chosen when the run began
    # --time has decided about the epochs since the first one; torchrun restarts with the flags of then.
    "epochs": lambda stored, current: 0 < current.time == stored.time,
}

# Settings on which the order of an epoch's images depends.
_ORDER_SETTINGS = ("seed", "rect", "image_weights", "repeat_factor")


def find_checkpoint(ctx: DistributedContext, config: TrainConfig) -> Path:
    """Returns the checkpoint that ``--resume`` means: the file that it names, the last.pt of the folder that it names,
    or without a name the newest last.pt of the project.

    Raises UserError if there is no last.pt, or if it is of an earlier run than the folder's newest one: to continue
    that, the file itself must be named.
    """
    if config.resume:
        path = Path(config.resume)
        if not path.is_dir():
            return path
        folder = path
    else:
        newest = broadcast_object(ctx, newest_checkpoint(Path(config.project)) if ctx.is_main else None)
        if newest is None:
            raise UserError(f"--resume: no last.pt under {config.project}; name one: --resume PATH/last.pt")
        folder = newest.parent
    last = folder / "last.pt"
    if has_earlier_checkpoint(folder):
        raise UserError(
            f"{folder}: the newest run in this folder has saved nothing yet; to continue the one before it: "
            f"{resume_flag(last)}"
        )
    return last


def newest_checkpoint(project: Path) -> Path | None:
    """Returns the newest last.pt in the folders of runs in ``project``, or None. Those of runs that another one has
    begun to replace come after all others."""
    paths = set(project.glob("*/last.pt"))
    for path in project.glob("**/last.pt"):  # a name may have folders
        if (path.parent / "settings.yaml").is_file():  # else it has been moved out of its run
            paths.add(path)

    def priority(path: Path) -> tuple[bool, float]:
        return not has_earlier_checkpoint(path.parent), path.stat().st_mtime

    return max(paths, key=priority, default=None)


def plan_from_checkpoint(ctx: DistributedContext, command: Command, path: Path) -> RunPlan:
    """Returns the plan of the run that wrote the checkpoint ``path``: its settings, but for what the command line
    changes.

    Raises UserError for a file from which no run can continue, for a checkpoint that is not the newest of its run, and
    for a setting that cannot change.
    """
    checkpoint = Checkpoint.read(path)
    check_is_newest(checkpoint)
    stored = checkpoint.description
    explicit_flags = command.explicit_flags
    hyp, hyp_changes = merge_hyperparameters(
        stored.hyp,
        command.config,
        explicit_flags,
        pretrained=bool(stored.config.weights),
        keep_old=stored.config.keep_old,
    )
    source, known_root = find_location(stored.data, path)  # where the data set is now
    stored_config = stored.config
    if stored_config.data != "demo":
        stored_config = replace(stored_config, data=source)
    config, config_changes = merge_config(stored_config, command.config, explicit_flags)
    config = replace(config, epochs=choose_epochs(checkpoint, config, explicit_flags))
    data_source = DataSource.of_training(config)
    if known_root and config.data == source:  # the command line names no other data set
        data_source = replace(data_source, known_root=known_root, stored_in=str(path))
    return RunPlan(
        settings=RunSettings(config, hyp),
        data_source=data_source,
        folder=path.parent,
        checkpoint=checkpoint,
        startup_messages=[
            f"resuming {path} after {_describe_position(checkpoint, config)}",
            *config_changes,
            *hyp_changes,
            *_machine_changes(ctx, checkpoint.header.run),
        ],
        launchers=command.launchers,
    )


def check_is_newest(checkpoint: Checkpoint) -> None:
    """Raises UserError when the run has gone on after ``checkpoint``: resuming would overwrite its later epochs."""
    last = checkpoint.path.parent / "last.pt"
    if checkpoint.path.resolve() == last.resolve():
        return
    newest = read_progress(last)
    if newest is None:  # damaged: an older checkpoint is what is left
        return
    progress = checkpoint.header.progress
    if (newest.epoch, newest.batch) > (progress.epoch, progress.batch):
        raise UserError(
            f"{checkpoint.path}: the run has gone on to epoch {newest.epoch} ({last}), and resuming here would "
            "overwrite it; to go back anyway, move last.pt elsewhere first"
        )


def merge_config(
    stored: TrainConfig, current: TrainConfig, explicit_flags: Collection[str]
) -> tuple[TrainConfig, list[str]]:
    """Returns the stored settings with those of the command line, and a message for each that changes.

    Raises UserError for a setting that a run cannot change.
    """
    changes: dict[str, Any] = {name: getattr(current, name) for name in _PROCESS_SETTINGS}
    changes["override"] = _joined_overrides(stored, current, explicit_flags)
    messages = []
    for name in sorted(set(explicit_flags) - changes.keys()):
        old = getattr(stored, name)
        new = getattr(current, name)
        keeps_stored = name in _KEEPS_STORED and _KEEPS_STORED[name](stored, current)
        if keeps_stored or new == old:
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
    return replace(stored, **changes), messages


def _joined_overrides(stored: TrainConfig, current: TrainConfig, explicit_flags: Collection[str]) -> list[str]:
    """Returns all ``--set`` of the run: another recipe (``--hyp``) drops the stored ones."""
    kept = [] if "hyp" in explicit_flags else stored.override
    added = current.override
    is_repeated = kept[len(kept) - len(added) :] == added  # torchrun restarts with the same command
    return kept if is_repeated else [*kept, *added]


def merge_hyperparameters(
    stored: Hyperparameters,
    current: TrainConfig,
    explicit_flags: Collection[str],
    *,
    pretrained: bool,
    keep_old: bool = False,
) -> tuple[Hyperparameters, list[str]]:
    """Returns the checkpoint's hyper-parameters, or those of ``--hyp`` if it is given, with ``--set`` on top; and
    messages, such as those that changed. ``pretrained``, ``keep_old``: those of the run, see `read_recipe`."""
    messages: list[str] = []
    base = stored
    if "hyp" in explicit_flags:
        base = read_recipe(current.hyp, pretrained=pretrained, keep_old=keep_old, lines=messages)
    hyp = with_overrides(base, current.override if "override" in explicit_flags else ())
    if hyp.lr_mult is None:  # chosen when the run began
        hyp = replace(hyp, lr_mult=stored.lr_mult)
    for field in fields(hyp):
        old = getattr(stored, field.name)
        new = getattr(hyp, field.name)
        if old != new:
            messages.append(f"resume: {field.name} {old!r} -> {new!r}")
    return hyp, messages


def choose_epochs(checkpoint: Checkpoint, config: TrainConfig, explicit_flags: Collection[str]) -> int:
    """Returns the number of epochs of a run that resumes with ``config``. ``--time`` for a run whose epochs are done
    gives it as many as fit."""
    done = checkpoint.header.progress.epoch
    gets_time = "time" in explicit_flags and config.time > 0
    if not gets_time or not done or done < config.epochs:
        return config.epochs
    return epochs_in_time(done, checkpoint.header.run.seconds, config.time * 3600)


def _describe_position(checkpoint: Checkpoint, config: TrainConfig) -> str:
    """Returns the progress text of a checkpoint, such as ``epoch 3 of 10 and 5 batches``."""
    progress = checkpoint.header.progress
    epochs = f"epoch {progress.epoch} of {config.epochs}"
    if progress.has_trained(checkpoint.header.run.epoch_batches):
        return f"{epochs} and the steps of epoch {progress.epoch + 1}"
    if progress.batch:
        return f"{epochs} and {counted(progress.batch, 'batch')}"
    return epochs


def _machine_changes(ctx: DistributedContext, conditions: RunConditions) -> list[str]:
    """Returns a message for each change of the processes and devices since a checkpoint."""
    messages = []
    if conditions.world_size not in (None, ctx.world_size):
        messages.append(f"resume: processes {conditions.world_size} -> {ctx.world_size}")
    if conditions.device not in (None, ctx.device.type):
        messages.append(f"resume: device {conditions.device} -> {ctx.device.type}")
    return messages


def check_unfinished(checkpoint: Checkpoint, config: TrainConfig, explicit_flags: Collection[str]) -> None:
    """Raises UserError, which says how to continue, if the run has ended. ``config``: the settings to resume with."""
    if checkpoint.header.pending is not None:  # its newest epoch has to be scored
        return
    progress = checkpoint.header.progress
    if progress.epoch >= config.epochs:
        raise UserError(f"{checkpoint.path}: {_reason_without_epochs(checkpoint, config, explicit_flags)}")
    if progress.stops_early(config.patience, epochs=config.epochs, val_every=config.val_every):
        raise UserError(f"{checkpoint.path}: {_reason_without_patience(checkpoint, config)}")


def _reason_without_epochs(checkpoint: Checkpoint, config: TrainConfig, explicit_flags: Collection[str]) -> str:
    """Says why there is no epoch left, and how to add some."""
    done = checkpoint.header.progress.epoch
    more = "--epochs N"
    if config.time:
        hours = checkpoint.header.run.seconds / 3600
        ended = f"--time {config.time:g}: no other epoch fits ({counted(done, 'epoch')} took {hours:.3g} hours)"
        more = "--time HOURS (of the whole run) or --epochs N"
    elif "epochs" in explicit_flags and config.epochs < done:
        ended = f"--epochs {config.epochs}: {done} are done already"
    else:
        ended = f"all epochs are done ({done})"
    return f"{ended}; to continue, set more: {resume_flag(checkpoint.path)} {more}"


def _reason_without_patience(checkpoint: Checkpoint, config: TrainConfig) -> str:
    """Says that the run has stopped early, and how to let it wait for longer."""
    progress = checkpoint.header.progress
    done = progress.epoch
    waited = done - progress.best_epoch
    return (
        f"stopped early after epoch {done}: no better {config.fitness} in {counted(waited, 'epoch')} (--patience "
        f"{config.patience}); to continue, wait for longer: {resume_flag(checkpoint.path)} --patience N, above "
        f"{waited}, or 0"
    )


@dataclass(frozen=True, kw_only=True)
class EpochData:
    """The training split of a run that continues."""

    batches: int  # in an epoch, on each rank
    images: int  # or tiles of them
    fingerprint: str  # of the data set, see `RunDescription.data`

    @staticmethod
    def of(train: InfiniteDataLoader, *, fingerprint: str) -> EpochData:
        return EpochData(batches=len(train), images=len(train.samples), fingerprint=fingerprint)


def restore_run(
    ctx: DistributedContext, checkpoint: Checkpoint, state: TrainState, config: TrainConfig, data: EpochData
) -> Progress:
    """Puts the state of a checkpoint in place: weights, averaged weights, optimizer and loss scale. Returns the
    progress from which the run continues. Raises UserError when the state does not fit the run."""
    checkpoint.restore(ctx, state)
    progress, messages = adapt_progress(checkpoint, config, data)
    for message in messages:
        get_logger().info("%s", message)
    return progress


def adapt_progress(checkpoint: Checkpoint, config: TrainConfig, data: EpochData) -> tuple[Progress, list[str]]:
    """Returns the progress of a checkpoint, counted in the batches and steps that an epoch has now, and a message for
    each change.

    Other batches or steps keep the position among the epoch's images, rounded down to a step; the losses of the epoch
    are summed from there on. Another number of images, or another order of them, begins the epoch anew. An epoch whose
    steps are done stays so, unless the number of images is another. The schedule is a function of the step among all
    steps, so steps are counted again.
    """
    stored = checkpoint.header.progress
    progress = replace(stored, class_weights=stored.class_weights if config.image_weights else [])
    messages = []
    if checkpoint.description.fingerprint != data.fingerprint:
        messages.append("resume: the images, the labels, or how the YAML reads them have changed since the run began")
    if stored.has_trained(checkpoint.header.run.epoch_batches) and _has_same_images(checkpoint, data):
        progress = replace(progress, batch=data.batches)
    elif stored.batch and not _takes_same_steps(checkpoint, config, data):
        progress.begin_epoch(_batches_taken(checkpoint, config, data))
        messages.append(f"resume: {_describe_start(progress, data.batches)}")
    steps = step_plan(config, data.batches)
    steps_in_epoch = math.ceil(progress.batch / steps.accumulate)
    progress = replace(
        progress,
        step=progress.epoch * data.batches + progress.batch,
        updates=progress.epoch * steps.per_epoch + steps_in_epoch,
    )
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


def _describe_start(progress: Progress, epoch_batches: int) -> str:
    """Says where in its epoch a run continues."""
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
