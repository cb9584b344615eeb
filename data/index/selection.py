"""Selects the images and classes of a split that a run uses (`Selection`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from data.index.index import DatasetIndex, digest_of
from data.index.index_settings import IndexSettings
from data.labels.findings import NO_LABEL
from data.labels.ledger import WARNED_SHARE
from data.labels.report import ScanReport
from data.source.dataset_spec import IGNORED, DatasetSpec, class_names
from utils.errors import UserError
from utils.logger import get_logger
from utils.rng import keyed_generator, named_stream
from utils.strings import counted

_LEFT_OUT = -2  # class number of boxes that are not used


@dataclass(frozen=True, slots=True)
class Selection:
    """Holds the n images that a run uses, of the N of an index. Other arrays by image, such as `Scan.numbers`, must be
    selected by ``images``, too."""

    index: DatasetIndex  # n images
    images: np.ndarray  # int64 (n,): their positions among the N images, ascending

    def take(self, positions: np.ndarray, *fingerprint: Any) -> Selection:
        """Selects again, by ascending positions in ``index``, int64 (k,). ``fingerprint``: JSON values from which the
        new one is made, as caches number the images."""
        index = replace(self.index.take(positions), fingerprint=digest_of(*fingerprint))
        return Selection(index, self.images[positions])


def as_used(index: DatasetIndex, spec: DatasetSpec, split: str, settings: IndexSettings) -> Selection:
    """Returns the part of ``index`` that a run uses as ``split``. ``index`` has all images, and the classes of the
    labels."""
    if not settings.repeats and index.repeated.any():  # before classes are merged
        index = index.with_boxes(~index.repeated).recounted()
    selection = Selection(index, np.arange(len(index)))
    if spec.held_out and split in ("train", "val"):
        selection = _divide(selection, split, spec)
    if settings.single_cls or spec.classes or spec.class_of:
        with_used_classes = _with_used_classes(selection.index, spec, single_cls=settings.single_cls)
        selection = _without_unknown(replace(selection, index=with_used_classes), spec, split)
    if settings.fraction != 1:
        selection = _sample(selection, settings)
    return replace(selection, index=replace(selection.index, tile=spec.tile))


def _divide(selection: Selection, split: str, spec: DatasetSpec) -> Selection:
    """Selects the training images that are held out ("val"), or the others ("train", with the findings of the scan)."""
    index = selection.index
    is_held_out = np.array([path in spec.held_out for path in index.paths], bool)
    if not is_held_out.any():
        raise UserError(
            f"{spec.source}: 'train' has none of the {counted(len(spec.held_out), 'image')} held out for validation "
            "when the run began; name its data set with --data"
        )
    positions = np.flatnonzero(is_held_out == (split == "val"))
    selection = selection.take(positions, split, index.fingerprint, sorted(spec.held_out))
    part = selection.index
    if split == "val":
        part = replace(part, report=ScanReport.of(()))
    return replace(selection, index=part.recounted(**{NO_LABEL: 0}))


def _with_used_classes(index: DatasetIndex, spec: DatasetSpec, *, single_cls: bool) -> DatasetIndex:
    """Returns all images with only the boxes of ``spec.classes``, numbered from 0; with ``single_cls`` all are 0.
    ``index`` has the classes of the labels."""
    number_of_label = _numbers_of_labels(spec, single_cls=single_cls)
    # Regions in which all classes are ignored have no class of the labels.
    classes = np.where(index.classes == IGNORED, IGNORED, number_of_label[index.classes]).astype(np.int32)
    category_ids: tuple[int, ...] = ()
    if not single_cls:
        category_ids = _category_ids(index.category_ids or range(len(number_of_label)), number_of_label, spec)
    result = replace(
        index,
        names=class_names(spec, single_cls),
        classes=classes,
        crowd=index.crowd | (classes == IGNORED),
        category_ids=category_ids,
    )
    return result.with_boxes(classes != _LEFT_OUT)


def _numbers_of_labels(spec: DatasetSpec, *, single_cls: bool) -> np.ndarray:
    """Returns the number that each of the L classes of the labels has in a run, int32 (L,), `IGNORED` or
    `_LEFT_OUT`."""
    number_of_name = {IGNORED: IGNORED}
    for number, position in enumerate(spec.classes or range(len(spec.names))):
        number_of_name[position] = 0 if single_cls else number
    position_of_label = spec.class_of or range(len(spec.names))
    return np.array([number_of_name.get(position, _LEFT_OUT) for position in position_of_label], np.int32)


def _category_ids(ids: Sequence[int], number_of_label: np.ndarray, spec: DatasetSpec) -> tuple[int, ...]:
    """Returns the category id of each used class: that of the first of the classes that it merges. ``ids``: those of
    the classes of the labels."""
    id_of_number: dict[int, int] = {}
    for category_id, number in zip(ids, number_of_label.tolist()):
        id_of_number.setdefault(number, category_id)
    return tuple(id_of_number[number] for number in range(len(spec.classes or spec.names)))


def _without_unknown(selection: Selection, spec: DatasetSpec, split: str) -> Selection:
    """Leaves out the images without an object that have lost labels, as these may have been of the used classes: they
    are no backgrounds. The ledger has counted the labels."""
    index = selection.index
    has_object = np.bincount(index.image_of_box[~index.crowd], minlength=len(index)) > 0
    is_unknown = index.incomplete & ~has_object
    if is_unknown.any():
        count = int(is_unknown.sum())
        level = logging.WARNING if count >= WARNED_SHARE * len(index) else logging.INFO
        get_logger().log(
            level,
            "%s: '%s': %d of %s left out, which have labels that can't be used and no object of the classes in use: "
            "they may not be backgrounds",
            spec.source,
            split,
            count,
            counted(len(index), "image"),
        )
        selection = selection.take(np.flatnonzero(~is_unknown), index.fingerprint, np.flatnonzero(is_unknown).tolist())
    return replace(selection, index=selection.index.recounted())


def _sample(selection: Selection, settings: IndexSettings) -> Selection:
    """Selects ``settings.fraction`` of the images at random."""
    index = selection.index
    order = keyed_generator(settings.seed, named_stream("fraction")).permutation(len(index))
    count = max(round(settings.fraction * len(index)), 1)
    selection = selection.take(np.sort(order[:count]), index.fingerprint, settings.fraction, settings.seed)
    part = selection.index
    get_logger().info("--fraction %g: %d of %d training images", settings.fraction, len(part), len(index))
    return replace(selection, index=part.recounted(**{NO_LABEL: 0}))
