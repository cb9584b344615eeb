"""The record of a run that has been reported. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from utils.errors import UserError
from utils.files.safe_io import read_text, write_whole

COMPLETE = ".complete"  # in the run's folder
_MAX_BYTES = 1 << 16


def record_reported(folder: Path, run_id: str, epochs: int) -> None:
    """Records that the run in ``folder`` has done everything that follows the last of its ``epochs``, except
    exports."""
    write_whole(folder / COMPLETE, f"{run_id}\n{epochs}\n")


def read_reported_epochs(folder: Path, run_id: str) -> int | None:
    """Returns the epochs that `record_reported` has recorded for the run ``run_id``; None without such a record."""
    try:
        stored_id, epochs = read_text(folder / COMPLETE, _MAX_BYTES).splitlines()
        return int(epochs) if stored_id == run_id else None
    except (UserError, ValueError):
        return None
