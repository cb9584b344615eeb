"""Stores the index of a split in a cache file, whose name contains a fingerprint of the split's files."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.flat_strings import FlatStrings
from data.index.index import ARRAYS, REPORT_COLUMNS, DatasetIndex, select_arrays
from data.labels.categories import Category
from data.labels.findings import Finding
from data.labels.ledger import Ledger
from data.labels.report import FindingTable, ScanReport
from data.source.dataset_spec import DatasetSpec
from data.source.listing.listing import Listing
from data.split_files import ImageFile, LabelFile
from utils.files.array_file import CacheError, open_arrays, write_arrays
from utils.files.paths import path_of
from utils.files.safe_io import read_regular, remove_half_written
from utils.logger import get_logger
from utils.pixels import RGB8

# Increase this when the arrays, the metadata or their meaning change, or the same files yield other boxes, findings or
# losses: all index caches are then built anew.
CACHE_VERSION = 24


@dataclass(frozen=True, slots=True)
class IndexCache:
    """Names the cache file of a split, and the report of its scan in the same folder."""

    path: Path  # may not exist
    cache_key: str  # see `DatasetIndex.cache_key`
    fingerprint: str  # see `fingerprint_of`

    @classmethod
    def find(cls, folder: Path, cache_key: str, fingerprint: str) -> IndexCache:
        """Finds the file with ``fingerprint`` of any key, so that a data set that has been moved, or that another
        YAML names, is not scanned again. Without one, names the file to write."""
        path = next(folder.glob(f"*-{fingerprint}.index"), folder / f"{cache_key}-{fingerprint}.index")
        return cls(path, cache_key, fingerprint)

    @property
    def report_path(self) -> Path:
        """Path of the report of the scan, a text file that exists if there are findings."""
        return self.path.with_suffix(".txt")

    def open(self, names: tuple[str, ...], root: Path) -> DatasetIndex | None:
        """Memory-maps the index in the file. Returns None if the file is missing, has another fingerprint, or (with a
        warning) is unusable."""
        try:
            meta, arrays = open_arrays(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (CacheError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            get_logger().warning("%s: the cached index can't be used (%s); scanning again", self.path, reason)
            return None
        if meta["fingerprint"] != self.fingerprint:
            return None
        return restored_index(meta, arrays, names, root)

    def write(self, index: DatasetIndex) -> None:
        """Writes the file and the report, and removes outdated ones and leftovers of killed processes. Logs a warning
        if writing fails."""
        folder = self.path.parent
        meta, arrays = index_content(index)
        try:
            write_arrays(self.path, meta | {"fingerprint": self.fingerprint}, arrays)
            if len(index.report.findings):
                index.report.write(self.report_path)
        except OSError as error:
            get_logger().warning("%s: the index can't be cached (%s); the next run scans again", folder, error.strerror)
        for old in {*folder.glob(f"{self.cache_key}-*")} - {self.path, self.report_path}:
            with contextlib.suppress(OSError):  # another process may have removed it
                old.unlink()
        with contextlib.suppress(OSError):
            remove_half_written(folder)


def fingerprint_of(spec: DatasetSpec, split: str, listing: Listing, image_rows: bytes, *, single_cls: bool) -> str:
    """Returns a digest of the names, sizes and times of all files, the listing's findings, the classes, and the version
    of this code, and of the contents of label files if their times are meaningless. It does not depend on the folder.

    ``spec``: with the classes as labeled; ``image_rows``: `file_rows` of the images.
    """
    facts = [CACHE_VERSION, listing.label_format.name, split, single_cls, spec.names]
    if spec.pixels != RGB8:
        facts.append(spec.pixels.content())
    if listing.shares_folders:  # affects the messages about images that the label file does not name
        facts.append("shares folders")
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16)
    for rows in (image_rows, file_rows(listing.labels)):
        digest.update(rows + b"\0\0\0")
    digest.update(json.dumps([_facts_of(finding) for finding in listing.findings]).encode())
    if listing.label_format.per_image is None:  # what the label file may name
        names_in_split = [image.name_in_split for image in listing.images]
        digest.update(json.dumps([names_in_split, listing.aliases, listing.others]).encode())
    if _have_one_time(listing.labels):
        for file in listing.labels:
            digest.update(_content_digest(file, spec.root))
    return digest.hexdigest()


def file_rows(files: Sequence[ImageFile | LabelFile]) -> bytes:
    """Returns the names, sizes and times of all files as bytes, for digests."""
    rows = (f"{f.name}\0{f.stamp.size} {f.stamp.mtime_ns}" if f.stamp else f"{f.name}\0" for f in files)
    return "\0\0".join(rows).encode("utf-8", "surrogateescape")


def _facts_of(finding: Finding) -> tuple[object, ...]:
    """Returns the fields of a finding that enter a fingerprint. `cause`, which repeats the message, does not."""
    box = (finding.class_id, finding.xyxy_px)
    losses = (finding.lost_images, finding.lost_objects)
    return (finding.where, finding.kind, finding.message, finding.image, finding.row_number, *box, *losses)


def _have_one_time(labels: Sequence[LabelFile]) -> bool:
    """Returns whether several label files all have the same time, in whole seconds, as from an archive with a constant
    time. Then only contents, not sizes and times, can distinguish a corrected label from an old one."""
    times = {file.stamp.mtime_ns for file in labels if file.stamp}
    return len(labels) > 1 and len(times) == 1 and times.pop() % 1_000_000_000 == 0


def _content_digest(file: LabelFile, root: Path) -> bytes:
    """Returns a digest of a file's bytes. An unreadable file, which the scan reports, counts as empty."""
    try:
        content = read_regular(path_of(file.name, root)) if file.stamp else b""
    except (OSError, MemoryError):
        content = b""
    return hashlib.blake2b(content, digest_size=16).digest()


def index_content(index: DatasetIndex) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the metadata and arrays of a file from which `restored_index` restores the index."""
    report = index.report
    strings = {"paths": index.paths, "image_ids": index.image_ids}
    for column in REPORT_COLUMNS:
        strings[f"report.{column}"] = getattr(report.findings, column)
    arrays = {name: getattr(index, name) for name in ARRAYS}
    for name, flat in strings.items():
        if flat is not None:
            arrays[f"{name}.data"] = flat.data
            arrays[f"{name}.offsets"] = flat.offsets
    meta = {
        "categories": index.categories,
        "category_ids": index.category_ids,
        "totals": report.totals,
        "ledger": report.ledger.content(),
        "advice": report.advice,
        "notes": report.notes,
    }
    return meta, arrays


def restored_index(
    meta: dict[str, Any], arrays: dict[str, np.ndarray], names: tuple[str, ...], root: Path
) -> DatasetIndex:
    """Restores an index from its `index_content`."""

    def strings(name: str) -> FlatStrings:
        return FlatStrings(arrays[f"{name}.data"], arrays[f"{name}.offsets"])

    return DatasetIndex(
        names=names,
        root=root,
        paths=strings("paths"),
        **select_arrays(arrays),
        report=ScanReport(
            totals=meta["totals"],
            findings=FindingTable(**{column: strings(f"report.{column}") for column in REPORT_COLUMNS}),
            ledger=Ledger.from_content(meta["ledger"]),
            advice=tuple(meta["advice"]),
            notes=tuple(meta["notes"]),
        ),
        image_ids=strings("image_ids") if "image_ids.data" in arrays else None,
        categories=tuple(Category(*category) for category in meta["categories"]),
        category_ids=tuple(meta["category_ids"]),
    )
