"""Selects the images and classes of a split that a run uses."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np

from data.findings import WARNED_SHARE, ScanReport
from data.index import DatasetIndex, IndexSettings
from data.spec import IGNORED, DatasetSpec, class_names
from utils.errors import UserError
from utils.logger import get_logger
from utils.rng import keyed_generator, named_stream
from utils.strings import counted

_LEFT_OUT = -2  # class index of boxes that are not used


def select_used(index: DatasetIndex, spec: DatasetSpec, split: str, settings: IndexSettings) -> DatasetIndex:
    """Returns the part of ``index`` that a run uses as ``split``. ``index`` contains all usable images with the classes
    of the labels, or possibly with a single class if ``settings.single_cls`` is set."""
    is_divided = bool(spec.held_out) and split in ("train", "val")
    has_other_classes = bool(spec.classes or spec.class_of) or index.names != class_names(spec, settings.single_cls)
    if not settings.repeats and index.repeated.any():  # before classes are merged
        index = index.with_boxes(~index.repeated)
    if has_other_classes:
        index = _with_used_classes(index, spec, single_cls=settings.single_cls)

    images = np.arange(len(index))  # positions in the index, ascending
    if is_divided:
        images = _divide(index, spec, split)
    if has_other_classes:
        images = _drop_partially_lost_images(images, index, spec, split)
    if settings.fraction != 1:
        images = _sample(images, settings)

    if len(images) < len(index):  # otherwise all arrays stay views of the cache file
        index = index.take(images)
    report = index.report
    if is_divided:  # what concerns no image, or none that can be used, stays with the training images
        findings = [f for f in report.findings if (f.image_name in spec.held_out) == (split == "val")]
        report = ScanReport.of(findings, used_images=len(index), used_objects=len(index.classes))
    return replace(index, report=report, tile=spec.tile)


def _divide(index: DatasetIndex, spec: DatasetSpec, split: str) -> np.ndarray:
    """Returns the training images that are held out ("val"), or the others ("train"), int64 (n,). For "val", warns
    about images that were held out when the run began but are no longer usable. Raises UserError if none of them is."""
    is_held_out = np.array([path in spec.held_out for path in index.paths], bool)
    missing = sorted(spec.held_out.difference(index.paths))
    if len(missing) == len(spec.held_out):
        raise UserError(
            f"{spec.source}: 'train' has none of the {counted(len(spec.held_out), 'image')} held out for validation "
            "when the run began; name its data set with --data"
        )
    if missing and split == "val":
        get_logger().warning(
            "%s: %d of %s held out for validation when the run began are not among its usable images now, first %s; "
            "renamed images are trained on",
            spec.source,
            len(missing),
            counted(len(spec.held_out), "image"),
            missing[0],
        )
    return np.flatnonzero(is_held_out == (split == "val"))


def _with_used_classes(index: DatasetIndex, spec: DatasetSpec, *, single_cls: bool) -> DatasetIndex:
    """Returns all images with only the boxes of ``spec.classes``, numbered from 0; with ``single_cls``, all classes are
    0. ``index`` has the L classes of the labels. A class has the smallest category id of those that it merges."""
    number_of_name = {IGNORED: IGNORED}
    for number, position in enumerate(spec.classes or range(len(spec.names))):
        number_of_name[position] = 0 if single_cls else number
    position_of_label = spec.class_of or range(len(spec.names))
    # int32 (L,): class indices of the run, `IGNORED` or `_LEFT_OUT`
    number_of_label = np.array([number_of_name.get(position, _LEFT_OUT) for position in position_of_label], np.int32)
    # Regions in which all classes are ignored do not have a class of the labels.
    classes = np.where(index.classes == IGNORED, IGNORED, number_of_label[index.classes]).astype(np.int32)
    ids_of_number: dict[int, list[int]] = {}
    for category_id, number in zip(index.category_ids or range(len(number_of_label)), number_of_label.tolist()):
        ids_of_number.setdefault(number, []).append(category_id)
    names = class_names(spec, single_cls)
    result = replace(
        index,
        names=names,
        classes=classes,
        crowd=index.crowd | (classes == IGNORED),
        category_ids=tuple(min(ids_of_number[number]) for number in range(len(names))),
    )
    return result.with_boxes(classes != _LEFT_OUT)


def _drop_partially_lost_images(images: np.ndarray, index: DatasetIndex, spec: DatasetSpec, split: str) -> np.ndarray:
    """Returns ``images``, int64 (n,), without those that have lost labels and no object. The lost labels, already
    counted as findings, may have been of the used classes, so that the images must not become backgrounds."""
    has_object = np.bincount(index.image_of_box[~index.crowd], minlength=len(index)) > 0
    is_doubtful = (index.incomplete & ~has_object)[images]
    num_doubtful = int(is_doubtful.sum())
    if not num_doubtful:
        return images
    is_worth_a_warning = num_doubtful >= WARNED_SHARE * len(images)
    get_logger().log(
        logging.WARNING if is_worth_a_warning else logging.INFO,
        "%s: '%s': %d of %s left out because of labels that can't be used and no object of the classes in use: they "
        "may not be backgrounds",
        spec.source,
        split,
        num_doubtful,
        counted(len(images), "image"),
    )
    return images[~is_doubtful]


def _sample(images: np.ndarray, settings: IndexSettings) -> np.ndarray:
    """Returns ``settings.fraction`` of ``images``, int64 (n,), chosen at random, in the same order."""
    total = len(images)
    order = keyed_generator(settings.seed, named_stream("fraction")).permutation(total)
    count = max(round(settings.fraction * total), 1)
    positions = np.sort(order[:count])
    get_logger().info("--fraction %g: %d of %d training images", settings.fraction, len(positions), total)
    return images[positions]
