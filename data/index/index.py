"""The index of a split: its images and labels as flat arrays. It is opened from a cache file, or scanned and cached if
the data set is new or has changed."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from data.image_io.decode import unread_summary
from data.index.dataset_yaml import IGNORED, DatasetSpec
from data.index.files import Listing, labels_elsewhere, list_split, shards_of, unread_files
from data.labels.clean import PARSER_VERSION
from data.labels.findings import NO_LABEL, ScanReport, relative_name
from utils.boxes import TILE_OVERLAP, tile_windows, xywh_to_xyxy, xyxy_to_cxcywh
from utils.config.pixels import RGB8, PixelFormat
from utils.errors import UserError
from utils.files.array_file import CacheError, open_arrays, write_arrays
from utils.files.caches import hold, make_room
from utils.files.folders import cache_folder
from utils.logger import get_logger
from utils.rng import keyed_generator, named_stream
from utils.strings import FlatStrings, counted, image_ids_of
from utils.structures import MAX_DET, GroundTruth, LabelArrays, ignored_class

if TYPE_CHECKING:
    from data.index.scan import Scan

CACHE_VERSION = 6  # increase it when the arrays or their meaning change
# A larger fraction of images without a label file causes a warning. In COCO, 0.9 % of the training images have no
# object and no label file; in VOC and exports of labeling services, every image has a label file. The usual advice is
# at most 10 % backgrounds, and more can be declared with empty files.
MAX_UNLABELED = 0.1
SINGLE_CLASS_NAME = "object"
_LEFT_OUT = -2  # the number of a class that is not used
_OF_BOXES = (
    "boxes_xywh_px",
    "classes",
    "crowd",
    "area_px",
    "repeated",
    "line",
)  # arrays of an index that have a row per box


@dataclass(frozen=True)
class DatasetIndex(LabelArrays):
    """A split: N images and M boxes in flat arrays, which are read-only views of a file if they come from a cache."""

    names: tuple[str, ...]  # class names
    root: Path  # absolute; paths are relative to it
    paths: FlatStrings  # (N,) with /, relative to the root
    image_hw: np.ndarray  # int32 (N, 2) upright after EXIF
    offsets: np.ndarray  # int64 (N + 1,): boxes of image i are offsets[i]:offsets[i + 1]
    boxes_xywh_px: np.ndarray  # float64 (M, 4), inside the image
    classes: np.ndarray  # int32 (M,); -1 for a region in which all classes are ignored
    crowd: np.ndarray  # bool (M,) regions in which a class is ignored
    area_px: np.ndarray  # float64 (M,) of the object if the labels have it, else of the box
    repeated: np.ndarray  # bool (M,) equal to an earlier box of its image
    line: np.ndarray  # int32 (M,) as `LabelSource.where` takes it; -1: no label file has this box
    report: ScanReport
    fingerprint: str = ""
    image_ids: FlatStrings | None = None  # (N,) as JSON; None: `ground_truth` takes them from the paths
    category_ids: tuple[int, ...] = ()  # by class, from COCO JSON; empty: the class numbers
    pixels: PixelFormat = RGB8  # of the images
    tile: int = 0  # see `DatasetSpec`

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def fingerprint_as_used(self) -> str:
        """That of the files and of the classes of their boxes, which a YAML may merge, leave out or ignore."""
        return _digest(self.fingerprint, hashlib.blake2b(self.classes.tobytes() + self.crowd.tobytes()).hexdigest())

    def path(self, i: int) -> str:
        """Absolute path of image i."""
        return os.path.normpath(os.path.join(self.root, self.paths[i]))

    def sides_at(self, imgsz: int) -> np.ndarray:
        """float64 (m, 2): widths and heights of all boxes but crowd regions, in pixels, with the longer side of each
        image, or the side of its tiles, scaled to ``imgsz``."""
        longest = self.tile or np.repeat(self.image_hw.max(1), np.diff(self.offsets))[:, None]
        sides = self.boxes_xywh_px[:, 2:] * (imgsz / longest)
        return sides[~self.crowd]

    def take(self, images: np.ndarray) -> DatasetIndex:
        """The index of ``images``, int64 (n,), in this order; the report is still that of all."""
        counts = np.diff(self.offsets)[images]
        offsets = np.r_[0, np.cumsum(counts)].astype(np.int64)
        rows = np.arange(offsets[-1]) + np.repeat(self.offsets[images] - offsets[:-1], counts)
        boxes = {name: getattr(self, name)[rows] for name in _OF_BOXES}
        texts = {"paths": self.paths, "image_ids": self.image_ids}
        texts = {name: flat and FlatStrings.of(flat[i] for i in images.tolist()) for name, flat in texts.items()}
        return replace(self, image_hw=self.image_hw[images], offsets=offsets, **boxes, **texts)

    def with_boxes(self, rows: np.ndarray) -> DatasetIndex:
        """The index of the same images with the boxes of ``rows``, bool (m,), only."""
        boxes = {name: getattr(self, name)[rows] for name in _OF_BOXES}
        return replace(self, offsets=np.r_[0, np.cumsum(rows)][self.offsets], **boxes)

    def without_repeats(self) -> DatasetIndex:
        """The index with each box once."""
        if not self.repeated.any():
            return self
        once = self.with_boxes(~self.repeated)
        return replace(once, report=replace(self.report, totals=self.report.totals | _totals(once)))

    def labels(self, i: int) -> np.ndarray:
        """Of image i, see `labels_of`."""
        return self.labels_of(np.array([i]))[0]

    def labels_of(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Labels of several ``images``, int64 (T,), which may repeat: float32 (n, 5) with the class, then cx, cy, w, h
        as fractions of the size of the image, and the position in ``images`` of the image of each, int64 (n,). The
        class of a region to ignore is negative, see `utils.structures.ignored_class`."""
        starts = self.offsets[images]
        counts = self.offsets[images + 1] - starts
        position = np.repeat(np.arange(len(images)), counts)
        rows = np.arange(len(position)) + (starts - (np.cumsum(counts) - counts))[position]
        labels = np.empty((len(rows), 5), np.float32)
        labels[:, 0] = np.where(self.crowd[rows], ignored_class(self.classes[rows]), self.classes[rows])
        boxes = xyxy_to_cxcywh(xywh_to_xyxy(self.boxes_xywh_px[rows]))
        size_wh = self.image_hw[images][position, ::-1]
        labels[:, 1:3], labels[:, 3:5] = boxes[:, :2] / size_wh, boxes[:, 2:] / size_wh
        return labels, position

    def ground_truth(self) -> GroundTruth:
        """The labels for evaluation, with crowd regions. Without COCO's image ids, an image's id is its file stem, as a
        number if all stems are numbers, or its path if two stems are equal. With tiles, COCO's limit of detections
        holds for each tile."""
        if self.image_ids is None:
            ids = image_ids_of([os.path.splitext(os.path.basename(p))[0] for p in self.paths])
            if len(set(ids)) < len(ids):  # the same stem in two folders, or with two suffixes
                ids = tuple(self.paths)
        else:
            ids = tuple(json.loads(i) for i in self.image_ids)
        copies = np.where(self.classes == IGNORED, len(self.names), 1)  # evaluation knows regions of one class
        rows = np.repeat(np.arange(len(copies)), copies)
        number = np.arange(len(rows)) - np.repeat(np.cumsum(copies) - copies, copies)
        return GroundTruth(
            offsets=np.r_[0, np.cumsum(copies)][self.offsets],
            boxes_xywh_px=self.boxes_xywh_px[rows],
            classes=np.where(self.classes[rows] == IGNORED, number, self.classes[rows]).astype(np.int64),
            crowd=self.crowd[rows],
            area_px=self.area_px[rows],
            image_hw=self.image_hw,
            image_ids=ids,
            category_ids=self.category_ids or tuple(range(len(self.names))),
            max_det=MAX_DET * self._most_tiles(),
        )

    def _most_tiles(self) -> int:
        """The largest number of tiles of an image; 1 without tiles."""
        sizes = np.unique(np.maximum(self.image_hw, self.tile), axis=0).tolist() if self.tile else []
        return max((len(tile_windows((h, w), self.tile, TILE_OVERLAP)) for h, w in sizes), default=1)


class ScannedPart(NamedTuple):
    """What has been read for a split: all of it, or one of the data sets that it joins."""

    spec: DatasetSpec
    index: DatasetIndex  # all images, with the classes of the labels
    scan: Scan | None  # None: shards, which were scanned when they were written


def load_index(
    spec: DatasetSpec,
    split: str,
    *,
    cache_dir: str = "",
    workers: int = 2,
    max_bad: float = 0.1,
    single_cls: bool = False,
    verify: str = "sample",
    fraction: float = 1.0,
    seed: int = 0,
    repeats: bool = True,
    progress: bool = True,
    checked: list[ScannedPart] | None = None,
) -> DatasetIndex:
    """Opens the index of a split from its cache file, or scans the split and writes that file. Never writes to the
    data set.

    Args:
        cache_dir: folder of cache files and reports; empty: $XDG_CACHE_HOME/lockstep, or ~/.cache/lockstep.
        workers: threads of a scan; 0: the calling thread only, else at least one thread per CPU.
        max_bad: largest fraction of images that may be left out because they or their labels cannot be used.
        single_cls: treat all classes as one.
        verify: "sample" or "full", see `data.index.scan.scan_split`.
        fraction: of the usable images, chosen at random by ``seed``; a smaller one is a part of a larger one.
        repeats: keep boxes that equal an earlier one of their image: pycocotools scores them, training does without.
        progress: show a progress bar.
        checked: for a check: receives what has been scanned, in the order of the images. No cache is read or written,
            and what is wrong with the split as a whole is a warning, not an error.

    Raises:
        UserError: data is missing, there is no image, no label file or no object to train on, the names do not match
            the labels, or more than ``max_bad`` of the images are bad.
    """
    part, split = split, "train" if spec.held_out and split == "val" else split
    chooses = bool(spec.classes or spec.class_of)
    refusing = partial(_refusing, checked is not None)
    use = {"fraction": fraction, "seed": seed, "repeats": repeats}
    if spec.split(split).parts:
        index = _load_parts(
            spec, split, cache_dir=cache_dir, workers=workers, max_bad=max_bad, verify=verify, progress=progress,
            checked=checked,
        )  # fmt: skip
        index = _used(index, spec, part, single_cls=single_cls, **use)
        get_logger().info("%s: %s", part, index.report.summary())
        with refusing():
            _check_some_objects(index, "", spec, part)
            _check_backgrounds(index, spec, part)
        return index
    if shards := shards_of(spec, split):
        from data.index.sharded import sharded_content  # which files do not need

        index = index_of(*sharded_content(shards, spec), spec.as_labeled().names, shards)
        if spec.pixels != RGB8:
            fingerprint = _digest(index.fingerprint, spec.pixels.content())
            index = replace(index, pixels=spec.pixels, fingerprint=fingerprint)
        if checked is not None:
            checked.append(ScannedPart(spec, index, None))
        whole, index = index.report, _used(index, spec, part, single_cls=single_cls, **use)
        get_logger().info("%s: %s (shards)", part, index.report.summary())
        for advice in whole.advice:
            get_logger().warning("%s: %s", split, advice)
        with refusing():
            _check_bad_images(whole, split, max_bad, "")
            _check_some_objects(index, shards.name, spec, part)
        return index
    merged = single_cls and not chooses  # by the scan, which then checks no class
    used, spec = spec, spec.as_labeled()
    listing = list_split(spec, split)
    with refusing():  # before its images are read
        _check_some_labels(listing, spec, split)
    fingerprint = _fingerprint(spec, split, listing, merged, verify)
    folder = cache_folder(cache_dir)
    path = folder / f"{split}-{fingerprint}.index"
    names = class_names(spec, merged)
    index = open_cached(path, names, spec.root, fingerprint) if checked is None else None
    cached = index is not None
    if index is None:
        from data.index.scan import scan_split  # which a cached split does not need

        scan = scan_split(
            spec,
            split,
            listing,
            workers=workers,
            single_cls=merged,
            show_progress=progress,
            verify=verify,
            partial=folder / f"{split}-{fingerprint}" if checked is None else None,
        )
        index = DatasetIndex(names=names, root=spec.root, fingerprint=fingerprint, **scan.split._asdict())
        if checked is None:
            write_cache(path, index, origin=(os.path.abspath(spec.source), split, merged))
        else:
            checked.append(ScannedPart(used, index, scan))
    index = replace(index, pixels=spec.pixels)
    whole = index.report
    index = _used(index, used, part, single_cls=single_cls and chooses, **use)
    hold(index, path)
    report_path = path.with_suffix(".txt")
    details = f"; report: {report_path}" if index.report.problems and report_path.exists() else ""
    get_logger().info("%s: %s%s%s", part, index.report.summary(), " (cached)" if cached else "", details)
    if part == split:
        for advice in whole.advice:
            get_logger().warning("%s: %s", split, advice)
        if unread := unread_files(listing.findings):
            get_logger().warning("%s: %s", split, unread_summary(unread))
        _warn_of_missing_labels(listing, spec, split)
    first = next((file.name for file in listing.labels if file.stamp is not None), listing.labels[0].name)
    with refusing():
        _check_bad_images(whole, split, max_bad, details)
        _check_some_objects(index, first, used, part)
    return index


@contextmanager
def _refusing(is_check: bool) -> Iterator[None]:
    """Lets the UserErrors of the block pass; for a check, they are warnings."""
    try:
        yield
    except UserError as error:
        if not is_check:
            raise
        get_logger().warning("%s", error)


def _load_parts(spec: DatasetSpec, split: str, **options: Any) -> DatasetIndex:
    """The splits of all parts as one. A class that a part does not label is ignored in all of its images."""
    names, parts = spec.as_labeled().names, spec.split(split).parts
    indexes = [load_index(part, split, **options) for part in parts]
    for part, index in zip(parts, indexes):
        labeled = set(index.names)
        if missing := [name for name in names if name not in labeled]:
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            get_logger().info("%s: %s does not label %s: ignored in its images", split, part.source, shown)
    paths = [index.path(i) for index in indexes for i in range(len(index))]
    if repeated := len(paths) - len(set(paths)):
        text = "%s: data sets that %s joins share %s, which count more than once"
        get_logger().warning(text, split, spec.source, counted(repeated, "image"))
    totals = sum((Counter(index.report.totals) for index in indexes), Counter())
    joined = DatasetIndex(
        names=names,
        root=spec.root,
        paths=FlatStrings.of(relative_name(path, spec.root) for path in paths),
        **concatenated([_with_names(index, names) for index in indexes]),
        report=ScanReport(
            dict(totals), FlatStrings.of(_from(spec.root, i.root, line) for i in indexes for line in i.report.lines)
        ),
        fingerprint=_digest([index.fingerprint for index in indexes], names),
        pixels=spec.pixels,
    )
    return replace(joined, report=replace(joined.report, totals=joined.report.totals | _totals(joined)))


def _from(root: Path, part: Path, name: str) -> str:
    """``name``, relative to the folder ``part``, relative to ``root``."""
    return relative_name(os.path.join(part, name), root)


def _with_names(index: DatasetIndex, names: Sequence[str]) -> DatasetIndex:
    """The index with classes numbered as in ``names``, of which those that it does not have are ignored everywhere."""
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
    """The arrays of an index that has the images of several, in this order, by name."""
    arrays = {
        name: np.concatenate([getattr(index, name) for index in indexes]) for name in _ARRAYS if name != "offsets"
    }
    counts = np.concatenate([np.diff(index.offsets) for index in indexes])
    return arrays | {"offsets": np.r_[0, np.cumsum(counts)].astype(np.int64)}


def _used(
    index: DatasetIndex, spec: DatasetSpec, part: str, *, single_cls: bool, fraction: float, seed: int, repeats: bool
) -> DatasetIndex:
    """What a run uses of ``index``, which has all images and the classes of the labels. ``part``: the split that the
    run asks for, of which the training images may hold some out."""
    if not repeats:  # before classes are merged
        index = index.without_repeats()
    if spec.held_out and part in ("train", "val"):
        index = _part(index, part, spec)
    if single_cls or spec.classes or spec.class_of:
        index = _of_classes(index, spec, single_cls)
    index = replace(index, tile=spec.tile)
    return _sampled(index, fraction, seed) if fraction < 1 else index


def _part(index: DatasetIndex, split: str, spec: DatasetSpec) -> DatasetIndex:
    """The images of ``index``, all of the training split, that are not held out for validation, or as "val" those that
    are. What the scan found is in the report of "train"."""
    is_held_out = np.array([path in spec.held_out for path in index.paths], bool)
    if not is_held_out.any():
        raise UserError(
            f"{spec.source}: 'train' has none of the {len(spec.held_out)} images that were held out for validation "
            "when the run began; name its data set with --data"
        )
    part = index.take(np.flatnonzero(is_held_out == (split == "val")))
    report = ScanReport(_totals(part), FlatStrings.of(()))
    if split == "train":
        report = replace(index.report, totals=index.report.totals | _totals(part) | {NO_LABEL: 0})
    return replace(part, report=report, fingerprint=_digest(split, index.fingerprint, sorted(spec.held_out)))


def _sampled(index: DatasetIndex, fraction: float, seed: int) -> DatasetIndex:
    order = keyed_generator(seed, named_stream("fraction")).permutation(len(index))
    part = index.take(np.sort(order[: max(round(fraction * len(index)), 1)]))
    get_logger().info("--fraction %g: %d of %d training images", fraction, len(part), len(index))
    report = replace(index.report, totals=index.report.totals | _totals(part) | {NO_LABEL: 0})
    return replace(part, report=report, fingerprint=_digest(index.fingerprint, fraction, seed))


def _digest(*values: Any) -> str:
    """32 hex digits."""
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=16).hexdigest()


def _of_classes(index: DatasetIndex, spec: DatasetSpec, single_cls: bool) -> DatasetIndex:
    """The images of ``index``, which has the classes of the labels, with the boxes of ``spec.classes`` only, numbered
    from 0; with ``single_cls`` all are 0. The fingerprint stays: images and files are the same."""
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
    ).with_boxes(used)
    return replace(result, report=replace(index.report, totals=index.report.totals | _totals(result)))


def _totals(index: DatasetIndex) -> dict[str, int]:
    crowd = int(index.crowd.sum())
    backgrounds = int((np.diff(index.offsets) == 0).sum())
    return {"images": len(index), "backgrounds": backgrounds, "boxes": len(index.classes) - crowd, "crowd": crowd}


def _unlabeled(listing: Listing) -> list[str]:
    """Names of the label files that do not exist."""
    return [file.name for file in listing.labels if file.stamp is None]


def _check_some_labels(listing: Listing, spec: DatasetSpec, split: str) -> None:
    """Raises UserError for a split without any label file, with what to do."""
    missing = _unlabeled(listing)
    if len(missing) == len(listing.labels):
        images = counted(len(listing.images), "image")
        text = f"{spec.source}: '{split}' has {images} and no label file; the first was expected at "
        raise UserError(f"{text}{_absolute(spec, missing[0])}{labels_elsewhere(listing, spec, split)}")


def _warn_of_missing_labels(listing: Listing, spec: DatasetSpec, split: str) -> None:
    missing = _unlabeled(listing)
    if len(missing) > MAX_UNLABELED * len(listing.labels):
        shown = ", ".join(_absolute(spec, name) for name in missing[:3]) + (", ..." if len(missing) > 3 else "")
        get_logger().warning(
            "%s: %d of %d images have no label file and are treated as backgrounds (expected %s); add empty label "
            "files to avoid this warning",
            split, len(missing), len(listing.labels), shown,
        )  # fmt: skip


def _check_some_objects(index: DatasetIndex, first: str, spec: DatasetSpec, split: str) -> None:
    """Raises UserError for a training split without objects that are not ignored; warns about another split.
    ``first``: a label file, if the split has some of its own."""
    if not index.crowd.all():
        return
    of = f" of the class {' or '.join(index.names[:5])}" if spec.classes or spec.class_of else ""
    text = f"{spec.source}: '{split}' has {counted(len(index), 'image')} and no object{of}"
    text += f" (first label file: {_absolute(spec, first)})" if first else ""
    if split == "train":
        raise UserError(f"{text}; there is nothing to train on")
    text += "; nothing can be scored" + (", and training writes no best.pt" if split == "val" else "")
    get_logger().warning("%s", text)


def _check_backgrounds(index: DatasetIndex, spec: DatasetSpec, split: str) -> None:
    """Raises UserError if a class that has objects is ignored everywhere in every image: nothing is background for it.
    So it is where classes are merged of which each data set leaves one out."""
    whole = (index.boxes_xywh_px[:, 2:] == index.image_hw[index.image_of_box, ::-1]).all(1)
    regions = index.with_boxes(index.crowd & whole & (index.classes != IGNORED))
    images = replace(regions, crowd=np.zeros_like(regions.crowd)).images_of_classes(len(index.names))
    no_background = (images == len(index)) & (index.boxes_of_classes(len(index.names)) > 0)
    if no_background.any():
        name = index.names[no_background.argmax()]
        raise UserError(
            f"{spec.source}: '{split}' has no image in which all objects of '{name}' are labeled: of the classes that "
            "are merged into it, each data set leaves one out; label them, or do not merge them ('classes:' or "
            "--single-cls)"
        )


def _absolute(spec: DatasetSpec, name: str) -> str:
    return os.path.normpath(os.path.join(spec.root, name))


def _check_bad_images(report: ScanReport, split: str, max_bad: float, details: str) -> None:
    total = report.totals["images"] + report.bad_images
    if report.totals["images"] and report.bad_images / total <= max_bad:
        return
    raise UserError(
        f"'{split}': {report.bad_images} of {total} images can't be used (--max-bad is {max_bad:g}): "
        f"{'; '.join((*report.bad_lines, *report.advice))}{details}"
    )


def class_names(spec: DatasetSpec, single_cls: bool) -> tuple[str, ...]:
    """Class names of a model trained on this data set. With ``single_cls`` the only class that is used keeps its
    name."""
    names = tuple(spec.names[number] for number in spec.classes) or spec.names
    return (SINGLE_CLASS_NAME,) if single_cls and len(names) > 1 else names


def _fingerprint(spec: DatasetSpec, split: str, listing: Listing, single_cls: bool, verify: str) -> str:
    """32 hex digits that depend on name, size and time of all files, the classes, and the version of this code, but
    not on the path of the data set."""
    settings = [CACHE_VERSION, PARSER_VERSION, listing.label_format.name, split, single_cls, spec.names]
    settings += [verify] if verify != "sample" else []  # "full" may leave out more images
    settings += [spec.pixels.content()] if spec.pixels != RGB8 else []
    digest = hashlib.blake2b(json.dumps(settings).encode(), digest_size=16)
    for files in (listing.images, listing.labels):
        rows = (f"{f.name}\0{f.stamp.size} {f.stamp.mtime_ns}" if f.stamp else f"{f.name}\0" for f in files)
        digest.update("\0\0".join(rows).encode("utf-8", "surrogateescape") + b"\0\0\0")
    digest.update(json.dumps([str(f) for f in listing.findings]).encode())
    return digest.hexdigest()


_ARRAYS = ("image_hw", "offsets", *_OF_BOXES)


def write_cache(path: Path, index: DatasetIndex, origin: tuple[str, str, bool] = ("", "", False)) -> None:
    """Writes a cache file, or logs a warning if that fails. Removes other caches if necessary.

    Args:
        origin: YAML, split and ``single_cls``, which are equal for all versions of a data set.
    """
    meta, arrays = index_content(index)
    try:
        write_arrays(path, meta | {"origin": origin}, arrays)
        make_room(path.parent, 0, keep=path)
        if len(index.report.lines):
            index.report.write(path.with_suffix(".txt"))
    except OSError as error:
        get_logger().warning(
            "%s: the index can't be cached (%s); the next run scans again", path.parent, error.strerror
        )


def open_cached(path: Path, names: tuple[str, ...], root: Path, fingerprint: str) -> DatasetIndex | None:
    """Maps the index in a cache file. Returns None if there is no such file, or, with a warning, if it is unusable."""
    try:
        meta, arrays = open_arrays(path)
        if meta["fingerprint"] != fingerprint or meta["version"] != [CACHE_VERSION, PARSER_VERSION]:
            raise CacheError("another version")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (CacheError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        get_logger().warning("%s: the cached index can't be used (%s); scanning again", path, reason)
        return None

    return index_of(meta, arrays, names, root)


def index_content(index: DatasetIndex) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The metadata and arrays of a file, of which `index_of` makes the index again."""
    report = index.report
    strings = {"paths": index.paths, "report": report.lines, "image_ids": index.image_ids}
    arrays = {name: getattr(index, name) for name in _ARRAYS}
    for name, flat in strings.items():
        if flat is not None:
            arrays |= {f"{name}.data": flat.data, f"{name}.offsets": flat.offsets}
    meta = {
        "version": [CACHE_VERSION, PARSER_VERSION],
        "fingerprint": index.fingerprint,
        "category_ids": index.category_ids,
        "totals": report.totals,
        "bad_lines": report.bad_lines,
        "advice": report.advice,
    }
    return meta, arrays


def index_of(meta: dict[str, Any], arrays: dict[str, np.ndarray], names: tuple[str, ...], root: Path) -> DatasetIndex:
    """The index with the content of a file."""

    def strings(name: str) -> FlatStrings:
        return FlatStrings(arrays[f"{name}.data"], arrays[f"{name}.offsets"])

    return DatasetIndex(
        names=names,
        root=root,
        paths=strings("paths"),
        **{name: arrays[name] for name in _ARRAYS},
        report=ScanReport(meta["totals"], strings("report"), tuple(meta["bad_lines"]), tuple(meta["advice"])),
        fingerprint=meta["fingerprint"],
        image_ids=strings("image_ids") if "image_ids.data" in arrays else None,
        category_ids=tuple(meta["category_ids"]),
    )
