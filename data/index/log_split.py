"""Logs a summary of a split that has been read: counts, corrected and lost labels, and unusual files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container
from pathlib import Path

from data.index.full_split import LoadedSplit
from data.index.index import DatasetIndex
from data.index.index_settings import IndexSettings
from data.labels.findings import LABELED_PER_NAME, NO_LABEL, ORPHAN, SECOND_LABEL, SHARED_LABEL, UNREAD_LABELS
from data.labels.ledger import loss_warning
from data.labels.report import ScanReport
from data.source.dataset_spec import DatasetSpec
from data.source.listing.images import unread_files
from data.source.listing.listing import Listing
from utils.files.paths import path_of
from utils.logger import get_logger
from utils.strings import counted, listed, look_alike

_BACKGROUND_CLASS = re.compile("_*back[-_ ]?ground_*", re.IGNORECASE)
_MAX_UNLABELED_FRACTION = 0.1  # of the images; above this, a warning is logged; COCO has 0.9 %


def log_split(loaded: LoadedSplit, settings: IndexSettings, *, title: str) -> None:
    """Logs a line about the images and boxes that are used, and warnings. ``title``: the split in log messages.

    For a held-out part, only the line is logged, because the training split reports the rest.
    """
    full = loaded.full
    report = loaded.used.report
    if full.parts and not loaded.is_held_out:
        for part in full.parts:
            log_split(part, settings, title=f"{part.split} of {part.spec.source}")
        _log_joining(loaded)
    report_note = full.report_note() if report.problems else ""
    get_logger().info("%s: %s%s%s", title, report.summary(), full.note, report_note)
    if full.parts or loaded.is_held_out:
        return
    _log_losses(loaded, settings.max_bad, title)
    if loaded.split == "train" and not settings.is_check:  # which reports the use of each class
        _warn_about_background_class(loaded.used, loaded.spec)


def _log_joining(loaded: LoadedSplit) -> None:
    """Logs the classes that each joined data set does not label, and whether ids are dropped. Warns about images that
    several data sets share."""
    names = loaded.spec.as_labeled().names
    parts = loaded.full.parts
    for part in parts:
        unlabeled = [name for name in names if name not in part.used.names]
        if unlabeled:
            message = "%s: %s does not label %s: ignored in its images"
            get_logger().info(message, loaded.split, part.spec.source, listed(unlabeled, 5))
    if len(parts) > 1 and any(part.used.image_ids is not None for part in parts):
        message = "%s: ids of joined COCO JSONs are not kept; results have file names and class numbers"
        get_logger().info(message, loaded.split)
    paths = Counter(part.used.path(i) for part in parts for i in range(len(part.used)))
    num_repeated = paths.total() - len(paths)
    if num_repeated:
        message = "%s: data sets that %s joins share %s, which count more than once"
        get_logger().warning(message, loaded.split, loaded.spec.source, counted(num_repeated, "image"))


def _log_losses(loaded: LoadedSplit, max_bad: float, title: str) -> None:
    """Logs corrected, misread and lost labels, and unusual files. Misread and lost labels are not logged if too much is
    lost, because the refusal names them."""
    full = loaded.full
    report = full.index.report
    for note in report.notes:
        get_logger().info("%s: %s", title, note)
    has_logged_losses = full.has_lost_too_much(max_bad) or _warn_about_labels(report, title)
    logged_kinds = {loss.kind for loss in report.ledger.main_losses} if has_logged_losses else set()
    if full.listing is not None and full.has_labels:
        _warn_about_files(full.listing, title, logged_kinds)
        _warn_about_missing_labels(full.index, title)


def _warn_about_labels(report: ScanReport, title: str) -> bool:
    """Logs labels that are probably misread, and losses. Returns whether losses were large enough for a warning."""
    for advice in report.advice:
        get_logger().warning("%s: %s", title, advice)
    lost = loss_warning(report.ledger)
    if lost:
        get_logger().warning("%s: %s", title, lost)
    return bool(lost)


def _warn_about_files(listing: Listing, title: str, logged_kinds: Container[str]) -> None:
    """Logs label files in unusual folders, and files that are not read. ``logged_kinds``: kinds of findings already
    logged as losses, which are not repeated."""
    if listing.unusual_labels:
        image, label = next(iter(listing.unusual_labels.items()))
        count = counted(len(listing.unusual_labels), "label file")
        if look_alike(Path(label).stem, Path(image).stem):
            label, image = ascii(label), ascii(image)
        get_logger().info("%s: %s with an unexpected name or folder, first %s of %s", title, count, label, image)
    if listing.num_aliases:
        message = "%s: symbolic links give images %s; each image is used once per label file"
        get_logger().info(message, title, counted(listing.num_aliases, "further name"))
    for kind in (ORPHAN, UNREAD_LABELS, SECOND_LABEL, LABELED_PER_NAME, SHARED_LABEL):
        findings = [finding for finding in listing.findings if finding.kind == kind]
        if findings and kind not in logged_kinds:
            first = findings[0]
            get_logger().warning("%s: %s: %d, first %s: %s", title, kind, len(findings), first.where, first.text)
    unread = unread_files(listing.findings)
    if unread:
        get_logger().warning("%s: %s left out, first %s", title, counted(len(unread), "file"), unread[0])


def _warn_about_missing_labels(index: DatasetIndex, title: str) -> None:
    """Warns if many of the usable images have no label file. ``index``: of all usable images."""
    count = index.report.totals.get(NO_LABEL, 0)
    if count <= _MAX_UNLABELED_FRACTION * len(index):
        return
    paths = [path_of(finding.where, index.root) for finding in index.report.findings if finding.kind == NO_LABEL]
    get_logger().warning(
        "%s: %d of %d images have no label file and are treated as backgrounds (expected %s); add empty label files to "
        "avoid this warning",
        title,
        count,
        len(index),
        listed(paths, 3),
    )


def _warn_about_background_class(index: DatasetIndex, spec: DatasetSpec) -> None:
    """Warns about a background class, as used by other programs: here, everything outside boxes is background."""
    for number, name in enumerate(index.names):
        if not _BACKGROUND_CLASS.fullmatch(name):
            continue
        boxes = int(((index.classes == number) & ~index.crowd).sum())
        remedy = f"leave it out with 'ignore: [{name}]' in the YAML"
        if boxes:
            remedy = "its boxes are learned as objects; if they are not, leave it out with --classes or 'ignore:'"
        get_logger().warning(
            "%s: '%s' is one of the classes, with %s: everything outside boxes is background already; %s",
            spec.source,
            name,
            counted(boxes, "box"),
            remedy,
        )
