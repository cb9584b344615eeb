"""Defines a split as it is read (`FullSplit`), and with the part of it that a run uses (`LoadedSplit`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from data.index.index import DatasetIndex, Scan
from data.labels.ledger import refusal_message
from data.source.dataset_spec import DatasetSpec
from data.source.files import Listing


@dataclass(frozen=True, slots=True)
class FullSplit:
    """Holds all usable images of a split, with the classes of the labels, as `read_files`, `read_shards` or
    `join_parts` returns it."""

    index: DatasetIndex
    note: str = ""  # how it was read, for the log, such as " (cached)"
    scans: tuple[Scan, ...] = ()  # see `DatasetIndex.origins`; empty: the index is that of a cache file
    parts: tuple[LoadedSplit, ...] = ()  # the data sets that it joins
    listing: Listing | None = None  # its files; None: shards, or data sets that are joined
    first_label: str = ""  # name of a label file or of the shards, for messages
    report_path: Path | None = None  # where the report of a scan may be

    @property
    def has_labels(self) -> bool:
        """Whether any image has a label file. True for shards and joined data sets."""
        return self.listing is None or any(file.stamp is not None for file in self.listing.labels)

    def report_note(self) -> str:
        """Returns where the report of the scan is, for messages; "" if there is none, or nothing in it."""
        if self.report_path is None or not self.index.report.problems or not self.report_path.exists():
            return ""
        return f"; report: {self.report_path}"

    def has_lost_too_much(self, max_bad: float) -> bool:
        """Returns whether more than the fraction ``max_bad`` of the labels or images is lost, of any part."""
        if self.parts:
            return any(part.full.has_lost_too_much(max_bad) for part in self.parts)
        return bool(refusal_message(self.index.report.ledger, max_bad))


@dataclass(frozen=True, slots=True)
class LoadedSplit:
    """Holds a split with the part of it that a run uses, or that a data set uses which joins it."""

    spec: DatasetSpec
    split: str
    full: FullSplit
    used: DatasetIndex

    @property
    def is_held_out(self) -> bool:
        """Whether it is a part of the training split, which reports all losses."""
        return self.spec.is_held_out(self.split)
