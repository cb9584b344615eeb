"""Selects the images and classes of a split that a run uses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from data.index.index import DatasetIndex, digest_of
from data.index.index_settings import IndexSettings
from data.labels.findings import NO_LABEL
from data.labels.report import ScanReport
from data.source.dataset_spec import IGNORED, DatasetSpec, class_names
from utils.errors import UserError
from utils.logger import get_logger
from utils.rng import keyed_generator, named_stream
from utils.strings import FlatStrings, counted

_LEFT_OUT = -2  # class number of boxes that are not used


def as_used(index: DatasetIndex, spec: DatasetSpec, split: str, settings: IndexSettings) -> DatasetIndex:
    """Returns the part of ``index`` that a run uses as ``split``. ``index`` has all images, and the classes of the
    labels."""
    if not settings.repeats and index.repeated.any():  # before classes are merged
        index = index.with_boxes(~index.repeated).recounted()
    if spec.held_out and split in ("train", "val"):
        index = _divide(index, split, spec)
    if settings.single_cls or spec.classes or spec.class_of:
        index = _select_classes(index, spec, settings.single_cls)
    index = replace(index, tile=spec.tile)
    if settings.fraction == 1:
        return index
    order = keyed_generator(settings.seed, named_stream("fraction")).permutation(len(index))
    part = index.take(np.sort(order[: max(round(settings.fraction * len(index)), 1)]))
    get_logger().info("--fraction %g: %d of %d training images", settings.fraction, len(part), len(index))
    fingerprint = digest_of(index.fingerprint, settings.fraction, settings.seed)
    return replace(part, fingerprint=fingerprint).recounted(**{NO_LABEL: 0})


def _divide(index: DatasetIndex, split: str, spec: DatasetSpec) -> DatasetIndex:
    """Returns the training images that are held out ("val"), or the others ("train", with the findings of the scan)."""
    is_held_out = np.array([path in spec.held_out for path in index.paths], bool)
    if not is_held_out.any():
        raise UserError(
            f"{spec.source}: 'train' has none of the {counted(len(spec.held_out), 'image')} held out for validation "
            "when the run began; name its data set with --data"
        )
    part = index.take(np.flatnonzero(is_held_out == (split == "val")))
    part = replace(part, fingerprint=digest_of(split, index.fingerprint, sorted(spec.held_out)))
    if split == "val":
        part = replace(part, report=ScanReport({}, FlatStrings.of(())))
    return part.recounted(**{NO_LABEL: 0})


def _select_classes(index: DatasetIndex, spec: DatasetSpec, single_cls: bool) -> DatasetIndex:
    """Returns the images with only the boxes of ``spec.classes``, numbered from 0; with ``single_cls`` all are 0.

    ``index`` has the classes of the labels. An image that would become a background although some of its labels are
    lost is left out; only this changes the fingerprint.
    """
    chosen = spec.classes or range(len(spec.names))
    numbers = np.full(len(spec.names) + 1, _LEFT_OUT, np.int32)
    numbers[IGNORED] = IGNORED  # the last element
    numbers[list(chosen)] = 0 if single_cls else np.arange(len(chosen))
    classes_of_labels = list(spec.class_of or range(len(spec.names)))
    number_of_label = numbers[[*classes_of_labels, IGNORED]]  # regions to ignore have the last element, too
    classes = number_of_label[index.classes]
    used = classes != _LEFT_OUT
    ids = index.category_ids or range(len(classes_of_labels))
    numbered_labels = list(enumerate(number_of_label[:-1].tolist()))
    category_ids = {number: ids[label] for label, number in reversed(numbered_labels)}
    result = replace(
        index,
        names=class_names(spec, single_cls),
        classes=classes,
        crowd=index.crowd | (classes == IGNORED),
        category_ids=() if single_cls else tuple(category_ids[number] for number in range(len(chosen))),
    )
    result = result.with_boxes(used)
    has_object = np.bincount(result.image_of_box[~result.crowd], minlength=len(result)) > 0
    unknown = result.incomplete & ~has_object  # boxes that could not be read may have been of these classes
    if unknown.any():
        get_logger().info(
            "%s without a box of the classes used, but with labels that can't be used: left out, as no background",
            counted(int(unknown.sum()), "image"),
        )
        fingerprint = digest_of(index.fingerprint, np.flatnonzero(unknown).tolist())  # caches number the images
        result = replace(result.take(np.flatnonzero(~unknown)), fingerprint=fingerprint)
    return result.recounted()
