"""Trackers: where a run reports its results. Those of every run write results.csv and TensorBoard events."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.hooks.hook import Epoch, Hook, Training
from utils.errors import UserError, first_line
from utils.files.results_csv import ResultsTable
from utils.files.safe_io import write_whole
from utils.logger import get_logger

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Tracker:
    """Base class, which tracks nothing. Epochs are numbered from 1."""

    def start(self, config: dict[str, Any], epoch: int) -> None:
        """The run starts or resumes at ``epoch``, with the settings ``config``. Results of that epoch and later ones
        are to be forgotten."""

    def epoch(self, epoch: int, row: dict[str, float]) -> None:
        """The results of an epoch by name."""

    def finish(self, folder: Path) -> None:
        """The run is complete and all files in its ``folder`` are written."""

    def close(self) -> None:
        """Flushes and closes the files."""


class CsvTracker(Tracker):
    """A CSV file with a row per epoch. Each change replaces it as a whole, so that a crash cannot leave half a line; a
    later column joins the header, with empty cells above."""

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
        self.write(lambda writer: writer.add_text("config", text, epoch))

    def epoch(self, epoch: int, row: dict[str, float]) -> None:
        def add(writer: SummaryWriter) -> None:
            for tag, value in row.items():
                writer.add_scalar(tag, value, epoch)
            writer.flush()

        self.write(add)

    def close(self) -> None:
        self.write(lambda writer: writer.close())

    def write(self, add: Callable[..., None], *arguments: object) -> None:
        """Calls ``add`` with the `SummaryWriter`; if the disk refuses the events, goes on without TensorBoard."""
        if self._writer is None:
            return
        try:
            add(self._writer, *arguments)
        except OSError as error:
            _warn_off(error)
            writer, self._writer = self._writer, None
            with contextlib.suppress(OSError):
                writer.close()


def _warn_off(error: Exception) -> None:
    reason = getattr(error, "strerror", None) or first_line(error)
    get_logger().warning("TensorBoard is off (%s); results.csv is kept", reason)


class TrackerHook(Hook):
    """Base class: trackers that follow a run, on rank 0."""

    trackers: Sequence[Tracker] = ()

    def open(self, trainer: Training) -> Sequence[Tracker]:
        raise NotImplementedError

    def start(self, trainer: Training) -> None:
        run, self.trackers = trainer.run, self.open(trainer)
        for tracker in self.trackers:
            tracker.start({**asdict(run.config), **asdict(run.hyp)}, trainer.progress.epoch + 1)

    def after_validation(self, trainer: Training, epoch: Epoch) -> None:
        for tracker in self.trackers:
            tracker.epoch(epoch.number, epoch.row)

    def finish(self, trainer: Training) -> None:
        for tracker in self.trackers:
            tracker.finish(trainer.run.folder)

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
