"""The plots of a run: its report, sheets of training batches and predictions, and curves for TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from data.index.index import DatasetIndex
from engine.evaluation.fitness import Fitness
from engine.evaluation.result import EvalResult
from engine.issues.issue import CheckedSplit
from engine.report.environment import machine_facts
from engine.report.page import FILE_NAME as REPORT_NAME
from engine.report.page import ReportPage, is_outdated
from engine.report.sheets import draw_batch, write_preview
from engine.report.subject import ScoredValidation, Subject
from engine.train.hooks import TensorBoard
from engine.train.resume import Remaining
from engine.train.trainer import Epoch, Hook, Trainer
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
    on a full disk, causes only a warning.

    Args:
        val: the split that is validated.
        fitness: decides the best epoch.
        tensorboard: also receives the pictures.
    """

    on_rank_0 = True

    def __init__(self, val: DatasetIndex, fitness: Fitness, tensorboard: TensorBoard) -> None:
        self._val = val
        self._fitness = fitness
        self._tensorboard = tensorboard
        self._warnings: set[str] = set()  # warnings that have been logged

    def start(self, trainer: Trainer) -> None:
        run = trainer.run
        model = trainer.step.ema.module
        self._folder = run.folder
        self._table = trainer.checkpointer.table
        self._names = model.names
        self._drawing = TimeBudget(self._draw, TIME_BUDGET)
        subject = Subject(
            title=f"Training run {run.folder.name}",
            config=run.config,
            hyp=run.hyp,
            machine=machine_facts(trainer.ctx),
            imgsz=run.config.imgsz,
            stride=model.stride,
            train=trainer.loader.index,
            validated=CheckedSplit("val", self._val),
            fitness=self._fitness,
            batches=len(trainer.loader),
        )
        is_continued = run.started_from is not None
        keeps_page = is_continued
        if run.remaining is Remaining.REPORT:  # there may be no validation to show
            num_epochs = len(trainer.checkpointer.table.rows)
            keeps_page = not is_outdated(run.folder / REPORT_NAME, num_epochs)
        self._page = ReportPage(run.folder, subject, keeps_earlier=keeps_page)
        self._next_batch = PICTURED_BATCHES if is_continued else 0
        if not is_continued:
            self._page.write({})

    def after_step(self, trainer: Trainer) -> None:
        """Draws train_batch0.jpg to train_batch2.jpg, augmented, as the model sees them."""
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
        validation = None
        if epoch.evaluation is not None:
            validation = ScoredValidation.of(epoch.evaluation, epoch=epoch.number)
        self._drawing.after_epoch(validation)

    def finish(self, trainer: Trainer) -> None:
        self._drawing.catch_up()
        self._page.log_path()

    def _draw(self, validation: ScoredValidation | None) -> None:
        """Draws the report; after a validation also val_predictions.jpg, and curves for TensorBoard."""
        if validation is not None:
            self._draw_validation(validation)
        with self._failing_with_warning("report.html"):
            if validation is not None:
                self._page.set_validation(validation)
            self._page.write(self._table.as_columns())

    def _draw_validation(self, validation: ScoredValidation) -> None:
        epoch = validation.epoch
        self._tensorboard.write(add_pr_curves, validation.result, self._names, epoch)
        name = "val_predictions.jpg"
        with self._failing_with_warning(name):
            sheet = write_preview(validation, self._names, self._folder / name)
            if sheet is not None:
                self._tensorboard.write(add_image, "val/predictions", sheet, epoch)

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


class TimeBudget:
    """Calls ``work`` after an epoch, or after a later one if it would take more than ``share`` of the time since its
    last call. ``work`` receives the newest validation, or None if it has received that already."""

    def __init__(self, work: Callable[[ScoredValidation | None], None], share: float) -> None:
        self._work = work
        self._share = share
        self._done_at = time.monotonic()
        self._cost_s = 0.0
        self._is_due = False
        self._validation: ScoredValidation | None = None

    def after_epoch(self, validation: ScoredValidation | None) -> None:
        """Takes the validation of an epoch; None if it was not validated."""
        self._is_due = True
        if validation is not None:
            self._validation = validation
        if time.monotonic() - self._done_at >= self._cost_s / self._share:
            self.catch_up()

    def catch_up(self) -> None:
        """Calls ``work`` if there was an epoch since its last call."""
        if self._is_due:
            started = time.monotonic()
            self._work(self._validation)
            self._is_due = False
            self._validation = None
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
