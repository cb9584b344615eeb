"""What a checkpoint holds, when it is written, and how a run goes on from one."""

from __future__ import annotations

import contextlib
import errno
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.checkpoint.rank_buffers import gather_rank_buffers, put_means, restore_rank_buffers
from engine.optim.build import OptimizerSet
from engine.optim.ema import ModelEma
from utils.distributed.collectives import unwrap
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.checkpoint import write_checkpoint
from utils.threads import BackgroundWriter


@dataclass
class Progress:
    """Where a run stands, at a step boundary. Everything random is keyed by these numbers, so no RNG is saved."""

    epoch: int = 0  # epochs completed
    batch: int = 0  # micro-batches of the next epoch taken
    step: int = 0  # micro-batches taken by each rank
    updates: int = 0  # optimiser steps taken
    loss_sums: list[float] = field(default_factory=list)  # over the finite steps of the epoch; empty: none yet
    finite_steps: int = 0  # of the epoch
    bad_steps: int = 0  # non-finite ones in a row
    joined: bool = False  # the epoch's steps are done and the ranks' buffers averaged
    best_fitness: float = -1.0
    best_epoch: int = -1
    confidence: float | None = None  # with the best F1 in the newest validation; None: not known
    class_weights: list[float] = field(default_factory=list)  # for --image-weights; empty: uniform

    @classmethod
    def of(cls, stored: dict[str, Any], path: str | Path) -> Progress:
        """From a checkpoint. Raises UserError where it holds what no run has written."""
        fresh = cls()
        for name, value in stored.items():
            kind = type(getattr(fresh, name, None)) if isinstance(name, str) else type(None)
            if name == "confidence":
                good = value is None or type(value) is float
            elif kind is list:
                good = type(value) is list and all(type(v) in (int, float) for v in value)
            elif kind is float:
                good = type(value) in (int, float)
            elif kind is int:
                good = type(value) is int and (-1 if name == "best_epoch" else 0) <= value < 2**62
            else:
                good = type(value) is kind and kind is not type(None)
            if not good:
                raise UserError(f"{path}: damaged checkpoint ('progress' has {str(name)[:60]}: {str(value)[:60]})")
        return cls(**stored)

    def add_losses(self, losses: Sequence[float]) -> None:
        """Takes in a finite step's."""
        self.loss_sums = [a + b for a, b in zip(self.loss_sums or [0.0] * len(losses), losses)]
        self.finite_steps += 1

    def mean_losses(self, names: Sequence[str]) -> dict[str, float]:
        """Over the finite steps of the epoch; nan if there are none."""
        sums = self.loss_sums or [math.nan] * len(names)
        return {name: value / max(self.finite_steps, 1) for name, value in zip(names, sums)}

    def begin_epoch(self) -> None:
        """Forgets all that belongs to a position inside an epoch."""
        self.batch, self.loss_sums, self.finite_steps, self.joined = 0, [], 0, False


class Snapshot:
    """A copy of plain data and tensors on the CPU that does not follow training.

    CUDA tensors are copied in stream order to pinned memory without the host waiting for it; `content` waits.
    """

    def __init__(self, value: dict[str, Any]) -> None:
        self._value = self._copied(value)
        self._ready: torch.cuda.Event | None = None
        if torch.cuda.is_initialized():
            self._ready = torch.cuda.Event()
            self._ready.record()

    def content(self) -> dict[str, Any]:
        if self._ready is not None:
            self._ready.synchronize()
        return self._value

    def _copied(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            return host.copy_(value.detach(), non_blocking=True)
        if isinstance(value, torch.Tensor):
            return value.detach().to("cpu", copy=True).contiguous()
        if isinstance(value, dict):
            return {k: self._copied(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._copied(v) for v in value]
        return value


class Checkpointer:
    """Writes last.pt, best.pt and periodic checkpoints in the background. Every rank has one and calls it alike; on
    other ranks than 0 it is built disabled and writes nothing.

    Args:
        folder: where the files go.
        ctx: this process among the others.
        description: what does not change in a run: model_spec, names, imgsz, hyp, config, data.
        period: also keep epochN.pt every so many epochs; 0: never.
    """

    def __init__(
        self,
        folder: Path,
        *,
        ctx: DistributedContext,
        description: dict[str, Any],
        period: int = 0,
        enabled: bool = True,
    ) -> None:
        self.folder, self.ctx, self.description = folder, ctx, description
        self.period, self.enabled = period, enabled
        self._writer = BackgroundWriter(self._write)

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
        run: dict[str, Any] | None = None,
        is_best: bool = False,
        metrics: dict[str, float] | None = None,
    ) -> None:
        """Takes a copy of a run's state, to be written in the background: last.pt always, and at the end of an epoch
        best.pt and epochN.pt if they are due. Raises what an earlier write ran into (`check`).

        Args:
            run: under which circumstances the run is carried out (world size, device, seconds so far).
        """
        models = {"model": model, "ema": ema.module}
        buffers = None if progress.joined or progress.batch == 0 else gather_rank_buffers(self.ctx, models)
        if not self.enabled:
            return
        shared = {
            **self.description,
            "ema": ema.module.state_dict(),
            "progress": asdict(progress),
            "metrics": metrics or {},
        }
        full = {
            **shared,
            "model": unwrap(model).state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
            "run": run or {},
        }
        for name, values in (buffers or {}).items():
            put_means(values, models[name], full[name])
            full["rank_buffers"] = buffers
        taken = Snapshot(full)
        files: dict[Path, tuple[Snapshot, frozenset[str]]] = {}
        # last.pt comes last: whoever goes on from an older one writes the others again.
        if is_best:
            files[self.best] = (taken, frozenset(shared))
        if self.period and progress.batch == 0 and progress.epoch % self.period == 0:
            files[self.folder / f"epoch{progress.epoch}.pt"] = (taken, frozenset(full))
        files[self.last] = (taken, frozenset(full))
        self._writer.submit(files)

    def check(self) -> None:
        """Raises UserError when a write has failed, the disk being full, say; older files are intact."""
        self._writer.check()

    def wait(self) -> None:
        """Returns when nothing is left to be written."""
        self._writer.wait()

    def finish(self) -> None:
        """`wait`, then `check`."""
        self._writer.finish()

    def _write(self, what: tuple[Snapshot, frozenset[str]], path: Path) -> None:
        snapshot, keys = what
        content = {key: value for key, value in snapshot.content().items() if key in keys}
        if not all(bool(torch.isfinite(t).all()) for t in content["ema"].values() if t.is_floating_point()):
            raise UserError(f"the averaged weights are not finite; not saved, {self.last} holds the last good ones")
        try:
            write_checkpoint(content, path)
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = "the disk is full" if is_full else (error.strerror or str(error)).splitlines()[0].lower()
            remedy = "free some space" if is_full else "see to the disk"
            if self.last.exists():
                advice = f"the checkpoints already there are intact: {remedy} and go on with --resume"
            else:
                advice = f"there is no earlier checkpoint to resume from: {remedy} and start again"
            raise UserError(f"{path}: could not be written ({reason}); {advice}") from None


@contextlib.contextmanager
def errors_of_fit(path: str | Path) -> Iterator[None]:
    """Raises UserError for what a checkpoint holds and a part of the run cannot take."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[-1].strip()
        raise UserError(f"{path}: does not fit this run: {reason}") from None


def restore(
    content: dict[str, Any],
    *,
    ctx: DistributedContext,
    model: nn.Module,
    ema: ModelEma,
    optimizer: OptimizerSet,
    scaler: torch.amp.GradScaler,
    path: str | Path,
) -> Progress:
    """Puts a full checkpoint's state (`read_run`) into the parts of a run and returns where it stood."""
    with errors_of_fit(path):
        unwrap(model).load_state_dict(content["model"])
        ema.load_state_dict(content["ema"])
        restore_rank_buffers(content.get("rank_buffers"), ctx, {"model": model, "ema": ema.module})
        optimizer.load_state_dict(content["optimizer"])
    if content["scaler"] and scaler.is_enabled():
        scaler.load_state_dict(content["scaler"])
    return Progress.of(content["progress"], path)


class SaveCadence:
    """By steps, which every rank counts alike, and by the clock of one rank, which tells the others (`StepFlags.save`).

    Args:
        minutes: between saves by the clock; 0: never.
        steps: between saves by steps; 0: never.
        has_clock: True on the rank whose clock counts.
        at_start: save before the first step too, because the run goes on from another file than its last.pt.
    """

    def __init__(self, *, minutes: float, steps: int, has_clock: bool, at_start: bool = False) -> None:
        self.at_start = at_start
        self._seconds, self._steps = minutes * 60 if has_clock else 0.0, steps
        self._saved_at, self._has_asked = time.monotonic(), False

    def wants_save(self) -> bool:
        """Whether this rank should ask for a save with the step that begins: once, until it is done."""
        if not self._seconds or self._has_asked:
            return False
        self._has_asked = time.monotonic() - self._saved_at >= self._seconds
        return self._has_asked

    def due_after(self, updates: int) -> bool:
        """Whether the steps taken alone make a save due."""
        return self._steps > 0 and updates % self._steps == 0

    def saved(self) -> None:
        self._saved_at, self._has_asked = time.monotonic(), False
