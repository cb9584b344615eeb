"""Plans a run that continues from a checkpoint: its settings, and whether there is anything left to train."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from data.dataset.spec import DEMO
from engine.checkpoint.checkpoint import CheckpointFacts
from engine.checkpoint.data_location import find_location
from engine.checkpoint.progress import RunConditions
from engine.optim.schedule import epochs_in_time
from engine.run.find_checkpoint import check_is_newest
from engine.run.merge_settings import describe_changes, merge_settings
from engine.run.run import ContinuedRun, RunSettings, StartedFrom, TrainCommand
from utils.config.settings import TrainConfig
from utils.program import resume_flag
from utils.strings import counted, format_duration


def plan_from_checkpoint(command: TrainCommand, path: Path) -> ContinuedRun:
    """Returns the plan of the run that wrote the checkpoint ``path``: its settings, but for what the command line
    changes.

    Raises UserError for a file from which no run can continue (its tensors are checked when they are read), for a
    checkpoint that is not the newest of its run, and for a setting that cannot change.
    """
    started_from = StartedFrom.of(CheckpointFacts.read(path))
    check_is_newest(started_from)
    stored = stored_settings(started_from)
    merged = merge_settings(stored, command)
    epochs = choose_epochs(started_from, merged.settings.config, command.explicit_flags)
    requested = merged.settings.with_epochs(epochs)
    settings = requested.with_epochs(max(epochs, started_from.progress.epoch))
    _, known_root = find_location(started_from.description.data, path)
    names_other_data = settings.config.data != stored.config.data
    return ContinuedRun(
        settings=settings,
        stored=merged.stored,
        launchers=command.launchers,
        local_paths=merged.local_paths,
        started_from=started_from,
        known_root="" if names_other_data else known_root,
        # By the requested epochs, which may be fewer than are done.
        end_reason=reason_to_end(started_from, requested.config, command.explicit_flags),
        change_messages=[*merged.messages, *describe_changes(stored, settings)],
        machine_messages=_machine_changes(command, started_from.conditions),
    )


def stored_settings(started_from: StartedFrom) -> RunSettings:
    """Returns the settings of the run that wrote a checkpoint, with the data set where it is now."""
    stored = started_from.description
    config = stored.config
    if config.data != DEMO:
        source, _ = find_location(stored.data, started_from.path)
        config = replace(config, data=source)
    return RunSettings(config, stored.hyp, stored.files)


def choose_epochs(started_from: StartedFrom, config: TrainConfig, explicit_flags: Collection[str]) -> int:
    """Returns the number of epochs of a run that resumes with ``config``. A new ``--time`` for a run whose epochs are
    done adds as many epochs as fit."""
    done = started_from.progress.epoch
    gets_time = "time" in explicit_flags and 0 < config.time != started_from.description.config.time
    if not gets_time or not done or done < config.epochs:
        return config.epochs
    return epochs_in_time(done, started_from.seconds, config.time * 3600)


def _machine_changes(command: TrainCommand, conditions: RunConditions) -> list[str]:
    """Returns a message for each change of the processes and devices since a checkpoint."""
    messages = []
    if conditions.world_size != command.world_size:
        messages.append(f"resume: processes {conditions.world_size} -> {command.world_size}")
    if conditions.device != command.device_type:
        messages.append(f"resume: device {conditions.device} -> {command.device_type}")
    return messages


def reason_to_end(started_from: StartedFrom, config: TrainConfig, explicit_flags: Collection[str]) -> str:
    """Returns why the run of a checkpoint has ended, and how to continue it (`EndedRun.end_reason`); "" if epochs or
    scores of the newest one are missing. ``config``: the settings to resume with."""
    if started_from.lacks_scores(config.epochs):
        return ""
    progress = started_from.progress
    if progress.epoch >= config.epochs:
        return _reason_without_epochs(started_from, config, explicit_flags)
    stored = started_from.description.config  # tells which epochs have been validated
    if progress.stops_early(config.patience, epochs=config.epochs, val_every=stored.val_every):
        return _reason_without_patience(started_from, config)
    return ""


def _reason_without_epochs(started_from: StartedFrom, config: TrainConfig, explicit_flags: Collection[str]) -> str:
    """Explains why no epoch is left, and how to add some."""
    done = started_from.progress.epoch
    more = "--epochs N"
    if config.time:
        duration = format_duration(started_from.seconds)
        ended = f"--time {config.time:g}: no further epoch fits ({counted(done, 'epoch')} took {duration})"
        more = "--time HOURS (of the whole run) or --epochs N"
    elif "epochs" in explicit_flags and config.epochs < done:
        ended = f"--epochs {config.epochs}: {done} are done already"
    else:
        ended = f"all epochs are done ({done})"
    return f"{ended}; to train longer: {resume_flag(started_from.path)} {more}"


def _reason_without_patience(started_from: StartedFrom, config: TrainConfig) -> str:
    """Explains that the run has stopped early, and how to make it wait longer."""
    progress = started_from.progress
    done = progress.epoch
    waited = done - progress.best_epoch
    return (
        f"stopped early after epoch {done}: no better {config.fitness} in {counted(waited, 'epoch')} (--patience "
        f"{config.patience}); to continue, wait for longer: {resume_flag(started_from.path)} --patience N, above "
        f"{waited}, or 0"
    )
