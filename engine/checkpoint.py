"""What a checkpoint holds, when it is written, and how a run goes on from one."""

from __future__ import annotations

import errno
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.ema import ModelEma
from engine.optim import OptimizerSet
from utils.checkpoint_file import write_checkpoint
from utils.distributed import unwrap
from utils.errors import UserError

log = logging.getLogger("lockstep")


@dataclass
class Progress:
    """Where a run stands, between epochs. Everything random is keyed by these numbers, so no RNG is saved."""

    epoch: int = 0  # epochs completed
    step: int = 0  # micro-batches taken by each rank
    updates: int = 0  # optimiser steps taken
    best_fitness: float = -1.0
    best_epoch: int = -1
    class_weights: list[float] = field(default_factory=list)  # for --image-weights; empty: uniform


def plain(value: Any) -> Any:
    """``value`` with tensors detached on the CPU and copied, so that training can go on while it is written."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


class Checkpointer:
    """Writes last.pt, best.pt and periodic checkpoints. On other ranks than 0 it is built disabled and writes nothing.

    Args:
        folder: where the files go.
        description: what does not change in a run: model_spec, names, imgsz, hyp, config, data.
        period: also keep epochN.pt every so many epochs; 0: never.
    """

    def __init__(self, folder: Path, *, description: dict[str, Any], period: int = 0, enabled: bool = True) -> None:
        self.folder, self.description, self.period, self.enabled = folder, description, period, enabled

    @property
    def last(self) -> Path:
        return self.folder / "last.pt"

    @property
    def best(self) -> Path:
        return self.folder / "best.pt"

    def save(
        self,
        *,
        model: nn.Module,
        ema: ModelEma,
        optimizer: OptimizerSet,
        scaler: torch.amp.GradScaler,
        progress: Progress,
        is_best: bool,
        metrics: dict[str, float],
    ) -> None:
        """Writes what is due after ``progress.epoch`` epochs. A full disk is a UserError; older files stay intact."""
        if not self.enabled:
            return
        weights = plain(ema.module.state_dict())
        if not all(bool(torch.isfinite(t).all()) for t in weights.values() if t.is_floating_point()):
            raise UserError(f"the averaged weights are not finite; not saved, {self.last} holds the last good ones")
        shared = {**self.description, "ema": weights, "progress": asdict(progress), "metrics": metrics}
        full = {
            **shared,
            "model": plain(unwrap(model).state_dict()),
            "optimizer": plain(optimizer.state_dict()),
            "scaler": plain(scaler.state_dict()),
        }
        self._write(full, self.last)
        if is_best:
            self._write(shared, self.best)
        if self.period and progress.epoch % self.period == 0:
            self._write(full, self.folder / f"epoch{progress.epoch}.pt")

    def _write(self, content: dict[str, Any], path: Path) -> None:
        try:
            write_checkpoint(content, path)
        except OSError as error:
            reason = "the disk is full" if error.errno == errno.ENOSPC else str(error).splitlines()[0]
            raise UserError(
                f"{path}: could not be written ({reason}); the checkpoints already there are intact: "
                "free some space and go on with --resume"
            ) from None


def restore(
    content: dict[str, Any],
    *,
    model: nn.Module,
    ema: ModelEma,
    optimizer: OptimizerSet,
    scaler: torch.amp.GradScaler,
    path: str | Path,
) -> Progress:
    """Puts a full checkpoint's state (`read_checkpoint`) into the parts of a run and returns where it stood."""
    if "optimizer" not in content:
        raise UserError(f"{path}: holds weights only (a best.pt?); resume from last.pt, or start with --weights {path}")
    try:
        unwrap(model).load_state_dict(content["model"])
        ema.load_state_dict(content["ema"])
        optimizer.load_state_dict(content["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise UserError(f"{path}: does not fit this run: {str(error).splitlines()[0]}") from None
    if content["scaler"] and scaler.is_enabled():
        scaler.load_state_dict(content["scaler"])
    return Progress(**content["progress"])
