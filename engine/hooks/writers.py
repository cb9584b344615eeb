"""Writes the numbers of each epoch to TensorBoard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.hooks.hook import Epoch, Hook, Training
from utils.errors import first_line
from utils.logger import get_logger

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Hook):
    """TensorBoard event files in the run's folder, on rank 0. Without TensorBoard, or if it fails, a warning says so,
    and the run goes on.

    Each start writes new event files next to the earlier ones, and hides the epochs in them that it records again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def start(self, trainer: Training) -> None:
        started_from = trainer.run.started_from
        first_epoch = 0  # hides all events of an earlier run
        if started_from is not None:
            # An epoch that is only scored now may have been recorded without scores (``--val-every``).
            first_epoch = trainer.progress.epoch + (0 if started_from.lacks_scores(trainer.epochs) else 1)
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=first_epoch)
        except Exception as error:
            self._turn_off(error)
        settings = trainer.run.settings.by_name()
        text = "\n".join(f"    {name}: {value}" for name, value in settings.items())  # preformatted Markdown
        self.write(lambda writer: writer.add_text("config", text, trainer.progress.epoch + 1))

    def record(self, trainer: Training, epoch: Epoch) -> None:
        def add_scalars(writer: SummaryWriter) -> None:
            for tag, value in epoch.row.items():
                writer.add_scalar(tag, value, epoch.number)

        self.write(add_scalars)

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
