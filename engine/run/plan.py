"""Plans what a command trains: a new run, one that ``--resume`` names, or one that torchrun restarts."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from data.source.dataset_spec import DataSource
from engine.run.continuation import check_not_lost, plan_continued
from engine.run.find_checkpoint import find_checkpoint
from engine.run.folder import SAVING_PATIENCE_S, find_run_of_launchers, lock_folder
from engine.run.new_folder import check_run_dir
from engine.run.resume import plan_from_checkpoint, reason_to_end
from engine.run.run import Command, EndedRun, RunPlan, RunSettings
from utils.config.paths import absolute_paths
from utils.config.recipes import read_recipe
from utils.config.settings import AUTO, TrainConfig
from utils.distributed.agreement import check_same_run
from utils.distributed.context import DistributedContext, all_objects, result_of_main
from utils.errors import UserError


def plan_run(
    ctx: DistributedContext, config: TrainConfig, explicit_flags: Collection[str], stack: ExitStack
) -> RunPlan | EndedRun:
    """Plans the run of a command line: a new, a resumed or a restarted one, or one that has ended (``--resume auto``).
    Every rank must call this.

    Args:
        config: the command line's settings.
        explicit_flags: names of the settings that the command line gives.
        stack: holds the lock on the folder of a run that continues.

    Raises UserError when there is nothing to resume from, no folder can be made, another process trains the run, or the
    processes do not have the same settings or the same position of a checkpoint.
    """
    if config.resume == AUTO:  # the run is in the folder --project/--name, at each of its starts
        config = replace(config, exist_ok=True)
    command = Command(config, explicit_flags, launchers=all_objects(ctx, ctx.launcher))
    restarted_folder = result_of_main(ctx, lambda: find_run_of_launchers(config, command.launchers))
    if restarted_folder is not None:
        return _plan_restarted(ctx, command, restarted_folder, stack)
    if config.resume == AUTO:
        return _plan_automatic(ctx, command, stack)
    if config.resume is not None:
        return _plan_resumed(ctx, command, stack)
    return _plan_new(ctx, command)


def _plan_new(ctx: DistributedContext, command: Command) -> RunPlan:
    """Plans a new run."""
    config = command.config
    result_of_main(ctx, lambda: check_run_dir(config.project, config.name, config.exist_ok))
    return _plan_from_beginning(ctx, command)


def _plan_automatic(ctx: DistributedContext, command: Command, stack: ExitStack) -> RunPlan | EndedRun:
    """Plans the run of the folder ``--project/--name``, whether it has started before or not (``--resume auto``)."""
    folder = command.config.folder
    if not result_of_main(ctx, folder.is_dir):
        return _plan_new(ctx, command)
    # A process that was told to stop, or whose parent was killed, may still be saving there.
    lock_folder(ctx, folder, stack, patience_s=SAVING_PATIENCE_S)
    plan = plan_continued(ctx, command, folder)
    if plan is not None:
        return plan
    result_of_main(ctx, lambda: check_not_lost(folder))
    return replace(_plan_new(ctx, command), folder=folder)


def _plan_resumed(ctx: DistributedContext, command: Command, stack: ExitStack) -> RunPlan:
    """Plans the run that ``--resume`` continues."""
    path = find_checkpoint(ctx, command.config)
    lock_folder(ctx, path.parent, stack)
    return _plan_if_unfinished(ctx, command, path)


def _plan_restarted(ctx: DistributedContext, command: Command, folder: Path, stack: ExitStack) -> RunPlan | EndedRun:
    """Plans a run that torchrun has started again, with the same command, after a process has failed or a node has
    come."""
    lock_folder(ctx, folder, stack)  # first: a process that is still ending may be writing last.pt
    plan = plan_continued(ctx, command, folder)
    if plan is not None:
        return plan
    if command.config.resume not in (None, AUTO):  # from an epochN.pt, and nothing has been saved since
        return _plan_if_unfinished(ctx, command, find_checkpoint(ctx, command.config))
    plan = _plan_from_beginning(ctx, command)
    messages = [*plan.startup_messages, "restarted before the first checkpoint"]
    return replace(plan, folder=folder, startup_messages=messages)


def _plan_from_beginning(ctx: DistributedContext, command: Command) -> RunPlan:
    """Returns the plan of a run without a checkpoint, and for now without a folder."""
    config = command.config
    messages: list[str] = []
    hyp = read_recipe(
        config.hyp, config.override, pretrained=bool(config.weights), keep_old=config.keep_old, lines=messages
    )
    # The run may continue in another working folder. The data set gets its absolute path when it has been opened.
    paths = absolute_paths(config)
    paths.pop("data", None)
    config = replace(config, **paths)
    check_same_run(ctx, config, hyp, None)
    return RunPlan(
        settings=RunSettings(config, hyp),
        data_source=DataSource.of_training(config),
        startup_messages=messages,
        launchers=command.launchers,
    )


def _plan_if_unfinished(ctx: DistributedContext, command: Command, path: Path) -> RunPlan:
    """Returns the plan of the run that wrote the checkpoint ``path``. Raises UserError if that run has ended."""
    plan = plan_from_checkpoint(ctx, command, path)
    assert plan.checkpoint is not None
    reason = reason_to_end(plan.checkpoint, plan.settings.config, command.explicit_flags)
    if reason:
        raise UserError(reason)
    return plan
