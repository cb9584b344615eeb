"""What a command trains, and how that starts: a new run, one that ``--resume`` names, or one that torchrun restarts."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from data.source.dataset_spec import DataSource
from engine.checkpoint.newest_run import checkpoint_of_newest_run
from engine.run.find_checkpoint import find_checkpoint
from engine.run.folder import find_run_of_launchers, lock_folder
from engine.run.new_folder import check_run_dir
from engine.run.resume import check_unfinished, plan_from_checkpoint
from engine.run.run import Command, RunPlan, RunSettings
from utils.config.recipes import read_recipe
from utils.config.settings import TrainConfig
from utils.distributed.agreement import check_same_run
from utils.distributed.context import DistributedContext, all_objects, broadcast_object, torch_distributed_zero_first


def plan_run(
    ctx: DistributedContext, config: TrainConfig, explicit_flags: Collection[str], stack: ExitStack
) -> RunPlan:
    """Plans the run of a command line: a new, a resumed or a restarted one. Every rank must call this.

    Args:
        config: the command line's settings.
        explicit_flags: names of the settings that the command line gives.
        stack: holds the lock on the folder of a run that continues.

    Raises UserError when there is nothing to resume from, no folder can be made, another process trains the run, or the
    processes do not have the same settings or the same position of a checkpoint.
    """
    command = Command(config, explicit_flags, launchers=all_objects(ctx, ctx.launcher))
    restarted_folder = broadcast_object(ctx, find_run_of_launchers(config, command.launchers) if ctx.is_main else None)
    if restarted_folder is not None:
        plan = _plan_restarted(ctx, command, restarted_folder, stack)
    elif config.resume is not None:
        plan = _plan_resumed(ctx, command, stack)
    else:
        plan = _plan_new(ctx, command)
    progress = None if plan.checkpoint is None else asdict(plan.checkpoint.header.progress)
    check_same_run(ctx, plan.settings.config, plan.settings.hyp, progress)
    return plan


def _plan_new(ctx: DistributedContext, command: Command) -> RunPlan:
    """Plans a new run."""
    config = command.config
    with torch_distributed_zero_first(ctx):
        if ctx.is_main:
            check_run_dir(config.project, config.name, config.exist_ok)
    return _plan_from_beginning(command)


def _plan_resumed(ctx: DistributedContext, command: Command, stack: ExitStack) -> RunPlan:
    """Plans the run that ``--resume`` continues."""
    path = find_checkpoint(ctx, command.config)
    lock_folder(ctx, path.parent, stack)
    return _plan_if_unfinished(ctx, command, path)


def _plan_restarted(ctx: DistributedContext, command: Command, folder: Path, stack: ExitStack) -> RunPlan:
    """Plans a run that torchrun has started again, with the same command, after a process has failed or a node has
    come."""
    lock_folder(ctx, folder, stack)  # first: a process that is still ending may be writing last.pt
    path = checkpoint_of_newest_run(folder)
    if path is not None:
        return plan_from_checkpoint(ctx, command, path)
    if command.config.resume is not None:  # from an epochN.pt, and nothing has been saved since
        return _plan_if_unfinished(ctx, command, find_checkpoint(ctx, command.config))
    plan = _plan_from_beginning(command)
    messages = [*plan.startup_messages, "restarted before the first checkpoint"]
    return replace(plan, folder=folder, startup_messages=messages)


def _plan_from_beginning(command: Command) -> RunPlan:
    """Returns the plan of a run without a checkpoint, and for now without a folder."""
    config = command.config
    messages: list[str] = []
    hyp = read_recipe(
        config.hyp, config.override, pretrained=bool(config.weights), keep_old=config.keep_old, lines=messages
    )
    return RunPlan(
        settings=RunSettings(config, hyp),
        data_source=DataSource.of_training(config),
        startup_messages=messages,
        launchers=command.launchers,
    )


def _plan_if_unfinished(ctx: DistributedContext, command: Command, path: Path) -> RunPlan:
    """Returns the plan of the run that wrote the checkpoint ``path``. Raises UserError if that run has ended."""
    plan = plan_from_checkpoint(ctx, command, path)
    if plan.checkpoint is not None:
        check_unfinished(plan.checkpoint, plan.settings.config, command.explicit_flags)
    return plan
