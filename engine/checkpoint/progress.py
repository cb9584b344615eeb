"""The progress of a run (`Progress`), and the header of a checkpoint: the moment at which it was saved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from torch import Tensor

from utils.config.epochs import validates_after
from utils.errors import UserError
from utils.files.torch_file import read_checkpoint
from utils.schema import Bounds, Count, build
from utils.strings import counted


@dataclass
class Progress:
    """Counts epochs, steps and losses, and stores the best epoch. All random numbers are keyed by these counts, so no
    RNG state is saved. Only its own methods change it."""

    epoch: Count = 0  # epochs completed
    batch: Count = 0  # micro-batches of the next epoch taken
    step: Count = 0  # micro-batches taken by each rank
    updates: Count = 0  # optimizer steps taken
    loss_sums: list[float] = field(default_factory=list)  # sums over the finite steps of the epoch; empty: none yet
    finite_steps: Count = 0  # finite steps of the epoch so far
    bad_steps: Count = 0  # non-finite ones in a row
    buffers_averaged: bool = False  # whether all ranks have the same buffers: the epoch's steps are done
    best_fitness: float = -1.0  # see `engine.evaluation.fitness.Fitness`
    best_epoch: Annotated[int, Bounds(-1)] = -1
    # Thresholds with the best F1 in the newest validation, see `EvalResult`; None: not known.
    confidence: float | None = None
    plain_confidence: float | None = None
    scored_confidence: float | None = None
    class_weights: list[float] = field(default_factory=list)  # for --image-weights; empty: uniform

    def has_trained(self, epoch_batches: int) -> bool:
        """Returns True if all ``epoch_batches`` of the next epoch are taken, and only its validation is missing."""
        return 0 < self.batch == epoch_batches

    def describe(self, epoch_batches: int) -> str:
        """Returns the progress text: ``2 epochs``, ``epoch 3, batch 5 of 10``, ``the steps of epoch 3``."""
        if not self.batch:
            return counted(self.epoch, "epoch")
        if self.has_trained(epoch_batches):
            return f"the steps of epoch {self.epoch + 1}"
        return f"epoch {self.epoch + 1}, batch {self.batch} of {epoch_batches}"

    def record_fitness(self, fitness: float) -> bool:
        """Records the ``fitness`` after the completed epochs; it may be nan. Returns whether it is the best so far."""
        is_best = fitness > self.best_fitness
        if is_best:
            self.best_fitness = fitness
            self.best_epoch = self.epoch
        return is_best

    def record_thresholds(
        self, *, confidence: float | None, plain_confidence: float | None, scored_confidence: float | None
    ) -> None:
        """Records the thresholds of the newest validation."""
        self.confidence = confidence
        self.plain_confidence = plain_confidence
        self.scored_confidence = scored_confidence

    def forget_best(self) -> None:
        """Makes the next validated epoch the best one."""
        self.best_epoch = -1
        self.best_fitness = -1.0

    def weigh_classes(self, weights: list[float]) -> None:
        """Stores the class weights by which the next epochs choose their images (``--image-weights``)."""
        self.class_weights = weights

    def has_stalled(self, patience: int, *, epoch: int | None = None) -> bool:
        """Returns True if ``epoch``, by default the newest completed one, is at least ``patience`` epochs after the
        best one. Returns False for a ``patience`` of 0, and before any epoch has a score."""
        newest = self.epoch if epoch is None else epoch
        epochs_without_best = newest - self.best_epoch
        return patience > 0 and self.best_epoch >= 0 and epochs_without_best >= patience

    def stops_early(self, patience: int, *, epochs: int, val_every: int) -> bool:
        """Returns True if a run of ``epochs`` that validates every ``val_every`` ends here because no later epoch was
        better."""
        is_validated = self.batch == 0 and validates_after(self.epoch, epochs, val_every)
        return is_validated and self.epoch < epochs and self.has_stalled(patience)

    def count_step(self, micro_batches: int) -> None:
        """Counts a step of the optimizer over ``micro_batches``."""
        self.batch += micro_batches
        self.step += micro_batches
        self.updates += 1

    def count_losses(self, losses: Sequence[float], *, is_finite: bool) -> None:
        """Adds the losses of a step, unless it is not finite."""
        self.bad_steps = 0 if is_finite else self.bad_steps + 1
        if is_finite:
            sums = self.loss_sums or [0.0] * len(losses)
            self.loss_sums = [total + loss for total, loss in zip(sums, losses)]
            self.finite_steps += 1

    def mean_losses(self, names: Sequence[str]) -> dict[str, float]:
        """Returns the mean losses by name over the finite steps of the epoch; nan if there are none."""
        sums = self.loss_sums or [math.nan] * len(names)
        return {name: value / max(self.finite_steps, 1) for name, value in zip(names, sums)}

    def record_averaged_buffers(self) -> None:
        """Records that all ranks have the same model: the steps of the epoch are done."""
        self.buffers_averaged = True

    def complete_epoch(self) -> None:
        """Counts the epoch whose steps are done."""
        self.epoch += 1
        self.begin_epoch()

    def begin_epoch(self, batch: int = 0) -> None:
        """Begins to sum the losses of the next epoch, after its first ``batch`` micro-batches."""
        self.batch = batch
        self.loss_sums = []
        self.finite_steps = 0
        self.buffers_averaged = False


# Fields of `Progress` that follow from a validation.
_RESULT_FIELDS = ("best_fitness", "best_epoch", "confidence", "plain_confidence", "scored_confidence")


def read_progress(path: Path) -> Progress | None:
    """Reads the progress in the checkpoint ``path``, without its tensors; None if the file is missing or damaged."""
    try:
        stored = read_checkpoint(path).get("progress")
        return None if stored is None else build(Progress, stored, f"{path}: progress")
    except UserError:
        return None


@dataclass(frozen=True, kw_only=True)
class PendingEpoch:
    """A completed epoch that is still to be scored, by other processes or because it has become the last: the data that
    is saved once it has scores."""

    row: dict[str, float]  # its row of results.csv
    is_closing: bool  # see `models.losses.base.Criterion.set_closing`
    progress: Progress  # after the epoch
    ema: dict[str, Tensor]  # on the CPU of rank 0; empty on the other ranks

    def scored_progress(self, newest: Progress) -> Progress:
        """Returns the progress after the epoch with the result of its validation, which ``newest`` has."""
        return replace(self.progress, **{name: getattr(newest, name) for name in _RESULT_FIELDS})


@dataclass(frozen=True, kw_only=True)
class RunConditions:
    """The processes and the data of a run when it was saved, and how long it had trained."""

    world_size: int
    device: str  # its type
    seconds: float  # training time over all its starts
    epoch_batches: Count  # micro-batches of an epoch on each rank
    images: int  # number of training images, or of their tiles


@dataclass(frozen=True, kw_only=True)
class CheckpointHeader:
    """The moment at which a checkpoint was saved, a step boundary."""

    progress: Progress
    run: RunConditions
    metrics: dict[str, float] = field(default_factory=dict)  # scores of the averaged weights; empty: not validated
    pending: PendingEpoch | None = None  # the newest epoch, if it has not been scored yet
    ended_by_callback: bool = False  # a callback has ended the run here (``stop()``): only its report may be missing
