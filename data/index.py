"""Defines the index of a split (`DatasetIndex`): its images and labels as flat arrays; and how it is read.

An index is identified by

- `cache_key`: data set, split and settings, whatever the content: cache files that it names are replaced by newer ones;
- `image_files` and `image_digest()`: which cache file has its decoded images (data/cache/disk.py);
- `label_digest()`: whether a run or a search that continues has the same data.

The cache of the index itself is found by a fingerprint of the files (index_cache.py).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from data.findings import NO_LABEL, ScanReport
from data.flat_strings import FlatStrings
from data.labels import Labels
from data.spec import IGNORED, DatasetSpec
from utils.boxes import TILE_OVERLAP, tile_windows, xywh_to_xyxy, xyxy_to_cxcywh
from utils.config.settings import TrainConfig, ValConfig
from utils.files.paths import normal_path, path_of
from utils.labels import MAX_SCORED_DETECTIONS, GroundTruth, LabelArrays, ignored_class, image_ids_of, rows_of
from utils.pixels import RGB8, PixelFormat
from utils.strings import counted

_PER_IMAGE = {"rows": "image"}
_PER_BOX = {"rows": "box"}


@dataclass(frozen=True)
class DatasetIndex(LabelArrays):
    """A split of N images and M boxes in flat arrays, which are read-only views of a file if read from a cache."""

    names: tuple[str, ...]  # class names
    root: Path  # absolute; paths are relative to it
    paths: FlatStrings  # (N,) with /, relative to the root
    offsets: np.ndarray  # int64 (N + 1,): boxes of image i are offsets[i]:offsets[i + 1]
    # int32 (N, 2) upright after EXIF
    image_hw: np.ndarray = field(metadata=_PER_IMAGE)
    # bool (N,): a labeled object was unusable, so the image is not a background
    incomplete: np.ndarray = field(metadata=_PER_IMAGE)
    # float64 (M, 4), inside the image
    boxes_xywh_px: np.ndarray = field(metadata=_PER_BOX)
    # int32 (M,); -1 for a region in which all classes are ignored
    classes: np.ndarray = field(metadata=_PER_BOX)
    # bool (M,) regions in which a class is ignored
    crowd: np.ndarray = field(metadata=_PER_BOX)
    # float64 (M,) area of the object if the labels contain it, else of the box
    area_px: np.ndarray = field(metadata=_PER_BOX)
    # bool (M,) equal to an earlier box of the same image
    repeated: np.ndarray = field(metadata=_PER_BOX)
    # int32 (M,), see `data.formats.label_format`; -1 for a region that is in no label file
    row_number: np.ndarray = field(metadata=_PER_BOX)
    report: ScanReport
    # Identifies data set, split and settings but not the content, so that caches of older content are replaced.
    cache_key: str = ""
    image_files: str = ""  # digest of the names, sizes and times of all image files of the split, including unused ones
    image_ids: FlatStrings | None = None  # (N,) as JSON; None if `ground_truth` takes them from the paths
    id_of_category: Mapping[str, int] = field(default_factory=dict)  # see `Classes`; empty for other formats than COCO
    category_ids: tuple[int, ...] = ()  # by class; empty if they are the class indices
    pixels: PixelFormat = RGB8  # format of the images
    tile: int = 0  # see `DatasetSpec`

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def image_digest(self) -> str:
        """Returns a digest of the names and sizes of all images, without their labels."""
        return digest_of_arrays(self.paths.data, self.paths.offsets, self.image_hw)

    def label_digest(self) -> str:
        """Returns a digest of the sizes and labels of all images. It does not depend on paths and modification times,
        so that a copy of the files has the same digest."""
        return digest_of_arrays(self.image_hw, self.offsets, self.boxes_xywh_px, self.classes, self.crowd)

    def path(self, i: int) -> str:
        """Returns the absolute path of image i."""
        return path_of(self.paths[i], self.root)

    def sides_at(self, imgsz: int) -> np.ndarray:
        """Returns the sizes of all boxes except crowd regions after scaling the longer side of each image, or the side
        of its tiles, to ``imgsz``: float64 (m, 2), width and height in pixels."""
        longest = self.tile or np.repeat(self.image_hw.max(1), np.diff(self.offsets))[:, None]
        sides = self.boxes_xywh_px[:, 2:] * (imgsz / longest)
        return sides[~self.crowd]

    def take(self, images: np.ndarray) -> DatasetIndex:
        """Returns the index of ``images``, int64 (n,), in this order, with the report of all images."""
        rows, position = rows_of(self.offsets, images)
        return self.take_with_boxes(images, rows, np.bincount(position, minlength=len(images)))

    def take_with_boxes(self, images: np.ndarray, rows: np.ndarray, counts: np.ndarray) -> DatasetIndex:
        """Returns the index of ``images``, int64 (n,), in this order, with a part of their boxes.

        ``rows``: int64 (m,), numbers of the boxes by image; ``counts``: int64 (n,), how many of them each image has.
        """
        ids = self.image_ids
        columns: dict[str, Any] = {name: getattr(self, name)[images] for name in IMAGE_COLUMNS}
        columns |= {name: getattr(self, name)[rows] for name in BOX_COLUMNS}
        return replace(
            self,
            **columns,
            offsets=offsets_of(counts),
            paths=FlatStrings.of(self.paths[i] for i in images.tolist()),
            image_ids=ids and FlatStrings.of(ids[i] for i in images.tolist()),
        )

    def with_boxes(self, rows: np.ndarray) -> DatasetIndex:
        """Returns the index of the same images with only the boxes selected by ``rows``, bool (M,)."""
        columns: dict[str, Any] = {name: getattr(self, name)[rows] for name in BOX_COLUMNS}
        return replace(self, **columns, offsets=np.r_[0, np.cumsum(rows)][self.offsets])

    def counts(self) -> dict[str, int]:
        """Counts images, backgrounds, boxes and crowd regions.

        Regions that are in no label file are not counted, and an image with only such regions is a background: they
        mark classes that one of several joined data sets does not label.
        """
        is_labeled_region = self.crowd & (self.row_number >= 0)
        has_label = np.zeros(len(self), bool)
        has_label[self.image_of_box[~self.crowd | is_labeled_region]] = True
        return {
            "images": len(self),
            "backgrounds": int((~has_label).sum()),
            "boxes": int((~self.crowd).sum()),
            "crowd": int(is_labeled_region.sum()),
        }

    def without_label_file(self) -> np.ndarray:
        """Returns which images have no label file, and are backgrounds therefore: bool (N,)."""
        if all(total.kind != NO_LABEL for total in self.report.kinds):
            return np.zeros(len(self), bool)
        names = {finding.where for finding in self.report.findings if finding.kind == NO_LABEL}
        return np.array([path in names for path in self.paths], bool)

    def summary(self, split: str) -> str:
        """Returns one line: the numbers of images, backgrounds, boxes and findings. ``split``: name of the split."""
        counts = self.counts()
        boxes = counted(counts["boxes"], "box")
        if counts["crowd"]:
            boxes += f" and {counted(counts['crowd'], 'crowd region')}"
        findings = counted(self.report.num_findings, "finding")
        line = f"{counted(len(self), 'image')}, {counted(counts['backgrounds'], 'background')}, {boxes}, {findings}"
        unlabeled = int(self.without_label_file().sum())
        if unlabeled:
            use = "trained" if split == "train" else "scored"
            line += f"; {counted(unlabeled, 'image')} without a label file, {use} as showing no object"
        return line

    def labels(self, i: int) -> np.ndarray:
        """Returns the labels of image i, float32 (n, 5), see `labels_of`."""
        return self.labels_of(np.array([i]))[0]

    def labels_of(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the labels of ``images``, int64 (m,), which may repeat.

        Returns float32 (n, 5): class (`ignored_class` for an ignore region), cx, cy, w, h normalized to the image; and
        int64 (n,): the position of each label's image in ``images``.
        """
        rows, position = rows_of(self.offsets, images)
        size_wh = self.image_hw[images][position, ::-1]
        return normalized_labels(self.boxes_xywh_px[rows], self.classes[rows], self.crowd[rows], size_wh), position

    def names_ignored_everywhere(self) -> list[str]:
        """Returns the classes that have no boxes and are ignored in a region of every image."""
        num_classes = len(self.names)
        named = self.crowd & (self.classes >= 0)
        pairs = np.unique((self.image_of_box * num_classes + self.classes)[named])  # of an image and a class
        images = np.bincount(pairs % num_classes, minlength=num_classes)
        is_ignored = (self.boxes_per_class(num_classes) == 0) & (images >= max(len(self), 1))
        return [name for name, is_unlabeled in zip(self.names, is_ignored) if is_unlabeled]

    def ground_truth(self) -> GroundTruth:
        """Returns the labels for evaluation, with crowd regions. A region in which all classes are ignored becomes one
        region per class, because each region of the ground truth has a class."""
        # With three classes, a region of the class -1 becomes three, of the classes 0, 1 and 2.
        copies = np.where(self.classes == IGNORED, len(self.names), 1)
        rows = self.rows_of_ground_truth()
        number_of_copy = np.arange(len(rows)) - np.repeat(np.cumsum(copies) - copies, copies)
        classes = np.where(self.classes[rows] == IGNORED, number_of_copy, self.classes[rows])
        return GroundTruth(
            offsets=np.r_[0, np.cumsum(copies)][self.offsets],
            boxes_xywh_px=self.boxes_xywh_px[rows],
            classes=classes.astype(np.int64),
            crowd=self.crowd[rows],
            area_px=self.area_px[rows],
            image_hw=self.image_hw,
            image_ids=self._image_ids_or_stems(),
            category_ids=self.category_ids or tuple(range(len(self.names))),
            max_det=MAX_SCORED_DETECTIONS * self._max_tiles(),
        )

    def rows_of_ground_truth(self) -> np.ndarray:
        """Returns the box from which each object of `ground_truth` is: int64 (M,)."""
        return np.repeat(np.arange(len(self.classes)), np.where(self.classes == IGNORED, len(self.names), 1))

    def _image_ids_or_stems(self) -> tuple[int | str, ...]:
        """Returns COCO's image ids. Without these, returns the stems of the files, as numbers if all are numbers, or
        the paths if two stems are equal."""
        if self.image_ids is not None:
            return tuple(json.loads(image_id) for image_id in self.image_ids)
        stems = image_ids_of([os.path.splitext(os.path.basename(path))[0] for path in self.paths])
        are_unique = len(set(stems)) == len(stems)  # stems repeat across folders or suffixes
        return stems if are_unique else tuple(self.paths)

    def _max_tiles(self) -> int:
        """Returns the largest number of tiles per image, as cut by training; 1 without tiles. COCO's limit of
        detections is multiplied by it, so that AP does not depend on a detector's ``--tile`` and ``--overlap``."""
        if not self.tile or not len(self):
            return 1
        sizes = np.unique(np.maximum(self.image_hw, self.tile), axis=0).tolist()
        return max(len(tile_windows((height, width), self.tile, TILE_OVERLAP)) for height, width in sizes)


def normalized_labels(
    boxes_xywh_px: np.ndarray, classes: np.ndarray, crowd: np.ndarray, size_wh: np.ndarray | int
) -> np.ndarray:
    """Returns float32 (n, 5): class (`ignored_class` for an ignore region), cx, cy, w, h normalized to images of the
    sizes ``size_wh``, (n, 2), or the side of square images. For the other arrays, see `DatasetIndex`."""
    labels = np.empty((len(classes), 5), np.float32)
    labels[:, 0] = np.where(crowd, ignored_class(classes), classes)
    boxes = xyxy_to_cxcywh(xywh_to_xyxy(boxes_xywh_px))
    labels[:, 1:3] = boxes[:, :2] / size_wh
    labels[:, 3:5] = boxes[:, 2:] / size_wh
    return labels


IMAGE_COLUMNS = tuple(column.name for column in fields(DatasetIndex) if column.metadata == _PER_IMAGE)
BOX_COLUMNS = tuple(column.name for column in fields(DatasetIndex) if column.metadata == _PER_BOX)
COLUMNS = ("offsets", *IMAGE_COLUMNS, *BOX_COLUMNS)  # the arrays of an index


def offsets_of(counts: np.ndarray) -> np.ndarray:
    """Returns `DatasetIndex.offsets` for the numbers of boxes of N images: int64 (N + 1,)."""
    return np.r_[0, np.cumsum(counts)].astype(np.int64)


def ids_of_classes(id_of_category: Mapping[str, int], names: Sequence[str]) -> tuple[int, ...]:
    """Returns `DatasetIndex.category_ids`: a class that is no category gets the next free id."""
    free_ids = itertools.count(max(id_of_category.values(), default=-1) + 1)
    return tuple(id_of_category[name] if name in id_of_category else next(free_ids) for name in names)


def concatenated(indexes: Sequence[DatasetIndex]) -> dict[str, Any]:
    """Returns the `COLUMNS` of an index with the images of several indexes, in this order."""
    columns = {
        name: np.concatenate([getattr(index, name) for index in indexes]) for name in (*IMAGE_COLUMNS, *BOX_COLUMNS)
    }
    counts = np.concatenate([np.diff(index.offsets) for index in indexes])
    return columns | {"offsets": offsets_of(counts)}


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """Settings for reading a split, and for selecting the part that a run uses."""

    cache_dir: str = ""  # folder of cache files and reports, see `cache_folder`
    workers: int = 2  # threads of a scan, which uses more if there are more CPUs; 0 for a single thread
    single_cls: bool = False  # treat all classes as one
    fraction: float = 1.0  # random fraction of the usable images, for ``seed``; smaller fractions are subsets
    seed: int = 0
    repeats: bool = True  # keep boxes that equal an earlier one of their image, because pycocotools scores them
    progress: bool = True
    decode_all: bool = False  # decode all images, not only a sample
    use_cache: bool = True  # read and write cache files

    @classmethod
    def of_run(cls, config: TrainConfig | ValConfig, *, workers: int, progress: bool = True) -> IndexSettings:
        """Returns the settings for reading all of a split, as for validation."""
        return cls(cache_dir=config.cache_dir, workers=max(workers, 1), single_cls=config.single_cls, progress=progress)


@dataclass(frozen=True, slots=True)
class LoadedSplit:
    """A split as read from the disk, and the part of it that a run, or a data set that joins it, uses."""

    spec: DatasetSpec
    split: str
    full: DatasetIndex  # all usable images, with the classes of the labels
    used: DatasetIndex
    note: str = ""  # how it was read, for the log, such as " (cached)"
    cache_file: Path | None = None  # None without a cache, and if it joins data sets
    labels: Labels | None = None  # None for an index from a cache file or shards, and if it joins data sets
    parts: tuple[LoadedSplit, ...] = ()  # the data sets that it joins

    @property
    def sources(self) -> tuple[LoadedSplit, ...]:
        """The data sets that it joins, directly or not, or itself."""
        return tuple(source for part in self.parts for source in part.sources) or (self,)

    @property
    def cache_files(self) -> dict[str, str]:
        """The cache files of the data sets that it joins, or its own, by `DatasetSpec.source`."""
        return {source.spec.source: str(source.cache_file) for source in self.sources if source.cache_file}


def digest_of(*values: Any) -> str:
    """Returns a digest of JSON values, 32 hex digits."""
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=16).hexdigest()


def digest_of_arrays(*arrays: np.ndarray) -> str:
    """Returns a digest of the bytes of arrays, 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def cache_key_of(spec: DatasetSpec, split: str, *settings: object) -> str:
    """Returns a value for `DatasetIndex.cache_key`. ``settings``: JSON values that determine which images and labels
    are used."""
    return f"{split}-{digest_of(str(normal_path(spec.source)), *settings)}"
