"""Defines a split as read from the disk (`FullSplit`), and with the part of it that a run uses (`LoadedSplit`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from data.index.index import DatasetIndex, Scan
from data.labels.ledger import refusal_message
from data.source.dataset_spec import DatasetSpec
from data.source.listing.listing import Listing


@dataclass(frozen=True, slots=True)
class FullSplit:
    """All usable images of a split, with the classes of the labels, as returned by `read_files`, `read_shards` or
    `join_parts`."""

    index: DatasetIndex
    note: str = ""  # how it was read, for the log, such as " (cached)"
    scans: tuple[Scan, ...] = ()  # see `DatasetIndex.origins`; empty if the index is from a cache file
    parts: tuple[LoadedSplit, ...] = ()  # the data sets that it joins
    listing: Listing | None = None  # its files; None for shards and joined data sets
    first_label: str = ""  # name of a label file or of the shards, for messages
    report_path: Path | None = None  # where the report of a scan may be

    @property
    def has_labels(self) -> bool:
        """Whether any image has a label file. True for shards and joined data sets."""
        return self.listing is None or self.listing.has_labels

    def report_note(self) -> str:
        """Returns the path of the scan's report, for messages, or "" if there is none or it contains no problems."""
        if self.report_path is None or not self.index.report.problems or not self.report_path.exists():
            return ""
        return f"; report: {self.report_path}"

    def has_lost_too_much(self, max_bad: float) -> bool:
        """Returns whether more than the fraction ``max_bad`` of the labels or images of any part is lost."""
        if self.parts:
            return any(part.full.has_lost_too_much(max_bad) for part in self.parts)
        return bool(refusal_message(self.index.report.ledger, max_bad))


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
