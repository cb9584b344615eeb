"""Distinguishes the last.pt and best.pt of a folder's newest run from those that an earlier run left
(``--exist-ok``)."""

from __future__ import annotations

from pathlib import Path

from utils.files.safe_io import write_whole

# In the run's folder: modification times of the files that an earlier run has left.
EARLIER_CHECKPOINT = ".earlier_checkpoint"  # of last.pt
EARLIER_BEST = ".earlier_best"  # of best.pt


def note_earlier_checkpoint(folder: Path, *, is_new: bool) -> None:
    """Records the last.pt and best.pt that a new run finds in its folder (``--exist-ok``). A restart does not continue
    that last.pt, nor does ``--resume`` unless it names the file; that best.pt is not exported as the new run's.

    A run that continues keeps the record of best.pt: it may not have written its own. See `note_own_best`.
    """
    if is_new:
        _note(folder / "last.pt", folder / EARLIER_CHECKPOINT)
        _note(folder / "best.pt", folder / EARLIER_BEST)
    else:
        (folder / EARLIER_CHECKPOINT).unlink(missing_ok=True)


def note_own_best(folder: Path) -> None:
    """Records that the best.pt in ``folder`` is that of the run that continues there."""
    (folder / EARLIER_BEST).unlink(missing_ok=True)


def has_earlier_checkpoint(folder: Path) -> bool:
    """Whether the last.pt in ``folder`` is that of an earlier run, as the newest one has not saved its own yet."""
    return _is_noted(folder / "last.pt", folder / EARLIER_CHECKPOINT)


def has_earlier_best(folder: Path) -> bool:
    """Whether the best.pt in ``folder`` is that of an earlier run, as the newest one has not scored an epoch yet."""
    return _is_noted(folder / "best.pt", folder / EARLIER_BEST)


def checkpoint_of_newest_run(folder: Path) -> Path | None:
    """Returns the last.pt that the newest run in ``folder`` has saved, or None."""
    last = folder / "last.pt"
    return last if last.is_file() and not has_earlier_checkpoint(folder) else None


def best_of_newest_run(folder: Path) -> Path | None:
    """Returns the best.pt that the newest run in ``folder`` has saved, or None."""
    best = folder / "best.pt"
    return best if best.is_file() and not has_earlier_best(folder) else None


def _note(file: Path, note: Path) -> None:
    """Records the modification time of ``file`` in ``note``, which is removed if there is no such file."""
    if file.is_file():
        write_whole(note, str(file.stat().st_mtime_ns))
    else:
        note.unlink(missing_ok=True)


def _is_noted(file: Path, note: Path) -> bool:
    return file.is_file() and note.is_file() and note.read_bytes() == str(file.stat().st_mtime_ns).encode()
