"""Scans a split: reads all images and labels, checks them, and returns its index and all that was found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from data.index.advice import ScannedLabels, advice_on_scan, check_names_fit, files_named_otherwise, notes_on_scan
from data.index.index import DatasetIndex, select_arrays
from data.index.index_settings import IndexSettings
from data.index.outcomes import Outcomes, decide_outcomes
from data.index.read_images import ScannedImage, finding_of, read_images
from data.labels import findings as kinds
from data.labels.clean import CleanBoxes, clean_rows
from data.labels.findings import Finding
from data.labels.label_format import LabelRequest, LabelSource
from data.labels.ledger import Ledger
from data.labels.misread import misread_boxes
from data.labels.report import ScanReport
from data.labels.sizes import fit_to_images
from data.source.dataset_spec import DatasetSpec, class_names
from data.source.files import Listing
from utils.strings import FlatStrings


@dataclass(frozen=True, slots=True)
class ScannedSplit:
    """Holds what a scan returns."""

    index: DatasetIndex  # all usable images; its `origins` are known, of one `Scan`
    source: LabelSource
    findings: list[Finding]  # about all images


def scan_split(spec: DatasetSpec, split: str, listing: Listing, settings: IndexSettings) -> ScannedSplit:
    """Reads a listed split, with its images as in `read_images`. ``spec``: with the classes of the labels. Raises
    UserError if the labels do not match the names."""
    source = listing.label_format.read(_label_request(listing, spec, settings))
    images = read_images(spec, split, source, settings)
    image_hw = np.array([image.size_hw for image in images], np.int32)

    table, found = _rows_for_sizes(images, image_hw, source)
    box_advice = misread_boxes(table, image_hw, listing.label_format.notation, normalized=source.normalized)
    boxes, problems = clean_rows(table, image_hw, source.normalized, is_misread=bool(box_advice))
    found += [finding_of(source, image, problem) for image, problem in problems]
    found += files_named_otherwise(source, images)
    outcomes = decide_outcomes(found, boxes, source, num_labeled=[image.num_labeled or 0 for image in images])

    labels = ScannedLabels(listing, source, images, table, outcomes.findings)
    check_names_fit(labels, len(boxes.image), spec, split)
    advice = [Finding(split, kinds.MISREAD, message) for message in advice_on_scan(labels, box_advice, spec, split)]
    findings = [*listing.findings, *source.findings, *advice, *outcomes.findings]

    index = _index_of_all(image_hw, boxes, outcomes, source, spec, names=class_names(spec, settings.single_cls))
    if not outcomes.is_used.all():
        index = index.take(np.flatnonzero(outcomes.is_used))
    ledger = Ledger.of(findings, used_images=len(index), used_objects=len(index.classes))
    index = replace(index, report=ScanReport.of(findings, ledger, notes_on_scan(labels, spec, split)))
    return ScannedSplit(index.recounted(), source, findings)


def _label_request(listing: Listing, spec: DatasetSpec, settings: IndexSettings) -> LabelRequest:
    return LabelRequest(
        images=listing.images,
        files=listing.labels,
        root=spec.root,
        names=None if settings.single_cls else spec.names,
        others=listing.others,
    )


def _rows_for_sizes(
    images: Sequence[ScannedImage], image_hw: np.ndarray, source: LabelSource
) -> tuple[np.ndarray, list[Finding]]:
    """Returns the rows of all images, float64 (R, 10), computed for the images' own sizes where the labels state other
    ones; and all findings so far."""
    table = np.concatenate([image.table for image in images])
    findings = [finding for image in images for finding in image.findings]
    stated_hw = {i: image.stated_hw for i, image in enumerate(images) if image.stated_hw}
    if not stated_hw:
        return table, findings
    orientations = [image.orientation for image in images]
    table, problems = fit_to_images(table, image_hw, stated_hw, orientations)
    findings += [finding_of(source, image, problem) for image, problem in problems]
    return table, findings


def _index_of_all(
    image_hw: np.ndarray,
    boxes: CleanBoxes,
    outcomes: Outcomes,
    source: LabelSource,
    spec: DatasetSpec,
    *,
    names: tuple[str, ...],
) -> DatasetIndex:
    """Returns the index of all N images of ``source``, including those that are not used, with an empty report."""
    count = len(source.images)
    boxes_per_image = np.bincount(boxes.image, minlength=count)
    arrays = boxes._asdict() | {
        "image_hw": image_hw,
        "incomplete": outcomes.is_incomplete,
        "offsets": np.concatenate([[0], np.cumsum(boxes_per_image)]).astype(np.int64),
    }
    image_ids = source.image_ids
    return DatasetIndex(
        names=names,
        root=spec.root,
        paths=FlatStrings.of(image.name for image in source.images),
        **select_arrays(arrays),
        report=ScanReport.of(()),
        image_ids=None if image_ids is None else FlatStrings.of(map(json.dumps, image_ids)),
        category_ids=source.category_ids,
        origins=np.column_stack([np.zeros(count, np.int64), np.arange(count)]),
    )
