"""Labels of many images in flat arrays, COCO image ids, and the class indices of ignore regions.

Legend: M boxes, N images, C classes. ``_px``: pixels of the original image, upright after EXIF rotation. ``xywh``:
top-left corner and size, as in COCO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_SCORED_DETECTIONS = 100  # COCO's
_MAX_ID_DIGITS = 18  # more digits may not fit into int64


def ignored_class(classes: np.ndarray) -> np.ndarray:
    """Converts class indices to those that mark ignore regions, and back.

    A region in which class c is ignored has the class -2 - c: -2 for class 0, -3 for class 1. A region in which every
    class is ignored has the class -1, which stays -1.
    """
    return -2 - classes


def image_ids_of(stems: Sequence[str]) -> tuple[int, ...] | tuple[str, ...]:
    """Returns COCO image ids for file stems: integers if all stems are digits (``000000000139`` is image 139) and give
    distinct integers, else the stems themselves."""
    if all(stem.isascii() and stem.isdigit() and len(stem) <= _MAX_ID_DIGITS for stem in stems):
        numbers = tuple(map(int, stems))
        if len(set(numbers)) == len(numbers):
            return numbers
    return tuple(stems)


def rows_of(offsets: np.ndarray, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the box rows of ``images``, int64 (n,), which may repeat, and the position in ``images`` of each row.

    ``offsets``: see `LabelArrays`.
    """
    starts = offsets[images]
    return ragged_ranges(starts, offsets[images + 1] - starts)


def ragged_ranges(first: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns two arrays, int64 (sum of counts,): for each i the ``counts[i]`` numbers ``first[i], first[i] + 1, ...``,
    and the i of each number. ``first``, ``counts``: int64 (n,)."""
    owner = np.repeat(np.arange(len(counts)), counts)
    begins = np.cumsum(counts) - counts  # position of the first number of each range
    return np.arange(len(owner)) + (first - begins)[owner], owner


class LabelArrays:
    """Base of `GroundTruth` and of a data set's index: labels of N images in flat arrays."""

    __slots__ = ()
    offsets: np.ndarray  # int64 (N + 1,): boxes of image i are offsets[i]:offsets[i + 1]
    classes: np.ndarray  # int (M,)
    crowd: np.ndarray  # bool (M,)

    @property
    def image_of_box(self) -> np.ndarray:
        """Image of each box: int64 (M,), ascending."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def boxes_per_class(self, num_classes: int) -> np.ndarray:
        """Counts the objects per class, without crowd regions: int64 (C,)."""
        return np.bincount(self.classes[~self.crowd], minlength=num_classes)

    def images_per_class(self, num_classes: int, weights: np.ndarray | None = None) -> np.ndarray:
        """Counts the images with at least one object of each class, without crowd regions: int64 (C,).

        With image ``weights`` (N,), sums the weights instead: float64 (C,).
        """
        pairs = np.unique((self.image_of_box * num_classes + self.classes)[~self.crowd])
        image_weights = None if weights is None else weights[pairs // num_classes]
        return np.bincount(pairs % num_classes, image_weights, minlength=num_classes)


@dataclass(frozen=True, slots=True)
class GroundTruth(LabelArrays):
    """Labels of a split for evaluation, in original pixels. Crowd boxes are ignore regions."""

    offsets: np.ndarray  # int64 (N + 1,): boxes of image i are offsets[i]:offsets[i + 1]
    boxes_xywh_px: np.ndarray  # float64 (M, 4)
    classes: np.ndarray  # int64 (M,) 0-based
    crowd: np.ndarray  # bool (M,)
    area_px: np.ndarray  # float64 (M,) object area (segment area if the source has it), for the size ranges
    image_hw: np.ndarray  # int32 (N, 2)
    image_ids: tuple[int | str, ...]  # COCO's ids if the source has them, else derived from file stems (`image_ids_of`)
    category_ids: tuple[int, ...]  # id written to COCO JSON for each 0-based class
    max_det: int = MAX_SCORED_DETECTIONS  # detections per class and image that are scored, highest scores first

    @property
    def num_images(self) -> int:
        return len(self.offsets) - 1
