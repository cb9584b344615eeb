"""Views of indexes: the part of a split that a run uses, with the classes that it wants, and several splits as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data.index.index import ARRAYS, DatasetIndex, digest_of
from data.labels.findings import NO_LABEL
from data.labels.ledger import Ledger
from data.labels.report import ScanReport
from data.source.dataset_spec import IGNORED, DatasetSpec, class_names
from utils.errors import UserError
from utils.files.paths import path_of, relative_name
from utils.logger import get_logger
from utils.rng import keyed_generator, named_stream
from utils.strings import FlatStrings, counted, listed

_LEFT_OUT = -2  # the number of a class that is not used


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """How `data.index.load.load_index` reads a split, and what a run uses of it."""

    cache_dir: str = ""  # of cache files and reports, see `cache_folder`
    workers: int = 2  # threads of a scan; 0: the calling thread only, else at least one thread per CPU
    max_bad: float = 0.1  # largest fraction of what was labeled that may be lost, see `data.labels.ledger`
    single_cls: bool = False  # treat all classes as one
    fraction: float = 1.0  # of the usable images, chosen at random by ``seed``; a smaller one is a part of a larger one
    seed: int = 0
    repeats: bool = True  # keep boxes that equal an earlier one of their image: pycocotools scores them
    progress: bool = True


def joined(spec: DatasetSpec, split: str, indexes: Sequence[DatasetIndex]) -> DatasetIndex:
    """The ``indexes`` of the parts of a split as one. A class that a part does not label is ignored in its images."""
    names, parts = spec.as_labeled().names, spec.split(split).parts
    for part, index in zip(parts, indexes):
        labeled = set(index.names)
        if missing := [name for name in names if name not in labeled]:
            shown = listed(missing, 5)
            get_logger().info("%s: %s does not label %s: ignored in its images", split, part.source, shown)
    paths = [index.path(i) for index in indexes for i in range(len(index))]
    if repeated := len(paths) - len(set(paths)):
        text = "%s: data sets that %s joins share %s, which count more than once"
        get_logger().warning(text, split, spec.source, counted(repeated, "image"))
    totals = sum((Counter(index.report.totals) for index in indexes), Counter())
    lines = (_line_relative_to(spec.root, line, index.root) for index in indexes for line in index.report.lines)
    index = DatasetIndex(
        names=names,
        root=spec.root,
        paths=FlatStrings.of(relative_name(path, spec.root) for path in paths),
        **concatenated([_with_names(index, names) for index in indexes]),
        report=ScanReport(dict(totals), FlatStrings.of(lines), Ledger.joined([i.report.ledger for i in indexes])),
        fingerprint=digest_of([index.fingerprint for index in indexes], names),
        pixels=spec.pixels,
    )
    return index.recounted()


def _line_relative_to(root: Path, line: str, part_root: Path) -> str:
    """Returns a line of a report, which begins with the name of a file relative to ``part_root``, relative to
    ``root``."""
    where, separator, rest = line.partition(": ")
    return relative_name(path_of(where, part_root), root) + separator + rest


def _with_names(index: DatasetIndex, names: Sequence[str]) -> DatasetIndex:
    """The index with classes numbered as in ``names``; classes that it does not have are ignored everywhere."""
    of_name = {name: i for i, name in enumerate(names)}
    number = np.array([*map(of_name.get, index.names), IGNORED], np.int32)  # the last one is number -1
    missing = np.setdiff1d(np.arange(len(names), dtype=np.int32), number)
    image = np.repeat(np.arange(len(index)), len(missing))
    order = np.argsort(np.r_[index.image_of_box, image], kind="stable")
    sizes_wh = index.image_hw[image, ::-1].astype(np.float64)
    whole = np.concatenate([np.zeros_like(sizes_wh), sizes_wh], 1)
    return replace(
        index,
        offsets=index.offsets + len(missing) * np.arange(len(index) + 1),
        boxes_xywh_px=np.concatenate([index.boxes_xywh_px, whole])[order],
        classes=np.r_[number[index.classes], np.tile(missing, len(index))][order],
        crowd=np.r_[index.crowd, np.ones(len(image), bool)][order],
        area_px=np.r_[index.area_px, sizes_wh.prod(1)][order],
        repeated=np.r_[index.repeated, np.zeros(len(image), bool)][order],
        line=np.r_[index.line, np.full(len(image), -1, np.int32)][order],
    )


def concatenated(indexes: Sequence[DatasetIndex]) -> dict[str, np.ndarray]:
    """The arrays, by name, of an index with the images of several, in this order."""
    arrays = {name: np.concatenate([getattr(index, name) for index in indexes]) for name in ARRAYS if name != "offsets"}
    counts = np.concatenate([np.diff(index.offsets) for index in indexes])
    return arrays | {"offsets": np.r_[0, np.cumsum(counts)].astype(np.int64)}


def as_used(index: DatasetIndex, spec: DatasetSpec, split: str, settings: IndexSettings) -> DatasetIndex:
    """The part of ``index``, which has all images, and the classes of the labels, that a run uses as ``split``."""
    if not settings.repeats and index.repeated.any():  # before classes are merged
        index = index.with_boxes(~index.repeated).recounted()
    if spec.held_out and split in ("train", "val"):
        index = _part(index, split, spec)
    if settings.single_cls or spec.classes or spec.class_of:
        index = _of_classes(index, spec, settings.single_cls)
    index = replace(index, tile=spec.tile)
    if settings.fraction == 1:
        return index
    order = keyed_generator(settings.seed, named_stream("fraction")).permutation(len(index))
    part = index.take(np.sort(order[: max(round(settings.fraction * len(index)), 1)]))
    get_logger().info("--fraction %g: %d of %d training images", settings.fraction, len(part), len(index))
    fingerprint = digest_of(index.fingerprint, settings.fraction, settings.seed)
    return replace(part, fingerprint=fingerprint).recounted(**{NO_LABEL: 0})


def _part(index: DatasetIndex, split: str, spec: DatasetSpec) -> DatasetIndex:
    """The images of the training split that are held out ("val") or not ("train", with the findings of the scan)."""
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


def _of_classes(index: DatasetIndex, spec: DatasetSpec, single_cls: bool) -> DatasetIndex:
    """The images of ``index``, which has the classes of the labels, with only the boxes of ``spec.classes``, numbered
    from 0; with ``single_cls`` all are 0. The fingerprint stays while images and files are the same: an image that
    would become a background although labels of it are lost is left out."""
    chosen = spec.classes or range(len(spec.names))
    numbers = np.full(len(spec.names) + 1, _LEFT_OUT, np.int32)
    numbers[IGNORED] = IGNORED  # the last one
    numbers[list(chosen)] = 0 if single_cls else np.arange(len(chosen))
    of_label = numbers[list(spec.class_of or range(len(spec.names)))]
    classes = of_label[index.classes]
    used = classes != _LEFT_OUT
    ids = index.category_ids or range(len(of_label))
    category_ids = {number: ids[label] for label, number in reversed(list(enumerate(of_label.tolist())))}
    result = replace(
        index,
        names=class_names(spec, single_cls),
        classes=classes,
        crowd=index.crowd | (classes == IGNORED),
        category_ids=() if single_cls else tuple(category_ids[number] for number in range(len(chosen))),
    )
    result = result.with_boxes(used)
    has_object = np.bincount(result.image_of_box[~result.crowd], minlength=len(result)) > 0
    unknown = result.incomplete & ~has_object  # of the boxes that could not be read, some may be of these classes
    if unknown.any():
        get_logger().info(
            "%s without a box of the classes used, but with labels that can't be used: left out, as no background",
            counted(int(unknown.sum()), "image"),
        )
        result = replace(result.take(np.flatnonzero(~unknown)), fingerprint=digest_of(index.fingerprint, "complete"))
    return result.recounted()
