"""Writes the checkpoints of a run in a thread, and says how a run continues from them."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.train.checkpoint import (
    Checkpoint,
    CheckpointHeader,
    Progress,
    RunDescription,
    SaveContext,
    UnscoredEpoch,
    as_plain,
)
from engine.train.ledger import Epoch, EpochLedger
from engine.train.step import TrainStep
from utils.config.flags import as_flag
from utils.errors import UserError, os_reason
from utils.files.results_csv import CONFIDENCE_COLUMN, ResultsTable
from utils.files.torch_file import read_checkpoint, write_checkpoint
from utils.logger import get_logger
from utils.machine.limits import DISK_FULL
from utils.program import resume_flag

if TYPE_CHECKING:
    from data.loading.loader import InfiniteDataLoader

RESULTS_CSV = "results.csv"
# Keys of best.pt: the averaged weights, their scores and description.
_NOT_IN_BEST = ("class_weights", "command", "teacher")
_DESCRIPTION_KEYS = [item.name for item in fields(RunDescription) if item.name not in _NOT_IN_BEST]
_BEST_KEYS = ("progress", "metrics", *_DESCRIPTION_KEYS, "ema")


def weights_path(folder: Path, epoch: int) -> Path:
    """Returns the file in a run's folder that holds the weights of an epoch until last.pt has its scores."""
    return folder / f"unscored{epoch}.pt"


def scores_path(folder: Path, epoch: int) -> Path:
    """Returns the file into which other processes write the scores of an epoch (``--eval-ranks``)."""
    return folder / f"unscored{epoch}.scores"


def remove_unscored(folder: Path, *, keep: Collection[int] = ()) -> None:
    """Removes the weights and scores of epochs that last.pt does not list as unscored. ``keep``: those that it does."""
    for path in folder.glob("unscored*"):
        number = path.stem.removeprefix("unscored")
        if number.isdecimal() and int(number) not in keep:
            path.unlink(missing_ok=True)


def copy_to_cpu(value: Any) -> Any:
    """Copies plain data and tensors to the CPU, so that training does not change them. The host waits for the device
    once: copies from CUDA are queued into pinned memory."""
    copied = _copy(value)
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    return copied


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        tensor = value.detach()
        if not tensor.is_cuda:
            return tensor.to("cpu", copy=True).contiguous()
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(item) for item in value]
    return value


class Saver:
    """Writes last.pt, best.pt, epochN.pt and results.csv. Every rank has one and makes the same calls; only rank 0
    writes. A save waits until the files of the one before are written.

    Attributes:
        description: of the run, with its current number of epochs.
        saved_updates: steps before the newest last.pt.
    """

    def __init__(
        self,
        folder: Path,
        *,
        step: TrainStep,
        loader: InfiniteDataLoader,
        progress: Progress,
        description: RunDescription,
    ) -> None:
        self.folder = folder
        self.description = description
        self.last = folder / "last.pt"
        self.best = folder / "best.pt"
        self.saved_updates = progress.updates
        self._step = step
        self._loader = loader
        self._progress = progress
        self._saved_at = time.monotonic()
        self._pool = ThreadPoolExecutor(1, "checkpoint writer")
        self._writing: Future[None] | None = None

    def is_due(self, limit_s: float = math.inf) -> bool:
        """Returns whether ``--save-minutes``, or ``limit_s`` if that is shorter, have passed since the last save."""
        every_s = min(self.description.config.save_minutes * 60, limit_s)
        return 0 < every_s <= time.monotonic() - self._saved_at

    def postpone(self) -> None:
        """Makes `is_due` count from now: a save has been requested."""
        self._saved_at = time.monotonic()

    def check(self) -> None:
        """Raises the error of an earlier write, if there is one by now."""
        if self._writing is not None and self._writing.done():
            self.flush()

    def wait(self) -> None:
        """Waits until no file is being written, whether or not the writes succeeded."""
        if self._writing is not None:
            self._writing.exception()

    def flush(self) -> None:
        """Waits until all files are written. Raises the error of a write, if any."""
        writing = self._writing
        if writing is not None:
            self.wait()
            self._writing = None
            writing.result()

    def set_epochs(self, epochs: int) -> None:
        """Changes the number of epochs that checkpoints store."""
        config = replace(self.description.config, epochs=epochs)
        self.description = replace(self.description, config=config)

    def save(self, ledger: EpochLedger, *, best: Epoch | None = None, ended_by_callback: bool = False) -> None:
        """Saves the run in last.pt, and after each ``--save-period`` epochs in epochN.pt: copies its state, and writes
        in the background. Raises the error of an earlier write.

        Args:
            best: the epoch that has become the best one since the last save, whose weights are written into best.pt.
            ended_by_callback: see `CheckpointHeader`.
        """
        progress = self._progress
        ctx = self._step.ctx
        context = SaveContext(
            world_size=ctx.world_size,
            device=ctx.device.type,
            seconds=ledger.seconds(),
            epoch_batches=len(self._loader),
            images=len(self._loader.samples),
            threads=torch.get_num_threads(),
        )
        header = CheckpointHeader(
            progress=progress,
            run=context,
            metrics=ledger.metrics,
            unscored=[UnscoredEpoch(one.number, one.row, one.is_closing, one.is_validated) for one in ledger.unscored],
            ended_by_callback=ended_by_callback,
        )
        self.postpone()
        self.saved_updates = progress.updates
        checkpoint = Checkpoint.capture(self._step, header, self.description, ledger.table.as_rows())
        if checkpoint is None:
            return
        content = copy_to_cpu(checkpoint.content())
        files: dict[Path, dict[str, Any]] = {}
        # last.pt comes last: a run that resumes from an older one writes the others again.
        if best is not None:
            files[self.best] = self._content_of(best, content)
        period = self.description.config.save_period
        if period > 0 and progress.epoch > 0 and progress.epoch % period == 0 and progress.batch == 0:
            files[self.folder / f"epoch{progress.epoch}.pt"] = content
        files[self.last] = content
        self._submit(files)

    def _content_of(self, best: Epoch, content: dict[str, Any]) -> dict[str, Any]:
        """Returns the content of best.pt for an epoch, from ``content``, that of last.pt, unless steps may have been
        taken since (``--eval-ranks``)."""
        path = weights_path(self.folder, best.number)
        if not path.exists():
            return {key: content[key] for key in _BEST_KEYS}
        stored = read_checkpoint(path)
        scores = {name: content["progress"][name] for name in ("best_fitness", "best_ap", "best_epoch")}
        scores["confidence"] = best.metrics.get(CONFIDENCE_COLUMN)
        return stored | {"progress": stored["progress"] | scores, "metrics": best.metrics}

    def save_weights(self, epoch: int) -> None:
        """Writes, on rank 0, what best.pt would contain if this ``epoch`` were the best, for the processes that score
        it, in the background. Raises the error of an earlier write."""
        if self._step.ctx.is_main:
            content = {"progress": as_plain(self._progress), "metrics": {}, **as_plain(self.description)}
            content["ema"] = self._step.ema.module.state_dict()
            self._submit({weights_path(self.folder, epoch): copy_to_cpu({key: content[key] for key in _BEST_KEYS})})

    def _submit(self, files: dict[Path, dict[str, Any]]) -> None:
        self.flush()
        self._writing = self._pool.submit(self._write, files)

    def _write(self, files: dict[Path, dict[str, Any]]) -> None:
        for path, content in files.items():
            averages = [tensor for tensor in content["ema"].values() if tensor.is_floating_point()]
            if not all(bool(torch.isfinite(tensor).all()) for tensor in averages):
                kept = f"{self.last} holds the last good ones" if self.last.exists() else "there are no good ones yet"
                raise UserError(f"the averaged weights are not finite; not saved, and {kept}")
            try:
                write_checkpoint(content, path)
                if path == self.last:
                    remove_unscored(self.folder, keep={one["number"] for one in content["unscored"]})
            except OSError as error:
                raise self._write_failure(path, error) from None
            if path == self.last and content["rows"]:
                self._write_results(content["rows"])

    def _write_results(self, rows: list[dict[str, float]]) -> None:
        """Writes results.csv, whose rows last.pt has, too: without it the run goes on."""
        path = self.folder / RESULTS_CSV
        try:
            ResultsTable.of(rows).write(path)
        except OSError as error:
            message = "%s: cannot be written (%s; does another program have it open?); the next epoch tries again"
            get_logger().warning(message, path, os_reason(error))

    def _write_failure(self, path: Path, error: OSError) -> UserError:
        """Returns the error about a file of the run that could not be written, which says how to continue."""
        is_full = error.errno in DISK_FULL
        reason = "the disk is full" if is_full else (error.strerror or str(error)).splitlines()[0].lower()
        remedy = "free some space" if is_full else "check the disk"
        advice = f"there is no earlier checkpoint to resume from: {remedy} and start again"
        if self.last.exists():
            advice = f"the checkpoints already there are intact: {remedy} and continue with {resume_flag(self.last)}"
        return UserError(f"{path}: could not be written ({reason}); {advice}")

    def resume_flags(self) -> str:
        """Returns the flags that continue the run: a checkpoint's callbacks run only if the command names them."""
        callbacks = self.description.config.callbacks
        flag = resume_flag(self.last)
        return f"{flag} {as_flag('callbacks', callbacks)}" if callbacks else flag

    def continuation(self, *, has_ended: bool) -> str:
        """Returns how to complete the run with another command. ``has_ended``: it takes no more steps."""
        if not has_ended:
            return f"continue with: {self.resume_flags()}"
        location = f"{as_flag('project', str(self.folder.parent))} {as_flag('name', self.folder.name)}"
        return f"complete the run with: --resume auto {location}"
