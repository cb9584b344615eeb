"""Writes the checkpoints of a run in the background: last.pt, best.pt and periodic ones."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.checkpoint import (
    FORMER_HOOKS_KEY,
    Checkpoint,
    PendingEpoch,
    Position,
    Progress,
    RunDescription,
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


def copy_to_cpu(value: Any) -> Any:
    """Copies plain data and tensors to the CPU, so that training does not change them. The host waits for the
    device."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, dict):
        return {key: copy_to_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [copy_to_cpu(item) for item in value]
    return value


class BestFile:
    """best.pt of the run in ``folder``: which epoch it is of, set aside or restored when the run goes back.

    ``write`` queues content by path.
    """

    def __init__(self, folder: Path, write: Callable[[dict[Path, Any]], None]) -> None:
        self.path = folder / "best.pt"
        self._write = write

    def is_of_best_epoch(self, progress: Progress) -> bool:
        """Whether the file is of the best epoch that ``progress`` knows."""
        return _is_of_best_epoch(self.path, progress)

    def restore(self, periodic: Path, progress: Progress) -> bool:
        """Writes the file from ``periodic``, the epochN.pt of the best epoch. Returns False if that is not there, or of
        another run."""
        if not _is_of_best_epoch(periodic, progress):
            return False
        self._write({self.path: weights_part(read_checkpoint(periodic))})
        return True

    def set_aside(self) -> Path | None:
        """Renames the file to bestN.pt, N being its epoch, or bestN-2.pt and so on if there is one, so that the run
        does not overwrite it. Returns the new path, or None if there is no such file."""
        stored = _stored_progress(self.path)
        if stored is None:
            return None
        path = self.path.with_name(f"best{stored['epoch']}.pt")
        for number in itertools.count(2):
            if not os.path.lexists(path):
                break
            path = self.path.with_name(f"best{stored['epoch']}-{number}.pt")
        self.path.rename(path)
        return path


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
        self.best = BestFile(folder, write=self.submit)

    def set_epochs(self, epochs: int) -> None:
        """Stores another number of epochs."""
        config = replace(self.description.config, epochs=epochs)
        self.description = replace(self.description, config=config)

    def save_position(self, state: TrainState, position: Position) -> None:
        """Saves where the run stands, in last.pt.

        The state is copied, and written in the background. Raises the error of an earlier write (`check`).
        """
        content = self._copy_content(state, position)
        if content is not None:
            self.submit({self.last: content})

    def save_epoch(self, state: TrainState, position: Position, *, is_best: bool) -> None:
        """Saves the run at the end of an epoch, like `save_position`, and best.pt and epochN.pt if they are due."""
        content = self._copy_content(state, position)
        if content is None:
            return
        files: dict[Path, dict[str, Any]] = {}
        # last.pt comes last: a run that resumes from an older one writes the others again.
        if is_best:
            files[self.best.path] = weights_part(content)
        if self._is_kept(position.progress.epoch):
            files[self.periodic(position.progress.epoch)] = content
        files[self.last] = content
        self.submit(files)

    def _copy_content(self, state: TrainState, position: Position) -> dict[str, Any] | None:
        """Returns a copy on the CPU of what a checkpoint holds, on rank 0; None on the others. Every rank must call
        this."""
        models = {"model": state.model, "ema": state.ema.module}
        state.optimizer.consolidate()
        buffers = None
        if position.progress.batch > 0 and not position.progress.buffers_averaged:  # within an epoch
            buffers = gather_rank_buffers(self.ctx, models)
        if not self.ctx.is_main:
            return None
        states = {name: unwrap(module).state_dict() for name, module in models.items()}
        for name, values in (buffers or {}).items():
            put_means(values, models[name], states[name])
        checkpoint = Checkpoint(
            **vars(self.description),
            **vars(position),
            model=states["model"],
            ema=states["ema"],
            optimizer=state.optimizer.state_dict(),
            scaler=state.scaler.state_dict(),
            rank_buffers=buffers,
        )
        return copy_to_cpu(checkpoint.content())

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
            self.submit({self.best.path: weights_part(content)})
        epoch = pending.progress.epoch
        if self._is_kept(epoch):
            self.finish()  # so that the file is there
            self._add_scores(self.periodic(epoch), scores)

    def _add_scores(self, path: Path, scores: dict[str, Any]) -> None:
        """Writes a periodic checkpoint again, unless the user has removed it."""
        if path.is_file():
            content = read_checkpoint(path)
            for key in ("pending", FORMER_HOOKS_KEY):
                content.pop(key, None)
            self.submit({path: content | scores})

    def periodic(self, epoch: int) -> Path:
        """Returns the path of the checkpoint that ``period`` keeps after ``epoch``."""
        return self.folder / f"epoch{epoch}.pt"

    def _is_kept(self, epoch: int) -> bool:
        """Whether ``epoch`` has an epochN.pt."""
        return self.period > 0 and epoch % self.period == 0

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
