"""Judges a split that has been read: whether it can be used at all, and what a user should be warned of."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import replace
from pathlib import Path

import numpy as np

from data.image_io.file_kinds import unread_summary
from data.index.index import DatasetIndex
from data.index.loaded import LoadedSplit
from data.labels.findings import ORPHAN, SECOND_LABEL, SHARED_LABEL, UNREAD_LABELS
from data.labels.ledger import refusal, warning
from data.labels.report import ScanReport
from data.source.dataset_spec import IGNORED, DatasetSpec
from data.source.files import Listing
from data.source.listing.images import unread_files
from utils.errors import look_alike
from utils.files.paths import path_of
from utils.logger import get_logger
from utils.strings import counted, listed

_BACKGROUND_CLASS = re.compile("_*back[-_ ]?ground_*", re.IGNORECASE)
_MAX_UNLABELED_FRACTION = 0.1  # if fewer images have no label file, no warning says so; COCO has 0.9 %


def warn_of_losses(loaded: LoadedSplit, spec: DatasetSpec, title: str) -> None:
    """Logs what was corrected, misread and lost, unless a check has warned of too much that is lost, and which files
    are unusual."""
    report = loaded.index.report
    logged_kinds: set[str] = set()
    if loaded.has_lost_too_much or _warn_of_labels(report, title):
        logged_kinds = {loss.kind for loss in report.ledger.main_losses}
    if loaded.listing is not None and loaded.has_labels:
        _warn_of_files(loaded.listing, spec, title, logged_kinds)


def _warn_of_files(listing: Listing, spec: DatasetSpec, title: str, logged_kinds: Container[str]) -> None:
    """Logs label files in unusual places, files that are not read, and missing label files. ``logged_kinds``: kinds of
    findings that have been logged as losses, which are not repeated."""
    if listing.unusual_labels:
        image, label = next(iter(listing.unusual_labels.items()))
        count = counted(len(listing.unusual_labels), "label file")
        if look_alike(Path(label).stem, Path(image).stem):
            label, image = ascii(label), ascii(image)
        get_logger().info("%s: %s with another name or folder than usual, first %s of %s", title, count, label, image)
    if listing.num_equal_views:
        message = "%s: %s left out, which symbolic links show under another name with the same labels"
        get_logger().info(message, title, counted(listing.num_equal_views, "image"))
    for kind in (ORPHAN, UNREAD_LABELS, SECOND_LABEL, SHARED_LABEL):
        findings = [finding for finding in listing.findings if finding.kind == kind]
        if findings and kind not in logged_kinds:
            first = findings[0]
            get_logger().warning("%s: %s: %d, first %s: %s", title, kind, len(findings), first.where, first.text)
    unread = unread_files(listing.findings)
    if unread:
        get_logger().warning("%s: %s", title, unread_summary(unread))
    missing = [file.name for file in listing.labels if file.stamp is None]
    if len(missing) > _MAX_UNLABELED_FRACTION * len(listing.labels):
        shown = listed([path_of(name, spec.root) for name in missing], 3)
        get_logger().warning(
            "%s: %d of %d images have no label file and are treated as backgrounds (expected %s); add empty label "
            "files to avoid this warning",
            title,
            len(missing),
            len(listing.labels),
            shown,
        )


def refusal_without_objects(index: DatasetIndex, first_label: str, spec: DatasetSpec, split: str) -> str:
    """Returns the message about a training split without objects, else ""; for other splits, warns. ``first_label``: a
    label file, if there is one."""
    if not index.crowd.all():
        return ""
    message = f"{spec.source}: '{split}' has {counted(len(index), 'image')} and no object"
    if spec.classes or spec.class_of:
        message += f" of the class {' or '.join(index.names[:5])}"
    if first_label:
        message += f" (first label file: {path_of(first_label, spec.root)})"
    if split == "train":
        return f"{message}; there is nothing to train on"
    message += "; nothing can be scored"
    if split == "val":
        message += ", and training writes no best.pt"
    get_logger().warning("%s", message)
    return ""


def warn_of_background_class(index: DatasetIndex, spec: DatasetSpec) -> None:
    """Warns of a class for the background, as other programs have it: here, background is what is in no box."""
    for number, name in enumerate(index.names):
        if not _BACKGROUND_CLASS.fullmatch(name):
            continue
        boxes = int(((index.classes == number) & ~index.crowd).sum())
        remedy = f"leave it out with 'ignore: [{name}]' in the YAML"
        if boxes:
            remedy = "its boxes are learned as objects; if they are none, leave it out with --classes or 'ignore:'"
        get_logger().warning(
            "%s: '%s' is one of the classes, with %s: what is in no box is background already; %s",
            spec.source,
            name,
            counted(boxes, "box"),
            remedy,
        )


def refusal_without_backgrounds(index: DatasetIndex, spec: DatasetSpec, split: str) -> str:
    """Returns the message about a class with objects that is ignored in all of every image, so that nothing is
    background for it; "" if there is none. This happens if each data set lacks one of the classes that are merged."""
    whole = (index.boxes_xywh_px[:, 2:] == index.image_hw[index.image_of_box, ::-1]).all(1)
    regions = index.with_boxes(index.crowd & whole & (index.classes != IGNORED))
    images = replace(regions, crowd=np.zeros_like(regions.crowd)).images_per_class(len(index.names))
    no_background = (images == len(index)) & (index.boxes_per_class(len(index.names)) > 0)
    if not no_background.any():
        return ""
    name = index.names[no_background.argmax()]
    return (
        f"{spec.source}: '{split}' has no image in which all objects of '{name}' are labeled: of the classes that are "
        "merged into it, each data set leaves one out; label them, or do not merge them ('classes:' or --single-cls)"
    )


def _warn_of_labels(report: ScanReport, title: str) -> bool:
    """Logs what was corrected, what is probably misread, and what is lost. Returns whether anything worth a warning
    is lost."""
    for note in report.notes:
        get_logger().info("%s: %s", title, note)
    for advice in report.advice:
        get_logger().warning("%s: %s", title, advice)
    lost = warning(report.ledger)
    if lost:
        get_logger().warning("%s: %s", title, lost)
    return bool(lost)


def refusal_for_losses(report: ScanReport, spec: DatasetSpec, split: str, max_bad: float, details: str) -> str:
    """Returns the message about labels and images that are not used; "" unless they are too many."""
    reason = refusal(report.ledger, max_bad)
    if not reason:
        return ""
    return f"{spec.source}: '{split}': {'; '.join((reason, *report.advice))}{details}"
