"""Defines a split as read from the disk (`FullSplit`), and with the part of it that a run uses (`LoadedSplit`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from data.dataset.spec import DatasetSpec
from data.index.index import DatasetIndex, Scan


@dataclass(frozen=True, slots=True)
class FullSplit:
    """All usable images of a split, with the classes of the labels."""

    index: DatasetIndex
    note: str = ""  # how it was read, for the log, such as " (cached)"
    scans: tuple[Scan, ...] = ()  # see `DatasetIndex.origins`; empty if the index is from a cache file
    parts: tuple[LoadedSplit, ...] = ()  # the data sets that it joins
    has_labels: bool = True  # whether any image has a label file
    report_path: Path | None = None  # text file with the findings; None if there is none

    def report_note(self) -> str:
        """Returns the path of the file with the findings, for messages, or "" if there is none."""
        return f"; report: {self.report_path}" if self.report_path and self.report_path.exists() else ""

    def has_lost_too_much(self, max_bad: float) -> bool:
        """Returns whether more than the fraction ``max_bad`` of the labels or images of any part is lost."""
        if self.parts:
            return any(part.full.has_lost_too_much(max_bad) for part in self.parts)
        return self.index.report.has_lost_too_much(max_bad)


@dataclass(frozen=True, slots=True)
class LoadedSplit:
    """A split with the part of it that a run, or a data set that joins it, uses."""

    spec: DatasetSpec
    split: str
    full: FullSplit
    used: DatasetIndex

    @property
    def is_held_out(self) -> bool:
        """Whether it is held out from the training split, which reports all losses."""
        return self.spec.is_held_out(self.split)
