"""best.pt of a run that goes back to an earlier checkpoint: which epoch it is of, set aside or restored."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.checkpoint.checkpoint import weights_part
from engine.checkpoint.progress import Progress, read_progress
from utils.files.checkpoint_file import read_checkpoint


class BestFile:
    """best.pt of the run in ``folder``: which epoch it is of, set aside or restored when the run goes back.

    ``write`` queues content by path.
    """

    def __init__(self, folder: Path, write: Callable[[dict[Path, Any]], None]) -> None:
        self.path = folder / "best.pt"
        self._write = write

    def is_of_best_epoch(self, progress: Progress) -> bool:
        """Whether the file is of the best epoch that ``progress`` knows."""
        return _is_of_best_epoch(self.path, progress)

    def restore(self, periodic: Path, progress: Progress) -> bool:
        """Writes the file from ``periodic``, the epochN.pt of the best epoch. Returns False if that does not exist, or
        belongs to another run."""
        if not _is_of_best_epoch(periodic, progress):
            return False
        self._write({self.path: weights_part(read_checkpoint(periodic))})
        return True

    def set_aside(self) -> Path | None:
        """Renames the file to bestN.pt, N being its epoch, or bestN-2.pt and so on if there is one, so that the run
        does not overwrite it. Returns the new path, or None if there is no such file."""
        stored = read_progress(self.path)
        if stored is None:
            return None
        path = self.path.with_name(f"best{stored.epoch}.pt")
        for number in itertools.count(2):
            if not os.path.lexists(path):
                break
            path = self.path.with_name(f"best{stored.epoch}-{number}.pt")
        self.path.rename(path)
        return path


def _is_of_best_epoch(path: Path, progress: Progress) -> bool:
    """Whether the file was saved after the best epoch that ``progress`` knows, by a run with the same one."""
    stored = read_progress(path)
    if stored is None:
        return False
    is_best = stored.epoch == stored.best_epoch == progress.best_epoch
    return is_best and stored.best_fitness == progress.best_fitness
