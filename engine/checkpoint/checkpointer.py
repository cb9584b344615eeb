"""Writes the checkpoints of a run in the background: last.pt, best.pt and periodic ones."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.background_writer import BackgroundWriter
from engine.checkpoint.checkpoint import Checkpoint, TrainState, copy_to_cpu, plain_content, weights_part
from engine.checkpoint.description import RunDescription
from engine.checkpoint.newest_run import checkpoint_of_newest_run, is_of_earlier_run, run_id_of
from engine.checkpoint.progress import CheckpointHeader, PendingEpoch, Progress
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.torch_file import read_checkpoint, write_checkpoint
from utils.machine.limits import DISK_FULL
from utils.program import resume_flag


class Checkpointer:
    """Writes checkpoints. Every rank has one and makes the same calls; only rank 0 writes.

    Attributes:
        save_period: epochN.pt is kept every ``save_period`` epochs; 0: never.
        replaces_earlier: on rank 0, True if an earlier run in ``folder`` (``--exist-ok``) had left last.pt when this
            object was created.
    """

    def __init__(
        self, folder: Path, *, ctx: DistributedContext, description: RunDescription, save_period: int = 0
    ) -> None:
        self.folder = folder
        self.ctx = ctx
        self.description = description
        self.save_period = save_period
        self.last = folder / "last.pt"
        self.best = folder / "best.pt"
        self.replaces_earlier = ctx.is_main and is_of_earlier_run(self.last)
        self._writer = BackgroundWriter(self._write_checkpoint)

    @property
    def is_writing(self) -> bool:
        """True until all files are written. May be read from any thread."""
        return self._writer.is_busy

    def check(self) -> None:
        """Raises the error of an earlier write, if any."""
        self._writer.check()

    def wait(self) -> None:
        """Waits until no file is being written, whether or not the writes succeeded."""
        self._writer.wait()

    def flush(self) -> None:
        """Waits until all files are written. Raises the error of a write, if any."""
        self._writer.flush()

    def set_epochs(self, epochs: int) -> None:
        """Changes the number of epochs that checkpoints store."""
        config = replace(self.description.config, epochs=epochs)
        self.description = replace(self.description, config=config)

    def save_last(self, state: TrainState, header: CheckpointHeader) -> None:
        """Saves the run in last.pt alone.

        The state is copied, and written in the background. Raises the error of an earlier write (`check`).
        """
        content = self._copy_content(state, header)
        if content is not None:
            self._writer.submit({self.last: content})

    def save_epoch(self, state: TrainState, header: CheckpointHeader, *, is_best: bool) -> None:
        """Saves the run at the end of an epoch, like `save_last`, and best.pt and epochN.pt if they are due."""
        content = self._copy_content(state, header)
        if content is None:
            return
        files: dict[Path, dict[str, Any]] = {}
        # last.pt comes last: a run that resumes from an older one writes the others again.
        if is_best:
            files[self.best] = weights_part(content)
        if self._is_periodic(header.progress.epoch):
            files[self.periodic(header.progress.epoch)] = content
        files[self.last] = content
        self._writer.submit(files)

    def _copy_content(self, state: TrainState, header: CheckpointHeader) -> dict[str, Any] | None:
        """Returns a copy of a checkpoint's content on the CPU of rank 0; None on other ranks. Every rank must call
        this."""
        checkpoint = Checkpoint.capture(self.ctx, state, header, self.description)
        return None if checkpoint is None else copy_to_cpu(checkpoint.content())

    def save_scored(
        self, pending: PendingEpoch, progress: Progress, *, is_best: bool, metrics: dict[str, float]
    ) -> None:
        """Writes best.pt, and epochN.pt again, if they are due after an epoch that was saved without scores.

        Args:
            pending: the epoch as it was saved.
            progress: the run's progress, with the result of the epoch.
        """
        if not self.ctx.is_main:
            return
        scores = {"progress": asdict(pending.scored_progress(progress)), "metrics": metrics}
        if is_best:
            content = plain_content(self.description) | {"ema": pending.ema} | scores
            self._writer.submit({self.best: weights_part(content)})
        epoch = pending.progress.epoch
        if self._is_periodic(epoch):
            self.flush()  # so that the file is there
            self._add_scores(self.periodic(epoch), scores)

    def _add_scores(self, path: Path, scores: dict[str, Any]) -> None:
        """Writes a periodic checkpoint again, unless the user has removed it, or an earlier run has left it there."""
        if run_id_of(path) == self.description.run_id:
            content = read_checkpoint(path)
            content.pop("pending", None)
            self._writer.submit({path: content | scores})

    def copy_to_best(self, periodic: Path) -> None:
        """Writes best.pt from a periodic checkpoint. Raises UserError if that cannot be read."""
        self._writer.submit({self.best: weights_part(read_checkpoint(periodic))})

    def periodic(self, epoch: int) -> Path:
        """Returns the path of the checkpoint that ``save_period`` keeps after ``epoch``."""
        return self.folder / f"epoch{epoch}.pt"

    def _is_periodic(self, epoch: int) -> bool:
        """Returns True if ``epoch`` has an epochN.pt."""
        return self.save_period > 0 and epoch % self.save_period == 0

    def _write_checkpoint(self, content: dict[str, Any], path: Path) -> None:
        averages = [tensor for tensor in content["ema"].values() if tensor.is_floating_point()]
        if not all(bool(torch.isfinite(tensor).all()) for tensor in averages):
            last = checkpoint_of_newest_run(self.folder)
            kept = f"{last} holds the last good ones" if last else "and there are no good ones yet"
            raise UserError(f"the averaged weights are not finite; not saved, {kept}")
        try:
            write_checkpoint(content, path)
        except OSError as error:
            raise self.write_failure(path, error) from None

    def write_failure(self, path: Path, error: OSError) -> UserError:
        """Returns the error about a file of the run that could not be written, which says how to continue."""
        is_full = error.errno in DISK_FULL
        reason = "the disk is full" if is_full else (error.strerror or str(error)).splitlines()[0].lower()
        remedy = "free some space" if is_full else "check the disk"
        last = checkpoint_of_newest_run(self.folder)
        if last is not None:
            advice = f"the checkpoints already there are intact: {remedy} and continue with {resume_flag(last)}"
        else:
            advice = f"there is no earlier checkpoint to resume from: {remedy} and start again"
        return UserError(f"{path}: could not be written ({reason}); {advice}")
