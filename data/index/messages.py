"""Checks that a split can be used, raising UserError if it cannot, and logs what was found in it. Reads no files."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from data.dataset.spec import IGNORED, DatasetSpec
from data.index.full_split import FullSplit, LoadedSplit
from data.index.index_settings import IndexSettings
from data.listing.listing import Listing
from utils.errors import UserError
from utils.files.paths import path_of
from utils.logger import get_logger
from utils.strings import counted, listed


def check_labels(listing: Listing, spec: DatasetSpec, split: str) -> None:
    """Raises UserError if no image of a split has a label file."""
    if (listing.label_stamps[:, 0] < 0).all():
        raise UserError(
            f"{spec.source}: none of the {counted(len(listing.images), 'image')} of '{split}' has a label file; "
            f"expected {path_of(listing.labels[0], spec.root)} for {path_of(listing.images[0], spec.root)}"
        )


def check_losses(full: FullSplit, spec: DatasetSpec, split: str, max_bad: float) -> None:
    """Raises UserError if more than the fraction ``max_bad`` of the labels or images is lost, or no image is left."""
    report = full.index.report
    if report.has_lost_too_much(max_bad):
        advice = f"; {report.advice}" if report.advice else ""
        reason = f"{report.loss_summary()} (--max-bad is {max_bad:g})"
        raise UserError(f"{spec.source}: '{split}': {reason}{advice}{full.report_note()}")


def check_objects(loaded: LoadedSplit, settings: IndexSettings) -> None:
    """Raises UserError if a training split has no object. Logs a warning if another split has none, unless the split
    is read for a check, which makes it an issue."""
    message = objects_problem(loaded, settings)
    if not message:
        return
    if loaded.split == "train":
        raise UserError(f"{message}; there is nothing to train on")
    if not settings.is_check:
        consequence = ", and training writes no best.pt" if loaded.split == "val" else ""
        get_logger().warning("%s; nothing can be scored%s", message, consequence)


def objects_problem(loaded: LoadedSplit, settings: IndexSettings) -> str:
    """Returns a message if a split has no object, and "" if it has, or if its losses or missing labels were already
    reported."""
    full = loaded.full
    index = loaded.used
    if not index.crowd.all() or not full.has_labels or full.has_lost_too_much(settings.max_bad):
        return ""
    spec = loaded.spec
    message = f"{spec.source}: '{loaded.split}' has {counted(len(index), 'image')} and no object"
    if spec.classes or spec.class_of:
        message += f" of the class {' or '.join(index.names[:5])}"
    return message


def check_backgrounds(loaded: LoadedSplit) -> None:
    """Raises UserError if a class with objects is ignored in the whole area of every image, so that it has no
    background. This happens if each of the joined data sets lacks one of the merged classes."""
    if not loaded.full.parts:
        return
    index = loaded.used
    num_classes = len(index.names)
    is_whole_image = (index.boxes_xywh_px[:, 2:] == index.image_hw[index.image_of_box, ::-1]).all(1)
    regions = index.with_boxes(index.crowd & is_whole_image & (index.classes != IGNORED))
    images_with_region = replace(regions, crowd=np.zeros_like(regions.crowd)).images_per_class(num_classes)
    has_no_background = (images_with_region == len(index)) & (index.boxes_per_class(num_classes) > 0)
    if not has_no_background.any():
        return
    name = index.names[has_no_background.argmax()]
    raise UserError(
        f"{loaded.spec.source}: '{loaded.split}' has no image in which all objects of '{name}' are labeled: each data "
        "set lacks one of the classes that are merged into it; label them, or do not merge them ('classes:' or "
        "--single-cls)"
    )


def log_split(loaded: LoadedSplit, settings: IndexSettings, *, title: str) -> None:
    """Logs a line about the images and boxes that are used, and one about each kind of finding. ``title``: the split in
    log messages.

    For a held-out part, only the first line is logged, because the training split reports the rest.
    """
    full = loaded.full
    if full.parts and not loaded.is_held_out:
        for part in full.parts:
            log_split(part, settings, title=f"{part.split} of {part.spec.source}")
        _log_joining(loaded)
    get_logger().info("%s: %s%s%s", title, loaded.used.summary(), full.note, full.report_note())
    if full.parts or loaded.is_held_out or full.has_lost_too_much(settings.max_bad):  # which is refused
        return
    for level, line in full.index.report.lines():
        get_logger().log(level, "%s: %s", title, line)


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
