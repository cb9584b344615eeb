"""Joins several data sets to one split."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from data.index.full_split import FullSplit, LoadedSplit
from data.index.index import DatasetIndex, concatenated, digest_of
from data.labels.findings import Finding
from data.labels.ledger import Ledger
from data.labels.report import FindingTable, ScanReport
from data.source.dataset_spec import IGNORED, DatasetSpec
from utils.files.paths import path_of, relative_name
from utils.strings import FlatStrings, class_key


def join_parts(spec: DatasetSpec, split: str, parts: Sequence[LoadedSplit]) -> FullSplit:
    """Joins what is used of the data sets that a split joins. A class that one of them does not label is ignored in its
    images."""
    names = spec.as_labeled().names
    indexes = [part.used for part in parts]
    paths = (index.path(i) for index in indexes for i in range(len(index)))
    index = DatasetIndex(
        names=names,
        root=spec.root,
        paths=FlatStrings.of(relative_name(path, spec.root) for path in paths),
        **concatenated([_with_names(index, names) for index in indexes]),
        report=_joined_report(parts, spec, split),
        fingerprint=digest_of([index.fingerprint for index in indexes], names),
        image_files=_one_digest([index.image_files for index in indexes]),
        selection=_one_digest([index.selection for index in indexes]),
        pixels=spec.pixels,
        origins=_origins(parts),
        image_ids=indexes[0].image_ids if len(indexes) == 1 else None,
        category_ids=_category_ids(indexes, names),
    )
    scans = tuple(scan for part in parts for scan in part.full.scans)
    return FullSplit(index.recounted(), scans=scans, parts=tuple(parts))


def _joined_report(parts: Sequence[LoadedSplit], spec: DatasetSpec, split: str) -> ScanReport:
    """Returns the sums and the findings of the parts' reports."""
    totals: Counter[str] = Counter()
    findings = []
    for part in parts:
        report = part.used.report
        totals += Counter(report.totals)
        findings += [_finding_of_part(finding, split, part.spec, spec) for finding in report.findings]
    ledger = Ledger.joined([part.used.report.ledger for part in parts])
    return ScanReport(dict(totals), FindingTable.of(findings), ledger)


def _category_ids(indexes: Sequence[DatasetIndex], names: Sequence[str]) -> tuple[int, ...]:
    """Returns the category ids of the classes ``names``: those of a single COCO JSON, also of its categories
    that the data set does not use; a class that it does not have gets a free one. Returns none for several data sets,
    whose ids may contradict each other."""
    if len(indexes) > 1 or indexes[0].image_ids is None:
        return ()
    (index,) = indexes
    free_ids = itertools.count(max([*index.unused_category_ids.values(), *index.category_ids], default=-1) + 1)
    id_of_class = dict(zip(index.names, index.category_ids))
    unused_id_of = {class_key(name): i for name, i in index.unused_category_ids.items()}
    for name in names:
        if name not in id_of_class:
            unused_id = unused_id_of.pop(class_key(name), None)
            id_of_class[name] = next(free_ids) if unused_id is None else unused_id
    return tuple(id_of_class[name] for name in names)


def _one_digest(digests: Sequence[str]) -> str:
    """Returns a digest of the parts' ``digests``: that of a single part itself, so that it shares its caches."""
    return digests[0] if len(digests) == 1 else digest_of(digests)


def _origins(parts: Sequence[LoadedSplit]) -> np.ndarray | None:
    """Returns the origins of all images, whose scans follow each other; None if they are not known."""
    origins = []
    num_scans = 0
    for part in parts:
        if part.used.origins is None:
            return None
        origins.append(np.add(part.used.origins, [num_scans, 0]))
        num_scans += len(part.full.scans)
    return np.concatenate(origins)


def _finding_of_part(finding: Finding, split: str, part: DatasetSpec, spec: DatasetSpec) -> Finding:
    """Returns a finding about ``part``, whose place is relative to its folder, or the split if it is about all of it,
    for the data set that joins it."""
    path = part.source if finding.where == split else path_of(finding.where, part.root)
    return finding._replace(where=relative_name(path, spec.root))


def _with_names(index: DatasetIndex, names: Sequence[str]) -> DatasetIndex:
    """Returns the index with classes numbered as in ``names``. Classes that it lacks are ignored everywhere."""
    position_of = {name: i for i, name in enumerate(names)}
    number_of_class = np.array([*(position_of[name] for name in index.names), IGNORED], np.int32)  # last: that of -1
    missing = np.setdiff1d(np.arange(len(names), dtype=np.int32), number_of_class)
    return _with_ignored_classes(replace(index, classes=number_of_class[index.classes]), missing)


def _with_ignored_classes(index: DatasetIndex, classes: np.ndarray) -> DatasetIndex:
    """Returns the index with a region, as large as the image, for each of ``classes``, int32 (k,), in each image. It
    comes after the image's boxes."""
    image_of_region = np.repeat(np.arange(len(index)), len(classes))
    num_regions = len(image_of_region)
    sizes_wh = index.image_hw[image_of_region, ::-1].astype(np.float64)
    order = np.argsort(np.r_[index.image_of_box, image_of_region], kind="stable")
    return replace(
        index,
        offsets=index.offsets + len(classes) * np.arange(len(index) + 1),
        boxes_xywh_px=np.concatenate([index.boxes_xywh_px, np.c_[np.zeros_like(sizes_wh), sizes_wh]])[order],
        classes=np.r_[index.classes, np.tile(classes, len(index))][order],
        crowd=np.r_[index.crowd, np.ones(num_regions, bool)][order],
        area_px=np.r_[index.area_px, sizes_wh.prod(1)][order],
        repeated=np.r_[index.repeated, np.zeros(num_regions, bool)][order],
        line=np.r_[index.line, np.full(num_regions, -1, np.int32)][order],
    )
