"""Joins several data sets into one split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from data.findings import ScanReport
from data.flat_strings import FlatStrings
from data.index import DatasetIndex, LoadedSplit, concatenated, digest_of, ids_of_classes
from data.spec import IGNORED, DatasetSpec
from utils.files.paths import path_of, relative_name


def join_parts(spec: DatasetSpec, parts: Sequence[LoadedSplit]) -> DatasetIndex:
    """Joins the used parts of the data sets that a split joins. A class that a data set does not label is ignored in
    its images. A single data set, extended for a model with more classes, keeps its ids and digests."""
    names = spec.with_label_classes().names
    indexes = []
    for part in parts:
        index = _with_names(part.used, names)
        if index.root != spec.root:
            paths = FlatStrings.of(relative_name(index.path(i), spec.root) for i in range(len(index)))
            index = replace(index, root=spec.root, paths=paths)
        indexes.append(index)
    if len(indexes) > 1:
        index = DatasetIndex(
            names=indexes[0].names,
            root=spec.root,
            paths=FlatStrings.of(path for index in indexes for path in index.paths),
            **concatenated(indexes),
            report=ScanReport.of(()),
            image_files=digest_of([index.image_files for index in indexes]),
            pixels=spec.pixels,
        )
    findings = [
        finding._replace(
            where=relative_name(path_of(finding.where, part.spec.root), spec.root),
            image_name=finding.image_name and relative_name(path_of(finding.image_name, part.spec.root), spec.root),
        )
        for part in parts
        for finding in part.used.report.findings
    ]
    reports = [part.used.report for part in parts]
    used_images = sum(report.used_images for report in reports)
    used_objects = sum(report.used_objects for report in reports)
    return replace(index, report=ScanReport.of(findings, used_images, used_objects))


def _with_names(index: DatasetIndex, names: Sequence[str]) -> DatasetIndex:
    """Returns the index with classes numbered as in ``names``. For each class that it lacks, each image gets a crowd
    region of its size after its boxes, in which the class is ignored."""
    position_of = {name: i for i, name in enumerate(names)}
    # The last entry is that of the class -1, which stays.
    number_of_class = np.array([*(position_of[name] for name in index.names), IGNORED], np.int32)
    id_of_category = {**index.id_of_category, **dict(zip(index.names, index.category_ids))}
    missing = np.setdiff1d(np.arange(len(names), dtype=np.int32), number_of_class)
    image_of_region = np.repeat(np.arange(len(index)), len(missing))
    num_regions = len(image_of_region)
    sizes_wh = index.image_hw[image_of_region, ::-1].astype(np.float64)
    order = np.argsort(np.r_[index.image_of_box, image_of_region], kind="stable")
    return replace(
        index,
        names=tuple(names),
        category_ids=ids_of_classes(id_of_category, names) if index.id_of_category else (),
        offsets=index.offsets + len(missing) * np.arange(len(index) + 1),
        boxes_xywh_px=np.concatenate([index.boxes_xywh_px, np.c_[np.zeros_like(sizes_wh), sizes_wh]])[order],
        classes=np.r_[number_of_class[index.classes], np.tile(missing, len(index))][order],
        crowd=np.r_[index.crowd, np.ones(num_regions, bool)][order],
        area_px=np.r_[index.area_px, sizes_wh.prod(1)][order],
        repeated=np.r_[index.repeated, np.zeros(num_regions, bool)][order],
        row_number=np.r_[index.row_number, np.full(num_regions, -1, np.int32)][order],
    )
