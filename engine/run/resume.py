"""Whether a run can be resumed from a checkpoint, and with which settings."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any

from engine.checkpoint.checkpoint import Checkpoint
from engine.optim.schedule import epochs_in_time
from utils.config.recipes import read_recipe, with_overrides
from utils.config.settings import FIND_BATCH_SIZE, Hyperparameters, TrainConfig, names_with
from utils.errors import UserError
from utils.files.paths import normal_path
from utils.program import resume_flag
from utils.strings import counted

# Settings of the process that resumes, not of the run.
_PROCESS_SETTINGS = names_with(TrainConfig, on_resume="current")
# With other values the stored weights would not fit the model or the optimizer's state its parameters, the order of
# images would be undefined, or the best epoch so far would not be known.
_FIXED_SETTINGS = names_with(TrainConfig, on_resume="fixed")


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
    if checkpoint.progress.epoch >= config.epochs:
        raise UserError(f"{checkpoint.path}: {_reason_without_epochs(checkpoint, config, explicit_flags)}")
    if checkpoint.progress.stops_early(config.patience, epochs=config.epochs, val_every=config.val_every):
        raise UserError(f"{checkpoint.path}: {_reason_without_patience(checkpoint, config)}")


def _reason_without_epochs(checkpoint: Checkpoint, config: TrainConfig, explicit_flags: Collection[str]) -> str:
    """Says why there is no epoch left, and how to add some."""
    done = checkpoint.progress.epoch
    more = "--epochs N"
    if config.time:
        hours = checkpoint.run.seconds / 3600
        ended = f"--time {config.time:g}: no other epoch fits ({counted(done, 'epoch')} took {hours:.3g} hours)"
        more = "--time HOURS (of the whole run) or --epochs N"
    elif "epochs" in explicit_flags and config.epochs < done:
        ended = f"--epochs {config.epochs}: {done} are done already"
    else:
        ended = f"all epochs are done ({done})"
    return f"{ended}; to continue, set more: {resume_flag(checkpoint.path)} {more}"


def _reason_without_patience(checkpoint: Checkpoint, config: TrainConfig) -> str:
    """Says that the run has stopped early, and how to let it wait for longer."""
    done = checkpoint.progress.epoch
    waited = done - checkpoint.progress.best_epoch
    return (
        f"stopped early after epoch {done}: no better {config.fitness} in {counted(waited, 'epoch')} (--patience "
        f"{config.patience}); to continue, wait for longer: {resume_flag(checkpoint.path)} --patience N, above "
        f"{waited}, or 0"
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
    return replace(stored, **changes), messages


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
    if name == "optimizer" and new == "auto":  # chosen when the run began
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
        hyp = replace(hyp, lr_mult=stored.lr_mult)
    for field in fields(hyp):
        old = getattr(stored, field.name)
        new = getattr(hyp, field.name)
        if old != new:
            messages.append(f"resume: {field.name} {old!r} -> {new!r}")
    return hyp, messages
