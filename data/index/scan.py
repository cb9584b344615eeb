"""Scans a split: reads all images and labels, checks them, and returns its index and all that was found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from data.image_io.decode import orientation_of
from data.index.advice import (
    advice_if_named_otherwise,
    check_names_fit,
    files_named_otherwise,
    is_label_file_doubtful,
    notes_on_labels,
    unlisted_images,
)
from data.index.index import DatasetIndex, select_arrays
from data.index.index_settings import IndexSettings
from data.index.outcomes import Outcomes, decide_outcomes
from data.index.read_images import ScannedImage, finding_of, read_images
from data.labels import findings as kinds
from data.labels.clean import CleanBoxes, clean_rows
from data.labels.findings import Finding
from data.labels.label_format import LabelRequest, LabelSource
from data.labels.ledger import Ledger
from data.labels.misread import beyond_images, ids_from_1, other_notation, too_dark
from data.labels.report import ScanReport
from data.labels.rows import CLASS
from data.labels.sizes import fit_to_images
from data.source.dataset_spec import DatasetSpec, class_names
from data.source.files import Listing
from utils.files.paths import path_of
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
    names = None if settings.single_cls else spec.names
    request = LabelRequest(listing.images, listing.labels, spec.root, names, listing.others)
    source = listing.label_format.read(request)
    images = read_images(spec, split, source, settings)
    image_hw = np.array([image.size_hw for image in images], np.int32)
    table, row_findings = _rows_for_sizes(images, image_hw, spec, source)
    named_otherwise = files_named_otherwise(source, images)

    unknown = [finding for finding in row_findings if finding.kind == kinds.UNKNOWN_CLASS]
    ids_advice = ids_from_1([finding.class_id for finding in unknown], table[:, CLASS], len(spec.names))
    box_advice = other_notation(table, image_hw, listing.label_format.notation, normalized=source.normalized)
    box_advice = box_advice or beyond_images(table, image_hw, normalized=source.normalized)
    boxes, problems = clean_rows(table, image_hw, source.normalized, is_misread=bool(box_advice))
    row_findings += [finding_of(source, image, problem) for image, problem in problems]
    num_labeled = [image.num_labeled or 0 for image in images]
    outcomes = decide_outcomes([*row_findings, *named_otherwise], boxes, source, num_labeled)
    num_lost = sum(finding.kind in kinds.ROW_LOST for finding in outcomes.findings)
    check_names_fit(unknown, len(boxes.image) + num_lost - len(unknown), spec, split, ids_advice)

    advice = [
        ids_advice,
        box_advice,
        too_dark(max(image.largest for image in images), spec.pixels.bits),
        advice_if_named_otherwise(named_otherwise, len(images)),
    ]
    notes = notes_on_labels(outcomes.findings, images)
    unlisted = unlisted_images(source, listing)
    if unlisted and is_label_file_doubtful(source, listing, spec, split):
        advice.append(f"{unlisted}: is it the label file of these images?")
    elif unlisted:
        notes.append(unlisted)

    misread = [Finding(split, kinds.MISREAD, text) for text in advice if text]
    findings = [*listing.findings, *source.findings, *misread, *outcomes.findings]
    index = _index_of_all(image_hw, boxes, outcomes, source, spec, names=class_names(spec, settings.single_cls))
    if not outcomes.is_used.all():
        index = index.take(np.flatnonzero(outcomes.is_used))
    ledger = Ledger.of(findings, used_images=len(index), used_objects=len(index.classes))
    index = replace(index, report=ScanReport.of(findings, ledger, notes))
    return ScannedSplit(index.recounted(), source, findings)


def _rows_for_sizes(
    images: Sequence[ScannedImage], image_hw: np.ndarray, spec: DatasetSpec, source: LabelSource
) -> tuple[np.ndarray, list[Finding]]:
    """Returns the rows of all images, float64 (R, 10), computed for the images' own sizes where the labels state other
    ones; and all findings so far."""
    table = np.concatenate([image.table for image in images])
    findings = [finding for image in images for finding in image.findings]
    stated_hw = {i: image.stated_hw for i, image in enumerate(images) if image.stated_hw}
    if not stated_hw:
        return table, findings

    def orientation(i: int) -> int:
        return orientation_of(path_of(source.images[i].name, spec.root))

    table, problems = fit_to_images(table, image_hw, stated_hw, orientation)
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
