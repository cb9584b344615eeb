"""Tells whose last.pt is in a folder: with ``--exist-ok`` it is an earlier run's until the new run saves its own."""

from __future__ import annotations

from pathlib import Path

from utils.files.safe_io import write_whole

EARLIER_CHECKPOINT = ".earlier_checkpoint"  # in the run's folder: the time of the last.pt that an earlier run has left


def note_earlier_checkpoint(folder: Path, *, is_new: bool) -> None:
    """Records the last.pt that a new run finds in its folder (``--exist-ok``). A restart does not continue it, nor does
    ``--resume`` unless it names the file."""
    last = folder / "last.pt"
    if is_new and last.is_file():
        write_whole(folder / EARLIER_CHECKPOINT, str(last.stat().st_mtime_ns))
    else:
        (folder / EARLIER_CHECKPOINT).unlink(missing_ok=True)


def has_earlier_checkpoint(folder: Path) -> bool:
    """Whether the last.pt in ``folder`` is that of an earlier run, as the newest one has not saved its own yet."""
    last = folder / "last.pt"
    note = folder / EARLIER_CHECKPOINT
    return last.is_file() and note.is_file() and note.read_bytes() == str(last.stat().st_mtime_ns).encode()


def checkpoint_of_newest_run(folder: Path) -> Path | None:
    """Returns the last.pt that the newest run in ``folder`` has saved, or None."""
    last = folder / "last.pt"
    return last if last.is_file() and not has_earlier_checkpoint(folder) else None
