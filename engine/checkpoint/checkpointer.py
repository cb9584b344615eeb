"""Writes the checkpoints of a run in the background: last.pt, best.pt and periodic ones."""

from __future__ import annotations

import errno
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.checkpoint import (
    Checkpoint,
    PendingEpoch,
    Progress,
    RunDescription,
    RunStatus,
    TrainState,
    gather_rank_buffers,
    put_means,
    weights_part,
)
from utils.distributed.context import DistributedContext, unwrap
from utils.errors import UserError
from utils.files.checkpoint_file import read_checkpoint, write_checkpoint
from utils.machine.threads import BackgroundWriter
from utils.program import resume_flag


def copied(value: Any) -> Any:
    """Copies plain data and tensors to the CPU, so that training does not change them. The host waits for the
    device."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [copied(item) for item in value]
    return value


class Checkpointer(BackgroundWriter):
    """Writes checkpoints. Every rank has one and makes the same calls; only rank 0 writes.

    ``period``: epochN.pt is kept every ``period`` epochs; 0: never.
    """

    def __init__(self, folder: Path, *, ctx: DistributedContext, description: RunDescription, period: int = 0) -> None:
        super().__init__(self._write_checkpoint)
        self.folder = folder
        self.ctx = ctx
        self.description = description
        self.period = period
        self.last = folder / "last.pt"
        self.best = folder / "best.pt"

    def set_epochs(self, epochs: int) -> None:
        """Stores another number of epochs."""
        config = replace(self.description.config, epochs=epochs)
        self.description = replace(self.description, config=config)

    def save(
        self,
        state: TrainState,
        progress: Progress,
        *,
        run: RunStatus,
        is_best: bool = False,
        metrics: dict[str, float] | None = None,
        hooks: dict[str, dict[str, Any]] | None = None,
        pending: PendingEpoch | None = None,
    ) -> None:
        """Copies the state of the run, to be written in the background: last.pt always, and at the end of an epoch
        best.pt and epochN.pt if they are due. Raises the error of an earlier write (`check`)."""
        models = {"model": state.model, "ema": state.ema.module}
        state.optimizer.consolidate()
        buffers = None
        if progress.batch > 0 and not progress.buffers_averaged:  # within an epoch
            buffers = gather_rank_buffers(self.ctx, models)
        if not self.ctx.is_main:
            return
        states = {name: unwrap(module).state_dict() for name, module in models.items()}
        for name, values in (buffers or {}).items():
            put_means(values, models[name], states[name])
        checkpoint = Checkpoint(
            **vars(self.description),
            model=states["model"],
            ema=states["ema"],
            progress=progress,
            optimizer=state.optimizer.state_dict(),
            scaler=state.scaler.state_dict(),
            run=run,
            metrics=metrics or {},
            rank_buffers=buffers,
            hooks=hooks or {},
            pending=pending,
        )
        content = copied(checkpoint.content())
        files: dict[Path, dict[str, Any]] = {}
        # last.pt comes last: a run that resumes from an older one writes the others again.
        if is_best:
            files[self.best] = weights_part(content)
        if self.period > 0 and progress.batch == 0 and progress.epoch % self.period == 0:
            files[self.periodic(progress.epoch)] = content
        files[self.last] = content
        self.submit(files)

    def save_scored(
        self, pending: PendingEpoch, progress: Progress, *, is_best: bool, metrics: dict[str, float]
    ) -> None:
        """Writes best.pt, and epochN.pt once more, if they are due after an epoch that was saved before it had scores.

        Args:
            pending: the epoch as it was saved.
            progress: of the run, with the result of the epoch.
        """
        if not self.ctx.is_main:
            return
        scores = {"progress": asdict(pending.scored_progress(progress)), "metrics": metrics}
        if is_best:
            content = self.description.content() | {"ema": pending.ema} | scores
            self.submit({self.best: weights_part(content)})
        epoch = pending.progress.epoch
        if self.period > 0 and epoch % self.period == 0:
            self.finish()  # so that the file is there
            self._add_scores(self.periodic(epoch), scores)

    def _add_scores(self, path: Path, scores: dict[str, Any]) -> None:
        """Writes a periodic checkpoint again, unless the user has removed it."""
        if path.is_file():
            content = read_checkpoint(path)
            content.pop("pending", None)
            self.submit({path: content | scores})

    def periodic(self, epoch: int) -> Path:
        """Returns the path of the checkpoint that ``period`` keeps after ``epoch``."""
        return self.folder / f"epoch{epoch}.pt"

    def has_best(self, progress: Progress) -> bool:
        """Whether best.pt is of the best epoch that ``progress`` knows."""
        return _is_of_best_epoch(self.best, progress)

    def restore_best(self, progress: Progress) -> bool:
        """Writes best.pt from the epochN.pt of the best epoch. Returns False if there is none."""
        periodic = self.periodic(progress.best_epoch)
        if not _is_of_best_epoch(periodic, progress):
            return False
        self.submit({self.best: weights_part(read_checkpoint(periodic))})
        return True

    def set_best_aside(self) -> Path | None:
        """Renames best.pt to bestN.pt, N being its epoch, so that the run does not overwrite it. Returns the new path,
        or None if there is no best.pt."""
        stored = _stored_progress(self.best)
        if stored is None:
            return None
        path = self.folder / f"best{stored['epoch']}.pt"
        self.best.replace(path)
        return path

    def _write_checkpoint(self, content: dict[str, Any], path: Path) -> None:
        averages = [tensor for tensor in content["ema"].values() if tensor.is_floating_point()]
        if not all(bool(torch.isfinite(tensor).all()) for tensor in averages):
            raise UserError(f"the averaged weights are not finite; not saved, {self.last} holds the last good ones")
        try:
            write_checkpoint(content, path)
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = "the disk is full" if is_full else (error.strerror or str(error)).splitlines()[0].lower()
            remedy = "free some space" if is_full else "check the disk"
            if self.last.exists():
                advice = (
                    f"the checkpoints already there are intact: {remedy} and continue with {resume_flag(self.last)}"
                )
            else:
                advice = f"there is no earlier checkpoint to resume from: {remedy} and start again"
            raise UserError(f"{path}: could not be written ({reason}); {advice}") from None


def _stored_progress(path: Path) -> dict[str, Any] | None:
    """Returns the progress that a checkpoint file stores; None if there is no such file, or if it is damaged."""
    try:
        progress = read_checkpoint(path).get("progress") if path.is_file() else None
    except UserError:
        return None
    return progress if isinstance(progress, dict) and isinstance(progress.get("epoch"), int) else None


def _is_of_best_epoch(path: Path, progress: Progress) -> bool:
    """Whether the file was saved after the best epoch that ``progress`` knows, by a run with the same one."""
    stored = _stored_progress(path)
    if stored is None:
        return False
    is_best = stored["epoch"] == stored.get("best_epoch") == progress.best_epoch
    return is_best and stored.get("best_fitness") == progress.best_fitness
