"""What a command trains, and how that starts: a new run, one that ``--resume`` names, or one that torchrun restarts."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from data.source.dataset_spec import DataSource
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.newest_run import checkpoint_of_newest_run, has_earlier_checkpoint
from engine.checkpoint.progress import RunConditions
from engine.run.folder import find_run_of_launchers, lock_folder
from engine.run.resume import (
    check_can_continue,
    check_is_newest,
    resumed_config,
    resumed_epochs,
    resumed_hyperparameters,
)
from engine.run.run import RunPlan, RunSettings
from utils.config.recipes import read_recipe
from utils.config.settings import TrainConfig
from utils.distributed.agreement import check_same_run
from utils.distributed.context import DistributedContext, all_objects, broadcast_object, torch_distributed_zero_first
from utils.errors import UserError
from utils.files.data_location import find_location
from utils.files.run_folders import check_run_dir
from utils.program import resume_flag
from utils.strings import counted


@dataclass(frozen=True)
class Command:
    """What starts a run."""

    config: TrainConfig  # settings of the command line
    explicit_flags: Collection[str]  # names of the settings that the command line gives
    launchers: list[str]  # torchrun processes that started the ranks; "" without one


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
    path = _checkpoint_to_resume(ctx, command.config)
    lock_folder(ctx, path.parent, stack)
    return _plan_if_unfinished(ctx, command, path)


def _plan_restarted(ctx: DistributedContext, command: Command, folder: Path, stack: ExitStack) -> RunPlan:
    """Plans a run that torchrun has started again, with the same command, after a process has failed or a node has
    come."""
    lock_folder(ctx, folder, stack)  # first: a process that is still ending may be writing last.pt
    path = checkpoint_of_newest_run(folder)
    if path is not None:
        return _plan_from_checkpoint(ctx, command, path)
    if command.config.resume is not None:  # from an epochN.pt, and nothing has been saved since
        return _plan_if_unfinished(ctx, command, _checkpoint_to_resume(ctx, command.config))
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
    plan = _plan_from_checkpoint(ctx, command, path)
    if plan.checkpoint is not None:
        check_can_continue(plan.checkpoint, plan.settings.config, command.explicit_flags)
    return plan


def _plan_from_checkpoint(ctx: DistributedContext, command: Command, path: Path) -> RunPlan:
    """Returns the plan of the run that wrote the checkpoint ``path``, with what the command line changes."""
    checkpoint = Checkpoint.read(path)
    check_is_newest(checkpoint)
    stored = checkpoint.description
    explicit_flags = command.explicit_flags
    hyp, hyp_changes = resumed_hyperparameters(
        stored.hyp,
        command.config,
        explicit_flags,
        pretrained=bool(stored.config.weights),
        keep_old=stored.config.keep_old,
    )
    source, known_root = find_location(stored.data, path)
    stored_config = stored.config
    if stored_config.data != "demo":
        stored_config = replace(stored_config, data=source)
    config, config_changes = resumed_config(stored_config, command.config, explicit_flags)
    config = replace(config, epochs=resumed_epochs(checkpoint, config, explicit_flags))
    data_source = DataSource.of_training(config)
    if known_root and config.data == source:  # the command line names no other data set
        data_source = replace(data_source, known_root=known_root, stored_in=str(path))
    return RunPlan(
        settings=RunSettings(config, hyp),
        data_source=data_source,
        folder=path.parent,
        checkpoint=checkpoint,
        startup_messages=[
            f"resuming {path} after {_position(checkpoint, config)}",
            *config_changes,
            *hyp_changes,
            *_machine_changes(ctx, checkpoint.header.run),
        ],
        launchers=command.launchers,
    )


def _position(checkpoint: Checkpoint, config: TrainConfig) -> str:
    """Says how far a run has come."""
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


def _checkpoint_to_resume(ctx: DistributedContext, config: TrainConfig) -> Path:
    """Returns the checkpoint that ``--resume`` names: a file, the last.pt of a folder, or without a name the newest
    last.pt of the project.

    Raises UserError if there is none, or only one that a later run in its folder would have replaced: only its file's
    own name continues that.
    """
    path = Path(config.resume or "")
    if not config.resume:
        newest = broadcast_object(ctx, newest_checkpoint(Path(config.project)) if ctx.is_main else None)
        if newest is None:
            raise UserError(f"--resume: no last.pt under {config.project}; name one: --resume PATH/last.pt")
        path = newest.parent
    if not path.is_dir():
        return path
    last = path / "last.pt"
    if broadcast_object(ctx, has_earlier_checkpoint(path) if ctx.is_main else None):
        raise UserError(
            f"{path}: the newest run in this folder has saved nothing yet; to continue the one before it: "
            f"{resume_flag(last)}"
        )
    return last


def newest_checkpoint(project: Path) -> Path | None:
    """Returns the newest last.pt in the folders of runs in ``project``, or None. One that its folder's newest run has
    not saved itself comes after all others."""
    paths = set(project.glob("*/last.pt"))
    for path in project.glob("**/last.pt"):  # a name may have folders
        if (path.parent / "settings.yaml").is_file():  # else it has been moved out of its run
            paths.add(path)
    return max(paths, key=lambda path: (not has_earlier_checkpoint(path.parent), path.stat().st_mtime), default=None)
