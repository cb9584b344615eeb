"""The plots of a run besides those of its report: training batches and the graph at the start, then predictions; and
those of a validation."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from data.loading.loader import InfiniteDataLoader
from engine.evaluation.analysis import Analysis
from engine.evaluation.evaluator import Evaluator
from engine.hooks.hook import Action, Epoch, Hook, Training
from engine.hooks.result_files import ResultFiles, TensorBoardTracker
from engine.hooks.validation import Results, Validation
from engine.report.page import ReportPage, Subject
from engine.report.page import Validation as ScoredValidation
from models.detector import Detector
from utils.drawing.draw import write_image
from utils.drawing.plots import draw_batch, draw_detections
from utils.files.results_csv import read_columns
from utils.machine.limits import require_package
from utils.structures import EvalResult

PICTURED_BATCHES = 3
TIME_BUDGET = 0.05  # of the run, at most, spent after epochs


class Plots(Hook):
    """Draws the plots of a run and its report, on rank 0: batches and the graph before the first step, the rest as it
    trains. Comes after `ResultFiles`. Raises UserError if Matplotlib is not installed."""

    def __init__(self) -> None:
        require_package("matplotlib", "plots", "use --noplots")

    def start(self, trainer: Training) -> Action:
        run, validation, model = trainer.run, trainer.hooks.get(Validation), trainer.step.ema.module
        tensorboard, evaluator = trainer.hooks.get(ResultFiles).tensorboard, validation.evaluator
        self._plots = RunPlots(run.folder, tensorboard, model, trainer.loader, evaluator)
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
        self._page = ReportPage(run.folder, subject)
        self._report = RunReport(run.folder, self._page, evaluator, is_resumed=run.checkpoint is not None)
        if run.checkpoint is None:
            self._plots.before()
            self._report.write()
        return Action.CONTINUE

    def after_scores(self, trainer: Training, epoch: Epoch) -> Action:
        self._page.set_epochs(trainer.epochs)
        self._report.add(epoch.number, epoch.result)
        self._drawing.after_epoch(epoch.number, epoch.result)
        return Action.CONTINUE

    def after_training(self, trainer: Training) -> Action:
        self._drawing.finish()
        return Action.CONTINUE

    def _draw(self, epoch: int, result: EvalResult | None) -> None:
        self._plots.draw(epoch, result)
        self._report.write()


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


class RunReport:
    """Writes report.html with the newest validation of this process.

    A resumed run keeps the page of the former process until its first validation.
    """

    def __init__(self, folder: Path, report: ReportPage, evaluator: Evaluator, *, is_resumed: bool) -> None:
        self._table, self._report, self._evaluator = folder / "results.csv", report, evaluator
        self._is_resumed, self._validation = is_resumed, None

    def add(self, epoch: int, result: EvalResult | None) -> None:
        """Takes the validation of an epoch, if there was one."""
        if result is not None and self._evaluator.detections is not None:
            self._validation = ScoredValidation(result, self._evaluator.detections, epoch)

    def write(self) -> None:
        if self._validation is not None or not self._is_resumed:
            self._report.write(read_columns(self._table) if self._table.exists() else {}, self._validation)


@dataclass
class RunPlots:
    """Draws into ``folder`` and hands the same pictures to TensorBoard."""

    folder: Path
    tensorboard: TensorBoardTracker
    model: Detector
    train_loader: InfiniteDataLoader
    evaluator: Evaluator

    def before(self) -> None:
        """train_batch0.jpg to train_batch2.jpg (augmented, as the model sees them), and the graph."""
        loader = self.train_loader
        for number in range(min(PICTURED_BATCHES, len(loader))):
            batch = loader.render(0, number)
            sheet = draw_batch(batch.images, batch.targets.rows, batch.paths, self.model.names)
            if sheet is not None:
                write_image(self.folder / f"train_batch{number}.jpg", sheet)
                self.tensorboard.image(f"train/batch{number}", sheet, 0)
        side = 2 * self.model.stride  # the graph of larger images is the same
        self.tensorboard.graph(self.model, torch.zeros(1, self.model.channels, side, side))

    def draw(self, epoch: int, result: EvalResult | None) -> None:
        """After a validation, val_predictions.jpg, and curves for TensorBoard."""
        if result is None:
            return
        self.tensorboard.pr_curves(result, self.model.names, epoch)
        if self.evaluator.preview is not None:
            batch, detections = self.evaluator.preview
            sheet = draw_detections(batch.images, detections, batch.targets.rows, batch.paths, self.model.names)
            if sheet is not None:
                write_image(self.folder / "val_predictions.jpg", sheet)
                self.tensorboard.image("val/predictions", sheet, epoch)


def write_plots(folder: Path, subject: Subject, result: EvalResult, evaluator: Evaluator, analysis: Analysis) -> None:
    """Writes the report of a validation with its figures, and predictions.jpg: labels and detections of a batch."""
    ReportPage(folder, subject).write({}, ScoredValidation(result, evaluator.detections, analysis=analysis))
    if evaluator.preview is not None:
        batch, detections = evaluator.preview
        names = subject.validated.names
        sheet = draw_detections(batch.images, detections, batch.targets.rows, batch.paths, names)
        write_image(folder / "predictions.jpg", sheet)
