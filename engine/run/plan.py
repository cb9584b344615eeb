"""What a command trains: a new run, or one that continues from its last.pt, and from where.

| command | run |
| --- | --- |
| without --resume | a new one in --project/--name, or exp2, ...; --exist-ok replaces the one that is there |
| restarted by torchrun | the one that its first start has begun, as with --resume auto |
| --resume auto | that of the folder --project/--name: begins it, or continues it |
| --resume PATH | that of last.pt, or of the folder that has it |
| --resume | that of --project/--name if --name is given, else of the newest last.pt in the folders of --project |

The settings of a run that continues are those of its checkpoint; which of them the command may change, `ON_RESUME` in
utils/config/settings.py says. A run that has ended only gets missing scores of its last epochs, and exports. Rank 0
decides which run it is; each rank reads the checkpoint from its own disk.
"""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from data.open import known_by_name
from data.spec import DEMO
from engine.optim.schedule import epochs_in_time
from engine.run.folder import find_folder, is_read_only
from engine.run.starts import ContinuedRun, NewRun, RunStart
from engine.train.checkpoint import Checkpoint
from engine.train.saver import RESULTS_CSV
from utils.config.flags import as_flag
from utils.config.recipes import given_hyperparameters, read_recipe
from utils.config.settings import AUTO, FIND_BATCH_SIZE, ON_RESUME, PATHS, RunSettings, TrainConfig
from utils.distributed.agreement import check_agreement
from utils.distributed.context import DistributedContext, all_objects, broadcast_object, torch_distributed_zero_first
from utils.errors import UserError
from utils.files.new_folder import check_run_dir
from utils.files.paths import normal_path
from utils.files.results_csv import ResultsTable
from utils.files.url import is_http
from utils.logger import configure_logging, get_logger
from utils.process.child import write_result
from utils.program import resume_flag
from utils.strings import counted, format_duration

# Values by which a command leaves a setting open. It is chosen when the run begins, and the run keeps it.
_UNDECIDED = {"batch_size": FIND_BATCH_SIZE, "optimizer": "auto"}
_LENGTH = ("epochs", "time", "patience")  # how long a run trains


def plan_run(
    ctx: DistributedContext, config: TrainConfig, explicit_flags: Collection[str], stack: ExitStack
) -> RunStart:
    """Plans the run of a command line. Every rank must call this.

    Args:
        config: the command line's settings.
        explicit_flags: names of the settings that the command line gives.
        stack: holds the lock on the folder of a run that continues.

    Raises UserError when there is nothing to resume from, no folder can be made, another process trains the run, the
    checkpoint is damaged, or the run cannot have these settings.
    """
    command = resolve(config)
    if command.resume == "" and "name" in explicit_flags:
        command = replace(command, resume=str(command.folder))
    launchers = all_objects(ctx, ctx.launcher_identity)
    planned: Any = None  # a new run, or the last.pt of one that continues
    with torch_distributed_zero_first(ctx):  # an error of rank 0 reaches the others
        if ctx.is_main:
            folder = find_folder(command, launchers, stack)
            if folder is not None and (folder / "last.pt").exists():
                planned = folder / "last.pt"
            else:
                planned = _plan_new(command, folder)
    planned = broadcast_object(ctx, planned)
    if isinstance(planned, NewRun):  # paths are each machine's own
        return replace(planned, settings=RunSettings(command, planned.settings.hyp))
    return _plan_continued(ctx, command, explicit_flags, Checkpoint.read(planned))


def _plan_new(command: TrainConfig, folder: Path | None) -> NewRun:
    """Plans a run from the beginning, in ``folder`` if that is locked already."""
    messages: list[str] = []
    if folder is None:
        check_run_dir(command.project, command.name, command.exist_ok or command.resume == AUTO)
    else:
        messages.append(f"{folder}: nothing has been saved yet; the run starts from the beginning")
    hyp = read_recipe(
        command.hyp, command.override, pretrained=bool(command.weights), keep_old=command.keep_old, lines=messages
    )
    return NewRun(
        settings=RunSettings(command, hyp),
        run_id=secrets.token_hex(8),  # does not depend on the seed or advance a generator
        given=given_hyperparameters(command.hyp, command.override),
        folder=folder,
        messages=messages,
    )


def _plan_continued(
    ctx: DistributedContext, command: TrainConfig, explicit_flags: Collection[str], checkpoint: Checkpoint
) -> ContinuedRun:
    """Plans what is left of the run of a checkpoint. Raises UserError for a setting that the run cannot have."""
    header = checkpoint.header
    facts = {
        "the run of the checkpoint": checkpoint.description.run_id,
        "the checkpoint's progress": asdict(header.progress),
    }
    check_agreement(ctx, facts)
    config, messages = merge_settings(checkpoint, command, explicit_flags)
    last = checkpoint.path
    end_reason = _end_reason(checkpoint, command, config)
    is_complete = end_reason != "" and not checkpoint.lacks_scores(config.epochs)
    if not is_complete:
        if ctx.is_main and is_read_only(last.parent):
            raise UserError(f"{last.parent}: cannot be written, so the run cannot continue there; copy it")
        _check_given_again(checkpoint, config, explicit_flags)
    if not end_reason:
        messages = [f"resuming {last} {header.progress.describe(header.run.epoch_batches)}", *messages]
        if header.run.world_size != ctx.world_size:
            messages.append(f"resume: processes {header.run.world_size} -> {ctx.world_size}")
        if header.run.device != ctx.device.type:
            messages.append(f"resume: device {header.run.device} -> {ctx.device.type}")
    return ContinuedRun(
        settings=RunSettings(config, checkpoint.description.hyp),
        folder=last.parent,
        checkpoint=checkpoint,
        end_reason=end_reason,
        is_complete=is_complete,
        names_data="data" in explicit_flags,
        messages=messages,
    )


def merge_settings(
    checkpoint: Checkpoint, command: TrainConfig, explicit_flags: Collection[str]
) -> tuple[TrainConfig, list[str]]:
    """Merges the stored settings of a run with those of the command that continues it: `ON_RESUME` says
    whose value counts. Returns them with a message for each change. Raises UserError for one that a run cannot
    change."""
    stored = checkpoint.description.config
    last = checkpoint.path
    folder = normal_path(last).parent
    given = {name for name in explicit_flags if name not in _UNDECIDED or getattr(command, name) != _UNDECIDED[name]}
    if command.time:
        given.discard("epochs")  # the time decides on their number
    if command.resume not in (None, AUTO):
        is_elsewhere = {"project": normal_path(command.project) != folder.parent, "name": command.name != folder.name}
        for name in ("project", "name"):
            if name in given and is_elsewhere[name]:
                flag = as_flag(name, getattr(command, name))
                raise UserError(f"{flag}: the run continues in its own folder, {last.parent}; leave it out")
    names = [item.name for item in fields(TrainConfig)]
    fixed = set(names).difference(*ON_RESUME.values())
    messages = []
    left_out = []  # what the checkpoint asks for, and the command does not
    for name in names:
        old = getattr(stored, name)
        new = getattr(command, name)
        if new == old or name in ON_RESUME["command"]:
            continue
        if name in given and name in fixed:
            flag = f"--set {' '.join(new)}" if name == "override" else as_flag(name, new)
            if name == "weights" and os.path.basename(new) == "last.pt":
                raise UserError(f"{flag}: weights begin a new run; to continue that one: {resume_flag(new)}")
            raise UserError(
                f"{flag}: the run has {old!r}, which cannot change; leave it out, or begin a new run "
                f"with --weights {shlex.quote(str(last))}"
            )
        if name in given:
            messages.append(f"resume: {name} {old!r} -> {new!r}")
        elif name in ON_RESUME["again"]:
            left_out.append(as_flag(name, old))
    if left_out:
        words = " ".join(left_out)
        messages.append(f"{last} asks for {words}: left out, as the command does not give it; to use it, add {words}")
    taken = ON_RESUME["command"] | ON_RESUME["again"] | given
    changes: dict[str, Any] = {name: getattr(command, name) for name in taken}  # an address is stored without login
    changes |= {"project": str(folder.parent), "name": folder.name, "exist_ok": False}
    if "epochs" in given:
        changes["time"] = 0.0
    config = replace(stored, **changes)
    done = checkpoint.header.progress.epoch
    epochs = config.epochs
    if config.time != stored.time and config.time > 0 and done and epochs <= done:
        epochs = epochs_in_time(done, checkpoint.header.run.seconds, config.time * 3600)
    return replace(config, epochs=max(epochs, done)), messages


def _check_given_again(checkpoint: Checkpoint, config: TrainConfig, explicit_flags: Collection[str]) -> None:
    """Raises UserError if the result of a run depends on code or an address that its checkpoint names and the command
    does not. ``config``: the merged settings. A teacher that is a file is known by its checksum."""
    stored = checkpoint.description.config
    last = checkpoint.path
    if stored.callbacks and "callbacks" not in explicit_flags:
        flag = as_flag("callbacks", stored.callbacks)
        raise UserError(
            f"{last} asks for {flag}, which runs code: add {flag} to run it again, or --callbacks= to continue without"
        )
    teacher = config.teacher or (config.weights if config.keep_old else "")
    if teacher and "teacher" not in explicit_flags and not os.path.isfile(os.path.expanduser(teacher)):
        raise UserError(
            f"{last} asks for the teacher {teacher}, which is no file on this machine: add "
            f"{as_flag('teacher', teacher)}, or the path of a copy"
        )


def _end_reason(checkpoint: Checkpoint, command: TrainConfig, config: TrainConfig) -> str:
    """Returns why the run of a checkpoint has no step left with the merged settings ``config``, and how to train on; ""
    if it has. A command that names the run, or changes its length, continues one that a callback has ended."""
    progress = checkpoint.header.progress
    done = progress.epoch
    flag = resume_flag(checkpoint.path)
    stored = checkpoint.description.config
    has_new_length = any(getattr(config, name) != getattr(stored, name) for name in _LENGTH)
    if checkpoint.header.ended_by_callback and command.resume in (None, AUTO) and not has_new_length:
        position = progress.describe(checkpoint.header.run.epoch_batches)
        return f"a callback has ended it {position}; to continue: {flag}"
    if done >= config.epochs and config.time:
        duration = format_duration(checkpoint.header.run.seconds)
        return (
            f"--time {config.time:g}: no further epoch fits ({counted(done, 'epoch')} took {duration}); to train "
            f"longer: {flag} --time HOURS (of the whole run) or --epochs N"
        )
    if done >= config.epochs:
        return f"all epochs are done ({done}); to train longer: {flag} --epochs N"
    if progress.stops_early(config, config.epochs) and not checkpoint.header.unscored:
        waited = counted(done - progress.best_epoch, "epoch")
        return (
            f"stopped early after epoch {done}: no better {config.fitness} in {waited} (--patience {config.patience}); "
            f"to continue: {flag} --patience N"
        )
    return ""


def log_ended_run(ctx: DistributedContext, run: ContinuedRun) -> None:
    """Logs why a run has ended, and how to draw its report, which a kill may have prevented. Every rank must call
    this."""
    configure_logging(ctx.is_main, quiet=run.settings.config.quiet)
    folder = run.folder
    if ctx.is_main and not is_read_only(folder):  # a kill may have lost the last row
        ResultsTable.of(run.checkpoint.rows).write(folder / RESULTS_CSV)
    write_result(folder=str(folder))
    for message in run.messages:
        get_logger().info("%s", message)
    get_logger().info("%s: complete: %s", folder, run.end_reason)
    best = folder / "best.pt"
    if best.exists():
        get_logger().info("to draw its report again: val.py --weights %s", shlex.quote(str(best)))


def resolve(config: TrainConfig) -> TrainConfig:
    """Returns the settings with absolute paths of the files that they name, so that they mean the same in any working
    folder. A file need not exist."""
    paths: dict[str, Any] = {name: _resolved(name, getattr(config, name)) for name in PATHS}
    return replace(config, **paths)


def _resolved(name: str, value: str) -> str:
    """Returns the absolute path that ``value`` of the setting ``name`` means; names of models, weights and data sets,
    and URLs, as they are."""
    if not value or is_http(value) or (name == "data" and value == DEMO):
        return value
    if name == "data":
        return str(normal_path(known_by_name(value)))
    path = os.path.expanduser(value)
    return str(normal_path(path)) if os.path.isfile(path) or (os.sep in path and name != "groups") else value
