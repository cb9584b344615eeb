"""What a run is: its folder, its settings, and the checkpoint it goes on from."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.resume import (
    circumstances_changed,
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
from utils.run_dir import increment_path


@dataclass(frozen=True)
class Run:
    """A run on its way; the same on every rank."""

    folder: Path
    config: TrainConfig
    hyp: Hyperparameters
    path: Path  # of the checkpoint
    content: dict[str, Any] | None  # of the checkpoint; None: the run begins
    lines: list[str]  # what the log is to begin with


def open_run(ctx: DistributedContext, config: TrainConfig, given: Collection[str]) -> Run:
    """A new run in a folder of its own, the one that ``--resume`` means, or, when torchrun starts its processes again,
    the one they were at, from its newest checkpoint. Rank 0 decides.

    Args:
        given: names of the settings that the command line has.

    Raises UserError when there is nothing to go on with, or the folder cannot be made.
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
            folder = increment_path(config.project, config.name, config.exist_ok) if ctx.is_main else None
        folder = Path(broadcast_object(ctx, folder))
        run = Run(folder, config, hyp, folder / "last.pt", None, [])
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
