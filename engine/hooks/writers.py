"""Writes the numbers of each epoch: results.csv and TensorBoard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.hooks.hook import Epoch, Hook, Training
from engine.run.results_csv import ResultsTable
from utils.errors import first_line
from utils.logger import get_logger

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class ResultsCsv(Hook):
    """results.csv, on rank 0: a row per epoch, from 1. A column that comes later is added to the header, and is empty
    in earlier rows.

    ``table``: content of the file at the start; empty if there is none.
    """

    def __init__(self, path: Path, table: ResultsTable) -> None:
        self.path = path
        self.table = table
        self._has_warned = False  # whether the warning about power cuts has been logged

    def start(self, trainer: Training) -> None:
        """Drops the epochs that a resumed run repeats. `engine.run.restore` has warned of those that the file has lost.

        The file of an earlier run (``--exist-ok``) stays while its last.pt does, from which that run could continue:
        see `engine.hooks.checkpointing.Checkpoints`.
        """
        num_read = len(self.table.rows)
        self.table.keep(_recorded_epochs(trainer))
        if not self.table.rows and not trainer.checkpointer.replaces_earlier:
            self.path.unlink(missing_ok=True)
        elif 0 < len(self.table.rows) < num_read:
            self._write(trainer)

    def record(self, trainer: Training, epoch: Epoch) -> None:
        self.table.add(epoch.number, epoch.row)
        self._write(trainer)

    def _write(self, trainer: Training) -> None:
        """Replaces the file. It survives a power cut, unless the disk cannot confirm that it has written a file. In
        that case, this only warns, once. Raises UserError if the file cannot be written at all."""
        try:
            self.table.write(self.path, durable=True)
        except OSError as error:
            try:
                self.table.write(self.path)
            except OSError as failure:
                raise trainer.checkpointer.write_failure(self.path, failure) from None
            if not self._has_warned:
                reason = error.strerror or error
                get_logger().warning("%s: may not survive a power cut (%s); written all the same", self.path, reason)
            self._has_warned = True


def _recorded_epochs(trainer: Training) -> int:
    """Returns how many epochs of the run were recorded before this start. A pending epoch does not count."""
    started_from = trainer.run.started_from
    is_pending = started_from is not None and started_from.is_pending
    return trainer.progress.epoch - int(is_pending)


def _first_recorded_epoch(trainer: Training) -> int:
    """Returns the first epoch that this start records; 0 for a new run, so that TensorBoard purges the events of an
    earlier run. An epoch that is only scored now may have been recorded before, without scores (``--val-every``)."""
    started_from = trainer.run.started_from
    if started_from is None:
        return 0
    return trainer.progress.epoch + (0 if started_from.lacks_scores(trainer.epochs) else 1)


class TensorBoard(Hook):
    """TensorBoard event files in the run's folder, on rank 0. Without TensorBoard, or if it fails, as on a full disk or
    with an incompatible NumPy version, a warning says so, and the run goes on.

    Each start writes new event files next to the earlier ones, and hides the epochs in them that it records again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def start(self, trainer: Training) -> None:
        first_step = _first_recorded_epoch(trainer)
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=first_step)
        except Exception as error:
            self._turn_off(error)
        settings = trainer.run.settings.by_name()
        lines = [f"    {name}: {value}" for name, value in settings.items()]  # preformatted Markdown
        self.write(lambda writer: writer.add_text("config", "\n".join(lines), trainer.progress.epoch + 1))

    def record(self, trainer: Training, epoch: Epoch) -> None:
        for tag, value in epoch.row.items():
            self.write(_add_scalar, tag, value, epoch.number)

    def after_epoch(self, trainer: Training, epoch: Epoch) -> None:
        self.write(lambda writer: writer.flush())

    def close(self) -> None:
        self.write(lambda writer: writer.close())

    def write(self, add: Callable[..., None], *arguments: object) -> None:
        """Calls ``add`` with the `SummaryWriter`, if there is one."""
        if self._writer is not None:
            try:
                add(self._writer, *arguments)
            except Exception as error:
                self._turn_off(error)

    def _turn_off(self, error: Exception) -> None:
        self._writer = None
        get_logger().warning("TensorBoard is off (%s); results.csv is kept", first_line(error))


def _add_scalar(writer: SummaryWriter, tag: str, value: float, step: int) -> None:
    writer.add_scalar(tag, value, step)
