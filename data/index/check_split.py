"""Checks that a split can be used, and raises UserError if it cannot."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from data.index.full_split import FullSplit, LoadedSplit
from data.index.index_settings import IndexSettings
from data.labels.ledger import refusal_message
from data.source.dataset_spec import IGNORED, DatasetSpec
from utils.errors import UserError
from utils.files.paths import path_of
from utils.logger import get_logger
from utils.strings import counted


def check_losses(full: FullSplit, spec: DatasetSpec, split: str, max_bad: float) -> None:
    """Raises UserError if more than the fraction ``max_bad`` of the labels or images is lost, or no image is left."""
    report = full.index.report
    reason = refusal_message(report.ledger, max_bad)
    if reason:
        raise UserError(f"{spec.source}: '{split}': {'; '.join((reason, *report.advice))}{full.report_note()}")


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
    if full.first_label:
        message += f" (first label file: {path_of(full.first_label, spec.root)})"
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
