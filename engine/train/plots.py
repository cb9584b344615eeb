"""The plots of a run: its report, and sheets of training batches and predictions, also for TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from engine.report.advice import Subject
from engine.report.content import FILE_NAME, report_content
from engine.report.images import draw_batch, write_preview
from engine.train.hooks import TensorBoard
from engine.train.ledger import Epoch
from engine.train.loop import Hook, Trainer
from utils.drawing.draw import write_image
from utils.drawing.page import write_page
from utils.errors import first_line
from utils.logger import get_logger

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

PICTURED_BATCHES = 3
TIME_BUDGET = 0.05  # largest fraction of the time that drawing after epochs takes; else it waits for a later epoch


class Plots(Hook):
    """Draws the plots: the first batches of a run as they are trained on, the rest after epochs. A plot that fails, as
    on a full disk, causes only a warning.

    Args:
        subject: what the report says of the run.
        tensorboard: also receives the pictures.
    """

    on_rank_0 = True

    def __init__(self, subject: Subject, tensorboard: TensorBoard) -> None:
        self._subject = subject
        self._tensorboard = tensorboard
        self._warnings: set[str] = set()  # warnings that have been logged
        self._shown: Epoch | None = None  # the best epoch; the newest if the best was in an earlier process
        self._pictured: Epoch | None = None  # the last one whose predictions were drawn
        self._is_due = False  # an epoch has ended since the report was drawn
        self._drawn_at = time.monotonic()
        self._cost_s = 0.0  # of drawing, the last time

    def start(self, trainer: Trainer) -> None:
        self._report = trainer.saver.folder / FILE_NAME
        self._table = trainer.ledger.table
        self._names = trainer.step.ema.module.names
        self._is_continued = trainer.progress.updates > 0
        self._next_batch = PICTURED_BATCHES if self._is_continued else 0

    def after_step(self, trainer: Trainer) -> None:
        """Draws the data in the report, and train_batch0.jpg to train_batch2.jpg, augmented, as the model sees them."""
        if self._next_batch == 0:  # after the first step, which need not wait for the page
            self._draw()
        for batch in trainer.batches[: PICTURED_BATCHES - self._next_batch]:
            name = f"train_batch{self._next_batch}.jpg"
            with self._failing_with_warning(name):
                sheet = draw_batch(batch, self._names)
                if sheet is not None:
                    self._tensorboard.write(add_image, f"train/batch{self._next_batch}", sheet, 0)
                    write_image(self._report.with_name(name), sheet)
            self._next_batch += 1

    def epoch_saved(self, trainer: Trainer, epoch: Epoch) -> None:
        best_epoch = trainer.progress.best_epoch
        shows_best = self._shown is not None and self._shown.number == best_epoch
        if epoch.evaluation is not None and not shows_best:
            self._shown = epoch
        self._subject = replace(
            self._subject,
            config=replace(trainer.settings.config, epochs=trainer.steps.epochs),  # which hooks may change
            epoch=0 if self._shown is None else self._shown.number,
            best_epoch=best_epoch,
        )
        self._is_due = True
        if time.monotonic() - self._drawn_at >= self._cost_s / TIME_BUDGET:
            self._draw_in_time()

    def finish(self, trainer: Trainer) -> None:
        if self._is_due:
            self._draw_in_time()
        if self._report.is_file():
            get_logger().info("report: %s", self._report)

    def _draw_in_time(self) -> None:
        """Draws, and measures how long it takes."""
        started = time.monotonic()
        self._draw()
        self._is_due = False
        self._drawn_at = time.monotonic()
        self._cost_s = self._drawn_at - started

    def _draw(self) -> None:
        """Draws the report, and val_predictions.jpg of an epoch that it newly shows. The page of an earlier process
        stays until the first validation of this one."""
        shown = self._shown
        evaluation = None if shown is None else shown.evaluation
        if self._is_continued and evaluation is None:
            return
        with self._failing_with_warning(self._report.name):
            content = report_content(self._subject, evaluation, self._table.as_columns())
            write_page(self._report, content)
            for pixels in content.files.get("PR_curve", ()):
                self._tensorboard.write(add_image, "val/PR_curve", pixels, self._subject.epoch)
        if shown is None or evaluation is None or shown is self._pictured:
            return
        self._pictured = shown
        path = self._report.with_name("val_predictions.jpg")
        with self._failing_with_warning(path.name):
            sheet = write_preview(evaluation.preview, self._names, evaluation.result.shown_confidence, path)
            if sheet is not None:
                self._tensorboard.write(add_image, "val/predictions", sheet, shown.number)

    @contextmanager
    def _failing_with_warning(self, name: str) -> Iterator[None]:
        """Logs a failure of the block, which writes the file ``name``, as a warning, the same one only once."""
        try:
            yield
        except Exception as error:
            warning = f"{self._report.with_name(name)}: cannot be drawn ({first_line(error)})"
            if warning not in self._warnings:
                get_logger().warning("%s", warning)
            self._warnings.add(warning)


def add_image(writer: SummaryWriter, tag: str, image: np.ndarray, step: int) -> None:
    writer.add_image(tag, image, step, dataformats="HWC")
