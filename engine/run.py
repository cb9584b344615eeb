"""What a run is: its folder, its settings, and the checkpoint it goes on from."""

from __future__ import annotations

import contextlib
import gc
import shutil
import traceback
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.resume import (
    circumstances_changed,
    forget_launch,
    newest_checkpoint,
    note_launch,
    read_run,
    resumed_config,
    resumed_hyperparameters,
    run_of_launch,
)
from utils.config import Hyperparameters, TrainConfig
from utils.distributed import DistributedContext, all_objects, broadcast_object, torch_distributed_zero_first
from utils.errors import UserError
from utils.recipes import read_recipe
from utils.run_dir import check_run_dir, increment_path


@dataclass(frozen=True)
class Run:
    """A run on its way; the same on every rank."""

    folder: Path  # of a new run what the settings say, until `claim_folder`
    config: TrainConfig
    hyp: Hyperparameters
    path: Path  # of the checkpoint
    content: dict[str, Any] | None  # of the checkpoint; None: the run begins
    lines: list[str]  # what the log is to begin with
    begun: bool = True  # it has a folder
    made: tuple[Path, ...] = ()  # folders that this process made for it, the innermost first


def open_run(ctx: DistributedContext, config: TrainConfig, given: Collection[str]) -> Run:
    """A new run, whose folder `claim_folder` makes, the one that ``--resume`` means, or, when torchrun starts its
    processes again, the one they were at, from its newest checkpoint. Rank 0 decides.

    Args:
        given: names of the settings that the command line has.

    Raises UserError when there is nothing to go on with, or a folder could not be made.
    """
    hyp = read_recipe(config.hyp, config.override, pretrained=bool(config.weights))
    launchers = all_objects(ctx, ctx.launcher)
    former = broadcast_object(ctx, run_of_launch(config.project, launchers) if ctx.is_main else None)
    if former is not None and not (former / "last.pt").is_file():
        run = Run(former, config, hyp, former / "last.pt", None, ["restarted before the first checkpoint"])
    elif former is not None:
        run = _reopen(ctx, config, given, former / "last.pt")
    elif config.resume is None:
        with torch_distributed_zero_first(ctx):
            if ctx.is_main:
                check_run_dir(config.project, config.name, config.exist_ok)
        folder = Path(config.project) / config.name
        return Run(folder, config, hyp, folder / "last.pt", None, [], begun=False)
    else:
        path = Path(config.resume) if config.resume else Path(broadcast_object(ctx, newest_checkpoint(config.project)))
        run = _reopen(ctx, config, given, path / "last.pt" if path.is_dir() else path)
        assert run.content is not None
        done = run.content["progress"]["epoch"]
        if done >= run.config.epochs:
            raise UserError(f"{run.path}: all {done} epochs are done; to train on, ask for more: --resume --epochs N")
    if ctx.is_main:
        note_launch(config.project, launchers, run.folder)
    return run


def claim_folder(ctx: DistributedContext, run: Run) -> Run:
    """The run with a folder of its own, the same on every rank; every rank must call it. To be called once the data
    set, the model and the weights are known to be good, so that what is refused leaves nothing behind.

    Raises UserError when the folder cannot be made.
    """
    if run.begun:
        return run
    config, launchers = run.config, all_objects(ctx, ctx.launcher)
    claimed: tuple[Path, ...] = ()
    with torch_distributed_zero_first(ctx):
        if ctx.is_main:
            absent = [p for p in (run.folder, *run.folder.parents) if not p.exists()]
            folder = increment_path(config.project, config.name, config.exist_ok)
            existed = config.exist_ok and run.folder not in absent
            claimed = () if existed else (folder, *(p for p in absent if p != run.folder))
            note_launch(config.project, launchers, folder)
        else:
            folder = run.folder
    folder = Path(broadcast_object(ctx, folder))
    return replace(run, folder=folder, path=folder / "last.pt", begun=True, made=claimed)


@contextlib.contextmanager
def discarding_unbegun(run: Run) -> Iterator[None]:
    """If the block fails before the first checkpoint, removes the folders that `claim_folder` made: there is nothing to
    go on with. Only what was written down about a hang keeps the run's folder."""
    try:
        yield
    except BaseException as error:
        if run.made:
            # Gives back open files and memory: to remove a folder takes some of both, and they may be what was too few.
            traceback.clear_frames(error.__traceback__)
            gc.collect()
        if run.made and not [*run.folder.glob("*.pt"), *run.folder.glob("stall_rank*.txt")]:
            shutil.rmtree(run.folder, ignore_errors=True)
            forget_launch(run.config.project, run.folder)
            for folder in run.made[1:]:
                with contextlib.suppress(OSError):  # other runs are in it
                    folder.rmdir()
        raise


def _reopen(ctx: DistributedContext, config: TrainConfig, given: Collection[str], path: Path) -> Run:
    """The run that wrote checkpoint ``path``, with what the command line changes."""
    content = read_run(path)
    pretrained = bool(content["config"].get("weights"))
    hyp, changes = resumed_hyperparameters(content["hyp"], config, given, path, pretrained=pretrained)
    config, lines = resumed_config(content["config"], config, given, path)
    lines += changes
    done, batch = content["progress"]["epoch"], content["progress"].get("batch", 0)
    within = f" and {batch} batches" if batch else ""
    lines += circumstances_changed(content.get("run", {}), world_size=ctx.world_size, device=ctx.device.type)
    lines.insert(0, f"resuming {path} after epoch {done} of {config.epochs}{within}")
    return Run(path.parent, config, hyp, path, content, lines)
