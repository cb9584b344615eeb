"""Trackers: where a run reports its results. Those of every run write results.csv and TensorBoard events."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from engine.hooks.hook import Action, Epoch, Hook, Training
from utils.errors import UserError, first_line
from utils.files.results_csv import ResultsTable
from utils.files.safe_io import write_whole
from utils.logger import get_logger
from utils.structures import EvalResult

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

PR_POINTS = 127  # thresholds of a curve; TensorBoard shows no more


class Tracker:
    """Base class, which tracks nothing: subclasses override what they track. Epochs are numbered from 1."""

    def start(self, config: dict[str, Any], epoch: int) -> None:
        """Called once, before `epoch`: the run starts or resumes at ``epoch`` with the settings ``config``. Results of
        that epoch and later ones are to be forgotten."""

    def epoch(self, epoch: int, row: dict[str, float]) -> None:
        """The results of an epoch by name."""

    def finish(self, folder: Path) -> None:
        """Called once, when the run is complete and all files in its ``folder`` are written."""

    def close(self) -> None:
        """Flushes and closes the files."""


class CsvTracker(Tracker):
    """A CSV file with a row per epoch, kept in memory too.

    A run has some hundred short rows, so each change writes a whole new file and renames it: a crash cannot leave half
    a line, and a column that first appears in a later epoch (metrics, if epochs pass without validation) joins the
    header, with empty cells above. Rows of a former process are read by the constructor.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.table = ResultsTable.read(self.path) if self.path.exists() else ResultsTable()

    def start(self, config: dict[str, Any], epoch: int) -> None:
        table = self.table
        kept = {number: row for number, row in table.rows.items() if number < epoch}
        if len(kept) == len(table.rows):
            return
        if kept:
            table.rows = kept
            self._write()
        else:
            self.table = ResultsTable()
            self.path.unlink(missing_ok=True)

    def epoch(self, epoch: int, row: dict[str, float]) -> None:
        """Adds or replaces a row. Raises UserError if the file cannot be written."""
        self.table.add(epoch, row)
        self._write()

    def _write(self) -> None:
        try:
            write_whole(self.path, self.table.text())
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror or error})") from None


class TensorBoardTracker(Tracker):
    """TensorBoard event files in the run's folder.

    A resumed run writes new event files next to the earlier ones. Repeated steps have the same results, so nothing is
    purged. If TensorBoard is not installed, or the events cannot be written (a full disk), a warning says so, and
    the run goes on without them.
    """

    def __init__(self, run_dir: Path) -> None:
        self._writer: SummaryWriter | None = None
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(run_dir))
        except (ImportError, OSError) as error:
            _warn_off(error)

    def start(self, config: dict[str, Any], epoch: int) -> None:
        text = "\n".join(f"    {name}: {value}" for name, value in config.items())  # indented: preformatted Markdown
        self._write(lambda writer: writer.add_text("config", text, epoch))

    def epoch(self, epoch: int, row: dict[str, float]) -> None:
        def add(writer: SummaryWriter) -> None:
            for tag, value in row.items():
                writer.add_scalar(tag, value, epoch)
            writer.flush()

        self._write(add)

    def image(self, tag: str, image: np.ndarray, step: int) -> None:
        """``image``: uint8 (H, W, 3) RGB."""
        self._write(lambda writer: writer.add_image(tag, image, step, dataformats="HWC"))

    def pr_curves(self, result: EvalResult, names: Sequence[str], epoch: int) -> None:
        """Precision against recall at IoU 0.5, a curve for each class that has objects."""

        def add(writer: SummaryWriter) -> None:
            for index in np.flatnonzero(result.class_targets > 0):
                counts = _pr_counts(result, index)
                writer.add_pr_curve_raw(f"pr/{names[index]}", *counts, epoch, num_thresholds=PR_POINTS)

        self._write(add)

    def graph(self, model: nn.Module, example: Tensor) -> None:
        """The graph of ``model``, traced with the input ``example``.

        Traces a copy on the CPU, where ``example`` is: on a GPU, cuDNN would search for kernels of this type and
        size, which training does not use. A model that cannot be traced costs one warning."""
        if self._writer is None:
            return
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")  # of the tracer
                self._writer.add_graph(copy.deepcopy(model).cpu().eval(), example, use_strict_trace=False)
        except Exception as error:  # of any kind: a graph in TensorBoard is no reason to end a run
            get_logger().warning("no model graph in TensorBoard: %s", first_line(error))

    def close(self) -> None:
        self._write(lambda writer: writer.close())

    def _write(self, add: Callable[[SummaryWriter], None]) -> None:
        """Calls ``add``; if the disk refuses the events, goes on without TensorBoard."""
        if self._writer is None:
            return
        try:
            add(self._writer)
        except OSError as error:
            _warn_off(error)
            writer, self._writer = self._writer, None
            with contextlib.suppress(OSError):
                writer.close()


def _warn_off(error: Exception) -> None:
    reason = getattr(error, "strerror", None) or first_line(error)
    get_logger().warning("TensorBoard is off (%s); results.csv is kept", reason)


def _pr_counts(result: EvalResult, index: int) -> tuple[np.ndarray, ...]:
    """TP, FP, TN, FN, precision and recall of class ``index`` at evenly spaced thresholds, each (PR_POINTS,)."""
    thresholds = np.linspace(0, 1, PR_POINTS)
    known = result.curve_confidence
    precision = np.interp(thresholds, known, np.nan_to_num(result.curve_precision[index]))
    recall = np.interp(thresholds, known, np.nan_to_num(result.curve_recall[index]))
    targets = float(result.class_targets[index])
    tp = recall * targets
    fp = np.where(precision > 0, tp * (1 - precision) / np.maximum(precision, 1e-9), 0.0)
    return tp, fp, np.zeros(PR_POINTS), targets - tp, precision, recall


class TrackerHook(Hook):
    """Base class: trackers that follow a run, on rank 0."""

    trackers: Sequence[Tracker] = ()

    def open(self, trainer: Training) -> Sequence[Tracker]:
        raise NotImplementedError

    def start(self, trainer: Training) -> Action:
        run, self.trackers = trainer.run, self.open(trainer)
        for tracker in self.trackers:
            tracker.start({**asdict(run.config), **asdict(run.hyp)}, trainer.progress.epoch + 1)
        return Action.CONTINUE

    def scored(self, trainer: Training, epoch: Epoch) -> Action:
        for tracker in self.trackers:
            tracker.epoch(epoch.number, epoch.row)
        return Action.CONTINUE

    def finish(self, trainer: Training) -> Action:
        for tracker in self.trackers:
            tracker.finish(trainer.run.folder)
        return Action.CONTINUE

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()


class ResultFiles(TrackerHook):
    """results.csv and TensorBoard's files in the run's folder."""

    results: CsvTracker
    tensorboard: TensorBoardTracker

    def open(self, trainer: Training) -> Sequence[Tracker]:
        folder = trainer.run.folder
        self.results, self.tensorboard = CsvTracker(folder / "results.csv"), TensorBoardTracker(folder)
        return self.results, self.tensorboard
