"""Whether a run can be resumed from a checkpoint, and with which settings."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields, replace
from typing import Any

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.progress import read_progress
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

# Flags that leave a run as it is, although they may have another value than its stored settings: by name, a function of
# these and of the settings of the command line.
_KEEPS_STORED: dict[str, Callable[[TrainConfig, TrainConfig], bool]] = {
    "data": lambda stored, current: normal_path(current.data) == normal_path(stored.data),
    "batch_size": lambda _, current: current.batch_size == FIND_BATCH_SIZE,  # found when the run began
    "optimizer": lambda _, current: current.optimizer == "auto",  # chosen when the run began
    # --time has decided about the epochs since the first one; torchrun restarts with the flags of then.
    "epochs": lambda stored, current: 0 < current.time == stored.time,
}


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


def resumed_epochs(checkpoint: Checkpoint, config: TrainConfig, explicit_flags: Collection[str]) -> int:
    """Returns the number of epochs of a run that resumes with ``config``. ``--time`` for a run whose epochs are done
    gives it as many as fit."""
    done = checkpoint.header.progress.epoch
    gets_time = "time" in explicit_flags and config.time > 0
    if not gets_time or not done or done < config.epochs:
        return config.epochs
    return epochs_in_time(done, checkpoint.header.run.seconds, config.time * 3600)


def check_can_continue(checkpoint: Checkpoint, config: TrainConfig, explicit_flags: Collection[str]) -> None:
    """Raises UserError, which says how to continue, if the run has ended. ``config``: the settings to resume with."""
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


def resumed_config(
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


def resumed_hyperparameters(
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
