"""Plans what a command trains: a new run, the run of a folder (``--resume auto``, or a restart by torchrun), or the run
of a checkpoint that ``--resume`` names.

Rank 0 resolves the command, reads the folder and the checkpoint, decides and checks. All ranks get its plan, which
contains no tensors (run.py); each rank then reads the checkpoint that the plan names (restore.py).

The steps of a run that continues, on rank 0 up to 3, and then on all ranks (engine/assembly/build.py):

1. folder_plan.py, for the run of a folder, or find_checkpoint.py, for ``--resume PATH``, finds the checkpoint.
2. checkpoint_plan.py merges its settings with those of the command (merge_settings.py), and compares the files that
   both name (compare_files.py).
3. checkpoint_plan.py decides whether an epoch is left, and folder_plan.py whether the report is.
4. restore.py loads the state, and finds the epoch and step at which the run continues.
5. best_epoch.py makes best.pt agree with the best epoch so far.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from engine.checkpoint.checkpoint import CheckpointFacts
from engine.checkpoint.newest_run import newest_run_id
from engine.run.checkpoint_plan import plan_from_checkpoint
from engine.run.find_checkpoint import find_checkpoint
from engine.run.folder import SAVING_PATIENCE_S, ReadOnlyFolder, lock_folder
from engine.run.folder_plan import check_not_lost, plan_continued
from engine.run.launch_record import find_run_of_launchers
from engine.run.new_folder import check_run_dir
from engine.run.resolve_paths import resolve, resolve_command, with_checksums
from engine.run.run import ContinuedRun, EndedRun, NewRun, RunPlan, RunSettings, TrainCommand
from utils.config.flags import as_flag
from utils.config.recipes import read_recipe
from utils.config.settings import AUTO, TrainConfig, names_with
from utils.distributed.context import DistributedContext, all_objects, result_of_main
from utils.errors import UserError


def plan_run(
    ctx: DistributedContext, config: TrainConfig, explicit_flags: Collection[str], stack: ExitStack
) -> RunPlan | EndedRun:
    """Plans the run of a command line: a new or a continued one, or one that has ended (``--resume auto``). Every rank
    must call this.

    Args:
        config: the command line's settings.
        explicit_flags: names of the settings that the command line gives.
        stack: holds the lock on the folder of a run that continues.

    Raises UserError when there is nothing to resume from, no folder can be made, another process trains the run, or the
    run cannot have these settings.
    """
    # With --resume auto, the run is in the folder --project/--name at each of its starts.
    typed = replace(config, exist_ok=True) if config.resume == AUTO else config
    launchers = all_objects(ctx, ctx.launcher_identity)
    plan = result_of_main(ctx, lambda: _plan(resolve_command(ctx, typed, explicit_flags, launchers), stack))
    return _with_local_settings(plan, typed, explicit_flags)


def _plan(command: TrainCommand, stack: ExitStack) -> RunPlan | EndedRun:
    """Plans the run of a command. Only rank 0 calls this."""
    config = command.config
    restarted_folder = find_run_of_launchers(config, command.launchers)
    if restarted_folder is not None:
        return _plan_in_folder(command, restarted_folder, stack)
    if config.resume == AUTO and config.folder.is_dir():
        return _plan_in_folder(command, config.folder, stack)
    if config.resume not in (None, AUTO):
        path = find_checkpoint(config)
        # A file from which no run can resume is refused before anything is written beside it. Without last.pt, a
        # process that trains the folder's run may be about to save it.
        if path.exists() or newest_run_id(path.parent) is None:
            CheckpointFacts.read(path)
        _check_project(command, path.parent)
        lock_folder(path.parent, stack)
        return _plan_named(command, path)
    return _plan_new(command)


def _check_project(command: TrainCommand, folder: Path) -> None:
    """Raises UserError if the command names a ``--project`` that does not contain ``folder``, where the run continues.
    (A bare ``--resume`` finds the run in the project.)"""
    config = command.config
    if not config.resume or "project" not in command.explicit_flags:
        return
    if not Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(config.project)):
        flag = as_flag("project", config.project)
        raise UserError(f"{flag}: the run continues in its own folder, {folder}; leave out --project")


def _plan_new(command: TrainCommand, folder: Path | None = None) -> NewRun:
    """Plans a run from the beginning, in ``folder`` if that is locked already."""
    config = command.config
    if folder is None:
        check_run_dir(config.project, config.name, config.exist_ok)
    messages: list[str] = []
    hyp = read_recipe(
        config.hyp, config.override, pretrained=bool(config.weights), keep_old=config.keep_old, lines=messages
    )
    if folder is not None:
        messages.append(f"{folder}: nothing has been saved yet; the run starts from the beginning")
    settings = RunSettings(config, hyp, with_checksums(command.files, config))
    return NewRun(settings=settings, launchers=command.launchers, folder=folder, startup_messages=messages)


def _plan_in_folder(command: TrainCommand, folder: Path, stack: ExitStack) -> RunPlan | EndedRun:
    """Plans the run of a folder, whether it has saved something or not: with ``--resume auto``, or after torchrun has
    restarted the same command because a process failed or a node joined."""
    # A process that was told to stop, or whose parent was killed, may still be saving there.
    try:
        lock_folder(folder, stack, patience_s=SAVING_PATIENCE_S)
    except ReadOnlyFolder:
        ended = plan_continued(command, folder)
        if isinstance(ended, EndedRun):  # writes nothing but exports, which lock the folder themselves
            return ended
        raise
    plan = plan_continued(command, folder)
    if plan is not None:
        return plan
    if command.config.resume not in (None, AUTO):  # restarted: from an epochN.pt, and nothing has been saved since
        return _plan_named(command, find_checkpoint(command.config))
    check_not_lost(folder)
    return _plan_new(command, folder)


def _plan_named(command: TrainCommand, path: Path) -> ContinuedRun:
    """Plans the run that wrote the checkpoint ``path``. Raises UserError if that run has ended."""
    plan = plan_from_checkpoint(command, path)
    if plan.end_reason:
        raise UserError(f"{path}: {plan.end_reason}")
    return plan


def _with_local_settings(
    plan: RunPlan | EndedRun, typed: TrainConfig, explicit_flags: Collection[str]
) -> RunPlan | EndedRun:
    """Returns the plan of rank 0 with the settings that are this rank's own: those of scope "machine", and the paths
    that the plan leaves to each process. The content of their files is compared later."""
    machine_settings = names_with(TrainConfig, scope="machine")
    if not isinstance(plan, NewRun):  # the run has stored the others
        machine_settings &= names_with(TrainConfig, on_resume="current") | frozenset(explicit_flags)
    local = resolve(typed)
    local_settings = {name: getattr(local, name) for name in machine_settings | plan.local_paths}
    settings = replace(plan.settings, config=replace(plan.settings.config, **local_settings))
    return replace(plan, settings=settings)
