"""Says why a run refuses a split, and logs what was found in it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from data.dataset.spec import IGNORED, DatasetSpec
from data.index.index import DatasetIndex, LoadedSplit
from data.index.store import report_file
from utils.files.paths import path_of
from utils.logger import get_logger
from utils.strings import counted, listed


def problems(loaded: LoadedSplit, max_bad: float) -> list[str]:
    """Returns the messages with which a run refuses a split; none if it can be used.

    Joined data sets are judged one by one, because a loss that is small overall may be all of a small data set.
    """
    found: list[str] = []
    for part in loaded.parts or (loaded,):
        report = part.full.report
        if report.has_lost_too_much(max_bad):
            reason = f"{report.loss_summary()} (--max-bad is {max_bad:g}){_report_note(part)}"
            split = "train" if part.spec.is_held_out(part.split) else part.split
            found.append(f"{part.spec.source}: '{split}': {reason}")
    without_object = no_object(loaded)
    if not found and loaded.split == "train" and without_object:
        found.append(f"{without_object}; there is nothing to train on")
    name = _class_without_background(loaded.used) if loaded.parts else ""
    if name:
        found.append(
            f"{loaded.spec.source}: '{loaded.split}' has no image in which all objects of '{name}' are labeled: each "
            "data set lacks one of the classes that are merged into it; label them, or do not merge them ('classes:' "
            "or --single-cls)"
        )
    return found


def no_object(loaded: LoadedSplit) -> str:
    """Returns a message if a split has no object, else ""."""
    index = loaded.used
    if not index.crowd.all():
        return ""
    message = f"{loaded.spec.source}: '{loaded.split}' has {counted(len(index), 'image')} and no object"
    if loaded.spec.classes or loaded.spec.class_of:
        message += f" of the class {' or '.join(index.names[:5])}"
    return message


def warn_about_no_object(loaded: LoadedSplit) -> None:
    """Warns if a split has no object."""
    message = no_object(loaded)
    if message:
        consequence = ", and training writes no best.pt" if loaded.split == "val" else ""
        get_logger().warning("%s; nothing can be scored%s", message, consequence)


def _class_without_background(index: DatasetIndex) -> str:
    """Returns the name of a class with objects that is ignored in the whole area of every image, else "". Each of the
    joined data sets then lacks one of the merged classes."""
    num_classes = len(index.names)
    is_whole_image = (index.boxes_xywh_px[:, 2:] == index.image_hw[index.image_of_box, ::-1]).all(1)
    regions = index.with_boxes(index.crowd & is_whole_image & (index.classes != IGNORED))
    images_with_region = replace(regions, crowd=np.zeros_like(regions.crowd)).images_per_class(num_classes)
    has_no_background = (images_with_region == len(index)) & (index.boxes_per_class(num_classes) > 0)
    return index.names[has_no_background.argmax()] if has_no_background.any() else ""


def log_split(loaded: LoadedSplit, *, title: str) -> None:
    """Logs a line about the images and boxes that are used, and one about each kind of finding. ``title``: the split in
    log messages.

    For the parts of a split that is divided, only the first line is logged: the scan that divides it logs the rest.
    """
    is_divided = bool(loaded.spec.held_out)
    if loaded.parts and not is_divided:
        for part in loaded.parts:
            log_split(part, title=f"{part.split} of {part.spec.source}")
        _log_joining(loaded)
    get_logger().info("%s: %s%s%s", title, loaded.used.summary(loaded.split), loaded.note, _report_note(loaded))
    if not loaded.parts and not is_divided:
        for level, line in loaded.full.report.lines():
            get_logger().log(level, "%s: %s", title, line)


def _report_note(loaded: LoadedSplit) -> str:
    """Returns the path of the file that lists the findings, for messages, or "" if there is none."""
    report = report_file(loaded.cache_file) if loaded.cache_file else None
    return f"; report: {report}" if report and report.exists() else ""


def _log_joining(loaded: LoadedSplit) -> None:
    """Logs the classes that each joined data set does not label, and whether ids are dropped. Warns about images that
    several data sets share."""
    names = loaded.spec.as_labeled().names
    for part in loaded.parts:
        unlabeled = [name for name in names if name not in part.used.names]
        if unlabeled:
            message = "%s: %s does not label %s: ignored in its images"
            get_logger().info(message, loaded.split, part.spec.source, listed(unlabeled, 5))
    if len(loaded.parts) > 1 and any(part.used.image_ids is not None for part in loaded.parts):
        message = "%s: ids of joined COCO JSONs are not kept; results have file names and class numbers"
        get_logger().info(message, loaded.split)
    paths = Counter(part.used.path(i) for part in loaded.parts for i in range(len(part.used)))
    num_repeated = paths.total() - len(paths)
    if num_repeated:
        message = "%s: data sets that %s joins share %s, which count more than once"
        get_logger().warning(message, loaded.split, loaded.spec.source, counted(num_repeated, "image"))


def warn_about_shared_images(spec: DatasetSpec, train: DatasetIndex, val: DatasetIndex) -> None:
    """Warns about images that are in both splits."""
    if spec.held_out:
        return
    val_paths = set(real_paths(val))
    shared = len(val_paths.intersection(real_paths(train)))
    if shared:
        count = f"{shared:,}" if shared < len(val_paths) else "all"
        message = "%s: %s of the %s validation images are also training images; scores say little about other images"
        get_logger().warning(message, spec.source, count, f"{len(val_paths):,}")


def warn_about_unused_classes(train: DatasetIndex) -> None:
    """Warns about classes of which the training split has no object, unless no image says anything about them, such as
    about the old classes of --keep-old."""
    boxes = train.boxes_per_class(len(train.names)).tolist()
    ignored = train.names_ignored_everywhere()
    unused = [name for name, count in zip(train.names, boxes) if not count and name not in ignored]
    if unused:
        count = f"{len(unused)} of {counted(len(train.names), 'class')}"
        get_logger().warning("train: no object of %s, which cannot be learned: %s", count, listed(unused, 5))


def real_paths(index: DatasetIndex) -> Iterator[str]:
    """Yields the path of each image, following symbolic links to folders but not to images."""
    real_folders: dict[str, str] = {}
    for path in index.paths:
        folder, _, name = path.rpartition("/")
        if folder not in real_folders:
            real_folders[folder] = os.path.realpath(path_of(folder, index.root))
        yield f"{real_folders[folder]}/{name}"
