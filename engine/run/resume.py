"""Continues a run from a checkpoint.

In the order in which these are called, by engine/run/plan.py and engine/assembly/build.py:

1. continuation.py for the run of a folder, or find_checkpoint.py for ``--resume PATH``: from which file
2. `plan_from_checkpoint`: with which settings (resume_settings.py), and `reason_to_end`: whether there is anything left
   to train
3. restore.py: the state is put in place, and `adapt_progress` says at which epoch and step the run continues
4. best_epoch.py: which epoch is the best so far, with its best.pt
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path

from data.source.dataset_spec import DataSource
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.progress import RunConditions
from engine.optim.schedule import epochs_in_time
from engine.run.find_checkpoint import check_is_newest
from engine.run.resume_settings import merge_settings
from engine.run.run import Command, RunPlan, RunSettings, StartedFrom
from utils.config.settings import TrainConfig
from utils.distributed.agreement import check_same_run
from utils.distributed.context import DistributedContext
from utils.files.data_location import find_location
from utils.program import resume_flag
from utils.strings import counted


def plan_from_checkpoint(ctx: DistributedContext, command: Command, path: Path) -> RunPlan:
    """Returns the plan of the run that wrote the checkpoint ``path``: its settings, but for what the command line
    changes.

    Raises UserError for a file from which no run can continue, for a checkpoint that is not the newest of its run, for
    a setting that cannot change, and if the ranks do not have the same settings or the same position.
    """
    checkpoint = Checkpoint.read(path)
    check_is_newest(checkpoint)
    stored = stored_settings(checkpoint)
    settings, changes = merge_settings(stored, command.config, command.explicit_flags)
    epochs = choose_epochs(checkpoint, settings.config, command.explicit_flags)
    config = replace(settings.config, epochs=epochs)
    _, known_root = find_location(checkpoint.description.data, path)
    data_source = DataSource.of_training(config)
    if known_root and config.data == stored.config.data:  # the command line names no other data set
        data_source = replace(data_source, known_root=known_root, stored_in=str(path))
    check_same_run(ctx, config, settings.hyp, asdict(checkpoint.header.progress))
    return RunPlan(
        settings=replace(settings, config=config),
        data_source=data_source,
        folder=path.parent,
        started_from=StartedFrom.of(checkpoint),
        checkpoint=checkpoint,
        startup_messages=[
            f"resuming {path} after {_describe_position(checkpoint, config)}",
            *changes,
            *_machine_changes(ctx, checkpoint.header.run),
        ],
        launchers=command.launchers,
    )


def stored_settings(checkpoint: Checkpoint) -> RunSettings:
    """Returns the settings of the run that wrote ``checkpoint``, with the data set where it is now."""
    stored = checkpoint.description
    config = stored.config
    if config.data != "demo":
        source, _ = find_location(stored.data, checkpoint.path)
        config = replace(config, data=source)
    return RunSettings(config, stored.hyp)


def choose_epochs(checkpoint: Checkpoint, config: TrainConfig, explicit_flags: Collection[str]) -> int:
    """Returns the number of epochs of a run that resumes with ``config``. Another ``--time`` for a run whose epochs are
    done gives it as many as fit."""
    done = checkpoint.header.progress.epoch
    gets_time = "time" in explicit_flags and 0 < config.time != checkpoint.description.config.time
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


def reason_to_end(checkpoint: Checkpoint, config: TrainConfig, explicit_flags: Collection[str]) -> str:
    """Returns why the run of a checkpoint has ended, and how to continue it; "" if epochs or scores of the newest one
    are missing. ``config``: the settings to resume with."""
    if checkpoint.header.pending is not None:  # its newest epoch has to be scored
        return ""
    progress = checkpoint.header.progress
    if progress.epoch >= config.epochs:
        return f"{checkpoint.path}: {_reason_without_epochs(checkpoint, config, explicit_flags)}"
    if progress.stops_early(config.patience, epochs=config.epochs, val_every=config.val_every):
        return f"{checkpoint.path}: {_reason_without_patience(checkpoint, config)}"
    return ""


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
