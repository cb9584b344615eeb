"""The plots of a run besides those of its report: training batches and the graph at the start, then predictions; and
those of a validation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from data.loading.loader import InfiniteDataLoader
from engine.evaluation.analysis import Analysis
from engine.evaluation.evaluator import Evaluator
from engine.hooks.hook import Action, Epoch, Hook, Training
from engine.hooks.result_files import ResultFiles
from engine.hooks.validation import Results, Validation
from engine.report.page import ReportPage, Subject
from engine.report.page import Validation as ScoredValidation
from utils.drawing.draw import write_image
from utils.drawing.plots import draw_batch, draw_detections
from utils.files.results_csv import read_columns
from utils.machine.limits import require_package
from utils.structures import EvalResult

PICTURED_BATCHES = 3
TIME_BUDGET = 0.05  # of the run, at most, spent after epochs


class Plots(Hook):
    """Draws the plots of a run and its report, on rank 0: batches and the graph before the first step, the rest as it
    trains; hands the pictures to TensorBoard, too. Comes after `ResultFiles`. Raises UserError if Matplotlib is not
    installed."""

    def __init__(self) -> None:
        require_package("matplotlib", "plots", "use --noplots")

    def start(self, trainer: Training) -> Action:
        run, validation, model = trainer.run, trainer.hooks.get(Validation), trainer.step.ema.module
        self._folder, self._names, self._evaluator = run.folder, model.names, validation.evaluator
        self._tensorboard = trainer.hooks.get(ResultFiles).tensorboard
        self._drawing = TimeBudget(self._draw, TIME_BUDGET)
        subject = Subject(
            title=f"Training run {run.folder.name}",
            config=run.config,
            hyp=run.hyp,
            ctx=trainer.ctx,
            imgsz=run.config.imgsz,
            stride=model.stride,
            indexes={"train": trainer.loader.index, "val": validation.loader.index},
            fitness=trainer.hooks.get(Results).fitness,
        )
        self._page = ReportPage(run.folder, subject, is_resumed=run.checkpoint is not None)
        if run.checkpoint is None:
            self._draw_batches(trainer.loader)
            side = 2 * model.stride  # the graph of larger images is the same
            self._tensorboard.graph(model, torch.zeros(1, model.channels, side, side))
            self._page.write({})
        return Action.CONTINUE

    def after_scores(self, trainer: Training, epoch: Epoch) -> Action:
        self._page.set_epochs(trainer.epochs)
        if epoch.result is not None and self._evaluator.detections is not None:
            self._page.validation = ScoredValidation(epoch.result, self._evaluator.detections, epoch.number)
        self._drawing.after_epoch(epoch.number, epoch.result)
        return Action.CONTINUE

    def after_training(self, trainer: Training) -> Action:
        self._drawing.finish()
        return Action.CONTINUE

    def _draw_batches(self, loader: InfiniteDataLoader) -> None:
        """train_batch0.jpg to train_batch2.jpg, augmented, as the model sees them."""
        for number in range(min(PICTURED_BATCHES, len(loader))):
            batch = loader.render(0, number)
            sheet = draw_batch(batch.images, batch.targets.rows, batch.paths, self._names)
            if sheet is not None:
                write_image(self._folder / f"train_batch{number}.jpg", sheet)
                self._tensorboard.image(f"train/batch{number}", sheet, 0)

    def _draw(self, epoch: int, result: EvalResult | None) -> None:
        """The report; after a validation also val_predictions.jpg, and curves for TensorBoard."""
        if result is not None:
            self._tensorboard.pr_curves(result, self._names, epoch)
            sheet = draw_preview(self._evaluator, self._names, self._folder / "val_predictions.jpg")
            if sheet is not None:
                self._tensorboard.image("val/predictions", sheet, epoch)
        table = self._folder / "results.csv"
        self._page.write(read_columns(table) if table.exists() else {})


class TimeBudget:
    """Does ``work`` after an epoch if, with its last duration, it takes at most a ``share`` of the run. Else it stays
    pending."""

    def __init__(self, work: Callable[[int, EvalResult | None], None], share: float) -> None:
        self._work, self._share = work, share
        self._done_at, self._cost_s = time.monotonic(), 0.0
        self._pending: tuple[int, EvalResult | None] | None = None

    def after_epoch(self, epoch: int, result: EvalResult | None) -> None:
        self._pending = (epoch, result)
        if time.monotonic() - self._done_at >= self._cost_s / self._share:
            self.finish()

    def finish(self) -> None:
        """Does the work for the newest epoch unless it is done."""
        if self._pending is not None:
            started = time.monotonic()
            self._work(*self._pending)
            self._pending, self._done_at = None, time.monotonic()
            self._cost_s = self._done_at - started


def write_plots(folder: Path, subject: Subject, result: EvalResult, evaluator: Evaluator, analysis: Analysis) -> None:
    """Writes the report of a validation with its figures, and predictions.jpg."""
    page = ReportPage(folder, subject)
    page.validation = ScoredValidation(result, evaluator.detections, analysis=analysis)
    page.write({})
    draw_preview(evaluator, subject.validated.names, folder / "predictions.jpg")


def draw_preview(evaluator: Evaluator, names: Sequence[str], out: Path) -> np.ndarray | None:
    """Writes a picture of the first batch with its labels and detections, and returns it; None if there is none."""
    if evaluator.preview is None:
        return None
    batch, detections = evaluator.preview
    sheet = draw_detections(batch.images, detections, batch.targets.rows, batch.paths, names)
    if sheet is not None:
        write_image(out, sheet)
    return sheet
