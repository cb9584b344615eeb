"""The epochs of a run after which it validates, and those at its end that have no mosaics, or less scale jitter."""

from __future__ import annotations

import math

CLOSING_EPOCHS = 10  # at most half of the run


def validates_after(epoch: int, epochs: int, val_every: int) -> bool:
    """Returns whether a run of ``epochs`` validates after ``epoch``, which counts from 1."""
    return epoch == epochs or (val_every > 0 and epoch % val_every == 0)


def last_early_validation(epochs: float, val_every: int) -> float:
    """Returns the newest epoch before the last one of ``epochs`` after which a run validates; 0 if there is none. inf
    for a run of unknown length, whose ``epochs`` are inf."""
    if not val_every:
        return 0
    return epochs if math.isinf(epochs) else (epochs - 1) // val_every * val_every


def closing_epochs(setting: int | None, epochs: int) -> int:
    """Returns the number of epochs at the end of a run for which ``close_mosaic`` or ``close_scale`` holds."""
    return min(CLOSING_EPOCHS, epochs // 2) if setting is None else setting


def is_closing_epoch(epoch: int, epochs: int, close_mosaic: int | None) -> bool:
    """Returns whether ``epoch``, which counts from 1, is one of the last of a run of ``epochs``, without mosaics."""
    return epoch > epochs - closing_epochs(close_mosaic, epochs)
