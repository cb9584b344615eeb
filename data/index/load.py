"""Opens the index of a split, by `from_files`, `from_shards` or `joined`, and reports what is lost."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import replace
from pathlib import Path

import numpy as np

from data.image_io.file_kinds import unread_summary
from data.index.from_files import from_files
from data.index.index import DatasetIndex, Scan
from data.index.index_settings import IndexSettings
from data.index.joined import joined
from data.index.loaded import LoadedSplit, raise_or_warn, source_name
from data.index.selection import select_used
from data.index.sharded import from_shards
from data.labels.findings import ORPHAN, SECOND_LABEL, SHARED_LABEL, UNREAD_LABELS
from data.labels.ledger import refusal, warning
from data.labels.report import ScanReport
from data.source.dataset_spec import IGNORED, DatasetSpec
from data.source.files import Listing, shards_of
from data.source.listing.images import unread_files
from utils.errors import look_alike
from utils.files.paths import path_of
from utils.logger import get_logger
from utils.strings import counted, listed

_BACKGROUND = re.compile("_*back[-_ ]?ground_*", re.IGNORECASE)
MAX_UNLABELED = 0.1  # fraction of images without a label file that needs no warning; COCO has 0.9 %


def load_index(spec: DatasetSpec, split: str, settings: IndexSettings | None = None) -> DatasetIndex:
    """Opens the index of a split from its cache file, or scans the split and writes that file.

    Raises UserError: data is missing, there is no image, no label file or no object to train on, the names do not match
    the labels, or more than the fraction ``settings.max_bad`` of the labels or images is lost.
    """
    return _load(spec, split, settings or IndexSettings(), is_check=False).index


def scan_for_check(spec: DatasetSpec, split: str, settings: IndexSettings) -> tuple[DatasetIndex, tuple[Scan, ...]]:
    """Scans a split and decodes all of its images, without reading or writing a cache.

    Returns its index, and what has been scanned, in the order of the images. Problems of the split as a whole are
    warnings, except those that allow no index (UserError): missing data, no image, names that do not match the labels.
    """
    loaded = _load(spec, split, settings, is_check=True)
    return loaded.index, loaded.scans


def _load(spec: DatasetSpec, split: str, settings: IndexSettings, *, is_check: bool) -> LoadedSplit:
    """Reads a split as a run uses it. Refuses it if there is nothing to learn from."""
    loaded = _load_used(spec, split, settings, title=split, is_check=is_check)
    index = loaded.index
    if loaded.has_labels and not loaded.has_lost_too_much:  # else it has been refused, or a check has warned
        raise_or_warn(_without_objects(index, loaded.first_label, spec, split), is_check=is_check)
    if spec.split(_source_split(spec, split)).parts:
        raise_or_warn(_without_backgrounds(index, spec, split), is_check=is_check)
    source = source_name(spec, split, settings.single_cls, settings.fraction)
    return replace(loaded, index=replace(index, source=source))


def _source_split(spec: DatasetSpec, split: str) -> str:
    """Returns the split whose files have the images of ``split``, which may be held-out training images."""
    return "train" if spec.held_out and split == "val" else split


def _load_used(spec: DatasetSpec, split: str, settings: IndexSettings, *, title: str, is_check: bool) -> LoadedSplit:
    """Reads a split, judges and reports what is lost of all that was labeled, and only then selects what the run uses.
    ``title``: the split in log messages."""
    source_split = _source_split(spec, split)
    if spec.split(source_split).parts:
        return _load_joined(spec, split, settings, title=title, is_check=is_check)
    shards = shards_of(spec, source_split)
    if shards:
        loaded = from_shards(shards, spec, is_check=is_check)
    else:
        loaded = from_files(spec, source_split, settings, is_check=is_check)
    report_note = _report_note(loaded)
    too_much_lost = _too_much_lost(loaded.index.report, spec, source_split, settings.max_bad, report_note)
    raise_or_warn(too_much_lost, is_check=is_check)

    index = select_used(loaded.index, spec, split, settings)
    loaded = replace(loaded, index=index, has_lost_too_much=bool(too_much_lost))
    if not index.report.problems:  # as of a held-out part
        report_note = ""
    get_logger().info("%s: %s%s%s", title, index.report.summary(), loaded.note, report_note)
    if split == source_split:  # losses of a held-out part are reported with the training split
        _warn_of_losses(loaded, spec, title)
    if source_split == "train" and not is_check:  # a check reports the use of each class
        _warn_of_background_class(index, spec)
    return loaded


def _load_joined(spec: DatasetSpec, split: str, settings: IndexSettings, *, title: str, is_check: bool) -> LoadedSplit:
    """Reads the data sets that a split joins, and selects what the run uses of all of them. What is lost is judged part
    by part, as a small part may be of one kind; whether there are objects is not: a part may have backgrounds only."""
    source_split = _source_split(spec, split)
    part_settings = replace(settings, single_cls=False, fraction=1.0, repeats=True)
    loaded_parts = []
    for part in spec.split(source_split).parts:
        part_title = f"{source_split} of {part.source}"
        loaded_parts.append(_load_used(part, source_split, part_settings, title=part_title, is_check=is_check))
    loaded = joined(spec, source_split, loaded_parts)
    index = select_used(loaded.index, spec, split, settings)
    get_logger().info("%s: %s", title, index.report.summary())
    return replace(loaded, index=index)


def _report_note(loaded: LoadedSplit) -> str:
    """Returns where the report of the scan is, for messages; "" if there is none, or nothing in it."""
    path = loaded.report_path
    if path is None or not loaded.index.report.problems or not path.exists():
        return ""
    return f"; report: {path}"


def _warn_of_losses(loaded: LoadedSplit, spec: DatasetSpec, title: str) -> None:
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
    if listing.hidden:
        message = "%s: %s left out, which symbolic links show under another name with the same labels"
        get_logger().info(message, title, counted(listing.hidden, "image"))
    for kind in (ORPHAN, UNREAD_LABELS, SECOND_LABEL, SHARED_LABEL):
        findings = [finding for finding in listing.findings if finding.kind == kind]
        if findings and kind not in logged_kinds:
            first = findings[0]
            get_logger().warning("%s: %s: %d, first %s: %s", title, kind, len(findings), first.where, first.text)
    unread = unread_files(listing.findings)
    if unread:
        get_logger().warning("%s: %s", title, unread_summary(unread))
    missing = [file.name for file in listing.labels if file.stamp is None]
    if len(missing) > MAX_UNLABELED * len(listing.labels):
        shown = listed([path_of(name, spec.root) for name in missing], 3)
        get_logger().warning(
            "%s: %d of %d images have no label file and are treated as backgrounds (expected %s); add empty label "
            "files to avoid this warning",
            title,
            len(missing),
            len(listing.labels),
            shown,
        )


def _without_objects(index: DatasetIndex, first_label: str, spec: DatasetSpec, split: str) -> str:
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


def _warn_of_background_class(index: DatasetIndex, spec: DatasetSpec) -> None:
    """Warns of a class for the background, as other programs have it: here, background is what is in no box."""
    for number, name in enumerate(index.names):
        if not _BACKGROUND.fullmatch(name):
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


def _without_backgrounds(index: DatasetIndex, spec: DatasetSpec, split: str) -> str:
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


def _too_much_lost(report: ScanReport, spec: DatasetSpec, split: str, max_bad: float, details: str) -> str:
    """Returns the message about labels and images that are not used; "" unless they are too many."""
    reason = refusal(report.ledger, max_bad)
    if not reason:
        return ""
    return f"{spec.source}: '{split}': {'; '.join((reason, *report.advice))}{details}"
