"""Builds the index of a split that joins several data sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from data.index.index import DatasetIndex, concatenated, digest_of
from data.index.loaded import LoadedSplit
from data.labels.findings import Finding
from data.labels.ledger import Ledger
from data.labels.report import FindingTable, ScanReport
from data.source.dataset_spec import IGNORED, DatasetSpec
from utils.files.paths import path_of, relative_name
from utils.logger import get_logger
from utils.strings import FlatStrings, counted, listed


def joined(spec: DatasetSpec, split: str, loaded: Sequence[LoadedSplit], *, is_reported: bool = False) -> LoadedSplit:
    """Joins the loaded parts of a split. A class that a part does not label is ignored in its images.

    ``is_reported``: whether the log says so already.
    """
    names = spec.as_labeled().names
    parts = spec.split(split).parts
    indexes = [each.index for each in loaded]
    paths = [index.path(i) for index in indexes for i in range(len(index))]
    if not is_reported:
        _log_unlabeled_classes(parts, indexes, names, split)
        _warn_of_repeated_images(paths, spec, split)
    index = DatasetIndex(
        names=names,
        root=spec.root,
        paths=FlatStrings.of(relative_name(path, spec.root) for path in paths),
        **concatenated([_with_names(index, names) for index in indexes]),
        report=_joined_report(parts, indexes, spec, split),
        fingerprint=digest_of([index.fingerprint for index in indexes], names),
        pixels=spec.pixels,
        origins=_origins(loaded),
    )
    return LoadedSplit(
        index.recounted(),
        scans=tuple(scan for each in loaded for scan in each.scans),
        has_lost_too_much=any(each.has_lost_too_much for each in loaded),
    )


def _log_unlabeled_classes(
    parts: Sequence[DatasetSpec], indexes: Sequence[DatasetIndex], names: Sequence[str], split: str
) -> None:
    """Logs which classes each part does not label."""
    for part, index in zip(parts, indexes):
        labeled = set(index.names)
        missing = [name for name in names if name not in labeled]
        if missing:
            shown = listed(missing, 5)
            get_logger().info("%s: %s does not label %s: ignored in its images", split, part.source, shown)


def _warn_of_repeated_images(paths: Sequence[str], spec: DatasetSpec, split: str) -> None:
    """Warns of images that several parts have. ``paths``: those of all images, absolute."""
    repeated = len(paths) - len(set(paths))
    if repeated:
        shared = counted(repeated, "image")
        get_logger().warning(
            "%s: data sets that %s joins share %s, which count more than once", split, spec.source, shared
        )


def _joined_report(
    parts: Sequence[DatasetSpec], indexes: Sequence[DatasetIndex], spec: DatasetSpec, split: str
) -> ScanReport:
    """Returns the sums and the findings of the parts' reports."""
    totals: Counter[str] = Counter()
    findings = []
    for part, index in zip(parts, indexes):
        totals += Counter(index.report.totals)
        findings += [_finding_of_part(finding, split, part, spec) for finding in index.report.findings]
    ledger = Ledger.joined([index.report.ledger for index in indexes])
    return ScanReport(dict(totals), FindingTable.of(findings), ledger)


def _origins(loaded: Sequence[LoadedSplit]) -> np.ndarray | None:
    """Returns the origins of all images, whose scans follow each other; None if they are not known."""
    origins = []
    num_scans = 0
    for each in loaded:
        if each.index.origins is None:
            return None
        origins.append(np.add(each.index.origins, [num_scans, 0]))
        num_scans += len(each.scans)
    return np.concatenate(origins)


def _finding_of_part(finding: Finding, split: str, part: DatasetSpec, spec: DatasetSpec) -> Finding:
    """Returns a finding about ``part``, whose place is relative to its folder, or the split if it is about all of it,
    for the data set that joins it."""
    path = part.source if finding.where == split else path_of(finding.where, part.root)
    return finding._replace(where=relative_name(path, spec.root))


def _with_names(index: DatasetIndex, names: Sequence[str]) -> DatasetIndex:
    """Returns the index with classes numbered as in ``names``. Classes that it lacks are ignored everywhere: each image
    gets a region of its size for each of them, after its boxes."""
    position_of = {name: i for i, name in enumerate(names)}
    number_of_class = np.array([*(position_of[name] for name in index.names), IGNORED], np.int32)  # last: that of -1
    missing = np.setdiff1d(np.arange(len(names), dtype=np.int32), number_of_class)
    image_of_region = np.repeat(np.arange(len(index)), len(missing))
    num_regions = len(image_of_region)
    sizes_wh = index.image_hw[image_of_region, ::-1].astype(np.float64)
    order = np.argsort(np.r_[index.image_of_box, image_of_region], kind="stable")
    return replace(
        index,
        offsets=index.offsets + len(missing) * np.arange(len(index) + 1),
        boxes_xywh_px=np.concatenate([index.boxes_xywh_px, np.c_[np.zeros_like(sizes_wh), sizes_wh]])[order],
        classes=np.r_[number_of_class[index.classes], np.tile(missing, len(index))][order],
        crowd=np.r_[index.crowd, np.ones(num_regions, bool)][order],
        area_px=np.r_[index.area_px, sizes_wh.prod(1)][order],
        repeated=np.r_[index.repeated, np.zeros(num_regions, bool)][order],
        line=np.r_[index.line, np.full(num_regions, -1, np.int32)][order],
    )
