"""Continues a run from its checkpoint: with which settings, in which state, and where."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from engine.checkpoint.checkpoint import Checkpoint, Progress, TrainState
from engine.optim.schedule import epochs_in_time, step_plan
from utils.config.parser import read_recipe, with_overrides
from utils.config.settings import FIND_BATCH_SIZE, Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.paths import normal_path
from utils.files.schema import build
from utils.logger import get_logger
from utils.program import resume_flag
from utils.strings import class_difference, counted

# Settings of the process that resumes, not of the run.
_OF_THE_PROCESS = ("resume", "spawn", "eval_ranks")
# With other values the stored weights would not fit the model or the optimizer's state its parameters, the order of
# images would be undefined, or the best epoch so far would not be known.
_FIXED = ("model", "weights", "keep_old", "val_fraction", "classes", "single_cls", "freeze", "fitness", "name")


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


def resumed_epochs(checkpoint: Checkpoint, config: TrainConfig, given: Collection[str]) -> int:
    """The number of epochs of a run that resumes with ``config``: as many as fit into a ``--time`` that is given to a
    run whose epochs are done."""
    done = checkpoint.progress.epoch
    if "time" not in given or not config.time or not done or done < config.epochs:
        return config.epochs
    return epochs_in_time(done, checkpoint.run["seconds"], config.time * 3600)


def check_can_continue(checkpoint: Checkpoint, config: TrainConfig, given: Collection[str]) -> None:
    """Raises UserError, with what continues the run, if it has ended. ``config``: with which it is to resume."""
    progress, path = checkpoint.progress, checkpoint.path
    resume = resume_flag(path)
    done = progress.epoch
    if done >= config.epochs:
        if config.time:
            hours = checkpoint.run["seconds"] / 3600
            ended = f"--time {config.time:g}: no other epoch fits ({counted(done, 'epoch')} took {hours:.3g} hours)"
            more = f"{resume} --time HOURS (of the whole run) or --epochs N"
        else:
            is_fewer = "epochs" in given and config.epochs < done
            ended = (
                f"--epochs {config.epochs}: {done} are done already" if is_fewer else f"all epochs are done ({done})"
            )
            more = f"{resume} --epochs N"
        raise UserError(f"{path}: {ended}; to continue, set more: {more}")
    if progress.stops_early(config.patience, epochs=config.epochs, val_every=config.val_every):
        waited = done - progress.best_epoch
        raise UserError(
            f"{path}: stopped early after epoch {done}: no better {config.fitness} in {counted(waited, 'epoch')} "
            f"(--patience {config.patience}); to continue, wait for longer: {resume} --patience N, above {waited}, or 0"
        )


def check_classes(checkpoint: Checkpoint, now: Sequence[str], source: str) -> None:
    """Raises UserError when the data set ``source`` has other classes than the run, or has them in another order."""
    path = checkpoint.path
    if what := class_difference(checkpoint.names, now):
        raise UserError(
            f"{path}: the run and {source} do not have the same classes ({what}); for other classes start a new run "
            f"with --weights {shlex.quote(str(path))}"
        )


def resumed_config(
    stored: dict[str, Any], current: TrainConfig, given: Collection[str], path: str | Path
) -> tuple[TrainConfig, list[str]]:
    """The stored settings, overridden by those that the command line gives, and a line for each that changed."""
    base = build(TrainConfig, stored, f"{path}: config")
    changes: dict[str, Any] = {name: getattr(current, name) for name in _OF_THE_PROCESS}
    kept, added = [] if "hyp" in given else base.override, current.override
    changes["override"] = kept if kept[len(kept) - len(added) :] == added else [*kept, *added]  # a restart repeats them
    lines = []
    for name in sorted(set(given) - {*_OF_THE_PROCESS, "override"}):
        old, new = getattr(base, name), getattr(current, name)
        is_same_data = name == "data" and normal_path(old) == normal_path(new)
        if old == new or is_same_data or (name == "batch_size" and new == FIND_BATCH_SIZE):  # found when the run began
            continue
        if name in _FIXED:
            raise UserError(
                f"--{name.replace('_', '-')} {new}: the run being resumed has {old!r}; start a new run with --weights"
            )
        changes[name] = new
        lines.append(f"resume: {name} {old!r} -> {new!r}")
    if "epochs" in given and "time" not in given and base.time:
        changes["time"] = 0.0
        lines.append(f"resume: time {base.time!r} -> 0.0, as --epochs is given")
    return dataclasses.replace(base, **changes), lines


def resumed_hyperparameters(
    stored: dict[str, Any], current: TrainConfig, given: Collection[str], path: str | Path, *, pretrained: bool
) -> tuple[Hyperparameters, list[str]]:
    """The checkpoint's hyper-parameters, or those of ``--hyp`` if it is given, with ``--set`` on top; and lines for
    the log, such as those that changed. ``pretrained``: as in `read_recipe`."""
    before = build(Hyperparameters, stored, f"{path}: hyp")
    lines: list[str] = []
    base = before
    if "hyp" in given:
        base = read_recipe(current.hyp, pretrained=pretrained, keep_old=current.keep_old, lines=lines)
    hyp = with_overrides(base, current.override if "override" in given else ())
    if hyp.lr_mult is None:  # chosen when the run began
        hyp = dataclasses.replace(hyp, lr_mult=before.lr_mult)
    changed = [(f.name, getattr(before, f.name), getattr(hyp, f.name)) for f in dataclasses.fields(hyp)]
    return hyp, [*lines, *(f"resume: {name} {old!r} -> {new!r}" for name, old, new in changed if old != new)]


def restore_run(
    ctx: DistributedContext,
    checkpoint: Checkpoint,
    state: TrainState,
    config: TrainConfig,
    epoch_batches: int,
    fingerprint: str,
) -> Progress:
    """Puts the state of a checkpoint in place: weights, averaged weights, optimizer and loss scale. Frees the
    checkpoint's copies, and returns where the run continues.

    Raises UserError when the state does not fit the run.
    """
    checkpoint.restore(ctx, state)
    checkpoint.free_tensors()
    progress, lines = resumed_position(checkpoint, config, epoch_batches, fingerprint)
    for line in lines:
        get_logger().info("%s", line)
    if not config.image_weights:
        progress.class_weights = []
    return progress


def resumed_position(
    checkpoint: Checkpoint, config: TrainConfig, epoch_batches: int, fingerprint: str
) -> tuple[Progress, list[str]]:
    """The position at which a run continues, and a line for each reason why it is not the checkpoint's.

    Another global batch keeps the position among the epoch's images, rounded down to a step, or after its last step;
    another number of images begins the epoch anew. The schedule is a function of the step among all steps, so steps are
    counted again.
    """
    progress, plan = checkpoint.progress, step_plan(config, epoch_batches)
    where = dataclasses.replace(progress)
    lines = []
    same_data = checkpoint.data["fingerprint"] == fingerprint
    epoch_batches_before = checkpoint.run["epoch_batches"]
    same_batches = epoch_batches_before == epoch_batches
    if not same_data:
        lines.append("resume: the images, the labels, or how the YAML reads them have changed since the run began")
    if same_batches and checkpoint.config["batch_size"] == config.batch_size:
        if where.batch < epoch_batches:
            where.batch -= where.batch % plan.accumulate
    elif same_data and progress.has_trained(epoch_batches_before):
        where.batch = epoch_batches
    elif where.batch:
        images = where.batch * checkpoint.config["batch_size"]
        where.begin_epoch()
        if same_data:
            where.batch = min(images // config.batch_size, epoch_batches) // plan.accumulate * plan.accumulate
        if where.batch:
            lines.append(f"resume: continues at batch {where.batch} of the {epoch_batches} of epoch {where.epoch + 1}")
        else:
            lines.append(f"resume: begins epoch {where.epoch + 1} again")
    where.step = where.epoch * epoch_batches + where.batch
    where.updates = where.epoch * plan.steps + -(-where.batch // plan.accumulate)
    if checkpoint.config["epochs"] != config.epochs or where.updates != progress.updates:
        done, epochs = where.updates / plan.total, counted(config.epochs, "epoch")
        lines.append(f"resume: the learning rate continues from its value after {done:.0%} of {epochs}")
    return where, lines
