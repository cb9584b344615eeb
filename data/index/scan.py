"""Scans a split: reads all images and labels, checks them, and returns the index and all findings."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from data.flat_strings import FlatStrings
from data.index.advice import advice_on_scan, check_names_fit, files_named_otherwise, notes_on_scan
from data.index.index import DatasetIndex, origins_of_scan, select_arrays
from data.index.index_settings import IndexSettings
from data.index.outcomes import Outcomes, decide_outcomes
from data.index.read_images import SplitContent, finding_of, read_images
from data.labels import findings as kinds
from data.labels.categories import id_of_merged_class, ids_of_classes
from data.labels.clean import CleanBoxes, clean_rows
from data.labels.findings import Finding
from data.labels.label_format import LabelRequest, LabelSource
from data.labels.ledger import Ledger
from data.labels.misread import misread_boxes
from data.labels.report import ScanReport
from data.labels.sizes import fit_to_images
from data.source.dataset_spec import DatasetSpec, class_names
from data.source.listing.listing import Listing


@dataclass(frozen=True, slots=True)
class ScanResult:
    """Result of a scan."""

    index: DatasetIndex  # all usable images, with the `origins` of one scan
    source: LabelSource
    findings: list[Finding]  # about all images


class _CleanedRows(NamedTuple):
    """The usable rows of a split."""

    boxes: CleanBoxes
    box_advice: str  # see `misread_boxes`
    findings: list[Finding]  # about rows that are left out, changed or repeated


def scan_split(spec: DatasetSpec, split: str, listing: Listing, settings: IndexSettings) -> ScanResult:
    """Reads a listed split, decoding images as `read_images` does. ``spec``: with the classes of the labels. Raises
    UserError if the labels do not match the names."""
    content = _read_split(spec, split, listing, settings)
    cleaned = _clean_split(content)
    num_labeled = [image.num_labeled or 0 for image in content.images]
    outcomes = decide_outcomes(content.findings + cleaned.findings, cleaned.boxes, content.source, num_labeled)

    decided = replace(content, findings=outcomes.findings)  # with those about cleaned rows, each with its losses
    check_names_fit(decided, len(cleaned.boxes.image), spec, split)
    messages = advice_on_scan(decided, cleaned.box_advice, spec)
    advice = [Finding(split, kinds.MISREAD, message) for message in messages]
    findings = [*listing.findings, *content.source.findings, *advice, *outcomes.findings]

    index = _index_of_all(content, cleaned.boxes, outcomes, spec, single_cls=settings.single_cls)
    if not outcomes.is_used.all():
        index = index.take(np.flatnonzero(outcomes.is_used))
    ledger = Ledger.of(findings, used_images=len(index), used_objects=len(index.classes))
    index = replace(index, report=ScanReport.of(findings, ledger, notes_on_scan(decided)))
    return ScanResult(index.recounted(), content.source, findings)


def _read_split(spec: DatasetSpec, split: str, listing: Listing, settings: IndexSettings) -> SplitContent:
    """Reads all images and labels. Labels made for another size of their image are converted to its actual size."""
    source = listing.label_format.read(_label_request(listing, spec, settings))
    images = read_images(spec, split, source, settings)
    image_hw = np.array([image.size_hw for image in images], np.int32)
    table = np.concatenate([image.table for image in images])
    findings = [finding for image in images for finding in image.findings]
    stated_hw = {i: image.stated_hw for i, image in enumerate(images) if image.stated_hw}
    if stated_hw:
        orientations = [image.orientation for image in images]
        fitted = fit_to_images(table, image_hw, stated_hw, orientations)
        table = fitted.table
        findings = [finding._replace(xyxy_px=fitted.in_image(finding.image, finding.xyxy_px)) for finding in findings]
        findings += [finding_of(source, image, problem) for image, problem in fitted.problems]
    findings += files_named_otherwise(source, images)
    return SplitContent(
        listing=listing, source=source, images=images, image_hw=image_hw, table=table, findings=findings
    )


def _clean_split(content: SplitContent) -> _CleanedRows:
    """Checks the rows of all images."""
    normalized = content.source.normalized
    notation = content.listing.label_format.notation
    box_advice = misread_boxes(content.table, content.image_hw, notation, normalized=normalized)
    boxes, problems = clean_rows(content.table, content.image_hw, normalized, is_misread=bool(box_advice))
    findings = [finding_of(content.source, image, problem) for image, problem in problems]
    return _CleanedRows(boxes, box_advice, findings)


def _label_request(listing: Listing, spec: DatasetSpec, settings: IndexSettings) -> LabelRequest:
    return LabelRequest(
        images=listing.images,
        files=listing.labels,
        root=spec.root,
        names=None if settings.single_cls else spec.names,
        others=listing.others,
        aliases=listing.aliases,
    )


def _index_of_all(
    content: SplitContent, boxes: CleanBoxes, outcomes: Outcomes, spec: DatasetSpec, *, single_cls: bool
) -> DatasetIndex:
    """Returns the index of all N images, including unused ones, with an empty report."""
    source = content.source
    count = len(source.images)
    boxes_per_image = np.bincount(boxes.image, minlength=count)
    arrays = boxes._asdict() | {
        "image_hw": content.image_hw,
        "incomplete": outcomes.is_incomplete,
        "offsets": np.concatenate([[0], np.cumsum(boxes_per_image)]).astype(np.int64),
    }
    image_ids = source.image_ids
    return DatasetIndex(
        names=class_names(spec, single_cls),
        root=spec.root,
        paths=FlatStrings.of(image.name for image in source.images),
        **select_arrays(arrays),
        report=ScanReport.of(()),
        image_ids=None if image_ids is None else FlatStrings.of(map(json.dumps, image_ids)),
        categories=source.categories,
        category_ids=_ids_as_labeled(source, spec, single_cls=single_cls),
        origins=origins_of_scan(count),
    )


def _ids_as_labeled(source: LabelSource, spec: DatasetSpec, *, single_cls: bool) -> tuple[int, ...]:
    """Returns `DatasetIndex.category_ids` for a split with the classes of the labels, or with all merged into one."""
    if not source.categories:
        return ()
    ids = ids_of_classes(source.categories, spec.names)
    if not single_cls:
        return ids
    file_ids = [category.id for category in source.categories]
    has_other_classes = set(ids).isdisjoint(file_ids)  # all objects are of the one class, whatever they are called
    return (id_of_merged_class(source.categories, file_ids if has_other_classes else ids),)
