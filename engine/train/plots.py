"""The plots of a run: its report, sheets of training batches and predictions, and curves for TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from engine.evaluation.result import EvalResult
from engine.report.images import draw_batch, write_preview
from engine.report.page import ReportPage, machine_facts
from engine.report.summary import Subject
from engine.train.hooks import TensorBoard
from engine.train.trainer import Epoch, Hook, Trainer, TrainingRun
from utils.drawing.draw import write_image
from utils.errors import first_line
from utils.logger import get_logger

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

PICTURED_BATCHES = 3
PR_POINTS = 127  # thresholds of a curve; TensorBoard shows no more
TIME_BUDGET = 0.05  # largest fraction of the run's time that is spent after epochs


class Plots(Hook):
    """Draws the plots: the first batches of a run as they are trained on, the rest after epochs. A plot that fails, as
    on a full disk, causes only a warning. ``tensorboard`` also receives the pictures."""

    on_rank_0 = True

    def __init__(self, tensorboard: TensorBoard) -> None:
        self._tensorboard = tensorboard
        self._warnings: set[str] = set()  # warnings that have been logged

    def start(self, trainer: Trainer) -> None:
        run = trainer.run
        self._folder = run.folder
        self._table = trainer.checkpointer.table
        self._names = trainer.step.ema.module.names
        self._drawing = TimeBudget(self._draw, TIME_BUDGET)
        is_continued = trainer.progress.updates > 0
        self._page = ReportPage(run.folder, subject_of(run), keeps_earlier=is_continued)
        self._next_batch = PICTURED_BATCHES if is_continued else 0

    def after_step(self, trainer: Trainer) -> None:
        """Draws the data in the report, and train_batch0.jpg to train_batch2.jpg, augmented, as the model sees them."""
        if self._next_batch == 0:  # after the first step, which need not wait for the page
            with self._failing_with_warning("report.html"):
                self._page.write({})
        for batch in trainer.batches[: PICTURED_BATCHES - self._next_batch]:
            name = f"train_batch{self._next_batch}.jpg"
            with self._failing_with_warning(name):
                sheet = draw_batch(batch, self._names)
                if sheet is not None:
                    self._tensorboard.write(add_image, f"train/batch{self._next_batch}", sheet, 0)
                    write_image(self._folder / name, sheet)
            self._next_batch += 1

    def epoch_saved(self, trainer: Trainer, epoch: Epoch) -> None:
        self._page.set_progress(epochs=trainer.epochs, best_epoch=trainer.progress.best_epoch)
        is_shown = epoch.evaluation is not None and self._page.set_validation(epoch.evaluation, epoch.number)
        self._drawing.after_epoch(epoch if is_shown else None)

    def finish(self, trainer: Trainer) -> None:
        self._drawing.catch_up()
        if self._page.path.is_file():
            get_logger().info("report: %s", self._page.path)

    def _draw(self, validated: Epoch | None) -> None:
        """Draws the report; of an epoch that it shows also val_predictions.jpg, and curves for TensorBoard."""
        if validated is not None and validated.evaluation is not None:
            result = validated.evaluation.result
            self._tensorboard.write(add_pr_curves, result, self._names, validated.number)
            path = self._folder / "val_predictions.jpg"
            with self._failing_with_warning(path.name):
                sheet = write_preview(validated.evaluation.preview, self._names, result.shown_confidence, path)
                if sheet is not None:
                    self._tensorboard.write(add_image, "val/predictions", sheet, validated.number)
        with self._failing_with_warning("report.html"):
            self._page.write(self._table.as_columns())

    @contextmanager
    def _failing_with_warning(self, name: str) -> Iterator[None]:
        """Logs a failure of the block, which writes the file ``name``, as a warning, the same one only once."""
        try:
            yield
        except Exception as error:
            warning = f"{self._folder / name}: cannot be drawn ({first_line(error)})"
            if warning not in self._warnings:
                get_logger().warning("%s", warning)
            self._warnings.add(warning)


def subject_of(run: TrainingRun) -> Subject:
    """Returns what a report says of a run."""
    feed = run.feed
    return Subject(
        title=f"Training run {run.folder.name}",
        config=run.config,
        command=run.description.command,
        hyp=run.hyp,
        machine=machine_facts(run.ctx),
        imgsz=run.config.imgsz,
        stride=run.step.ema.module.stride,
        train=feed.loader.index,
        validated=feed.val_loader.index,
        split="val",
        is_held_out=bool(run.description.val_images),
        batches=len(feed.loader),
    )


class TimeBudget:
    """Calls ``work`` after an epoch, or after a later one if it would take more than ``share`` of the time since its
    last call. ``work`` receives the newest epoch that the report shows, or None if it has received that already."""

    def __init__(self, work: Callable[[Epoch | None], None], share: float) -> None:
        self._work = work
        self._share = share
        self._done_at = time.monotonic()
        self._cost_s = 0.0
        self._is_due = False
        self._validated: Epoch | None = None

    def after_epoch(self, validated: Epoch | None) -> None:
        """Takes an epoch that the report shows; None if it was not validated, or is not the best."""
        self._is_due = True
        if validated is not None:
            self._validated = validated
        if time.monotonic() - self._done_at >= self._cost_s / self._share:
            self.catch_up()

    def catch_up(self) -> None:
        """Calls ``work`` if there was an epoch since its last call."""
        if self._is_due:
            started = time.monotonic()
            self._work(self._validated)
            self._is_due = False
            self._validated = None
            self._done_at = time.monotonic()
            self._cost_s = self._done_at - started


def add_image(writer: SummaryWriter, tag: str, image: np.ndarray, step: int) -> None:
    writer.add_image(tag, image, step, dataformats="HWC")


def add_pr_curves(writer: SummaryWriter, result: EvalResult, names: Sequence[str], epoch: int) -> None:
    """Writes precision against recall at IoU 0.5, a curve for each class that has objects."""
    thresholds = np.linspace(0, 1, PR_POINTS)
    confidences = result.curve_confidence
    for index in np.flatnonzero(result.class_targets > 0).tolist():
        precision = np.zeros(PR_POINTS)
        is_known = ~np.isnan(result.curve_precision[index])  # above the best score, the last known value is drawn
        if is_known.any():
            precision = np.interp(thresholds, confidences[is_known], result.curve_precision[index][is_known])
        recall = np.interp(thresholds, confidences, np.nan_to_num(result.curve_recall[index]))
        targets = float(result.class_targets[index])
        tp = recall * targets
        fp = np.where(precision > 0, tp * (1 - precision) / np.maximum(precision, 1e-9), 0.0)
        writer.add_pr_curve_raw(
            f"pr/{names[index]}",
            true_positive_counts=tp,
            false_positive_counts=fp,
            true_negative_counts=np.zeros(PR_POINTS),
            false_negative_counts=targets - tp,
            precision=precision,
            recall=recall,
            global_step=epoch,
            num_thresholds=PR_POINTS,
        )
