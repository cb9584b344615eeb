"""Reports pairs of boxes that nearly coincide: doubled boxes, and boxes of two classes.

Legend: n boxes in a split, m compared pairs, P pairs with an IoU above `SAME_IOU`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from engine.issues.issue import CheckedSplit, Issue
from tools.check.issue_kinds import DOUBLED, TWO_CLASSES
from utils.labels import ragged_ranges

SAME_IOU = 0.9  # boxes with a higher IoU count as the same object
MAX_SHIFT = (1 - SAME_IOU) / SAME_IOU  # between the left edges of two such boxes, as a fraction of either width
COMPARISONS = 1 << 18  # pairs of boxes compared at a time, which needs some 50 MB
MAX_NEIGHBORS = 1000  # boxes that a box is compared with; no real image has that many boxes starting at one x
MAX_PARTNERS = 2  # maximum number of earlier boxes that a box is paired with, in its class and in other classes


class BoxPairs(NamedTuple):
    """Pairs of nearly coinciding boxes in an image. Boxes are numbered in the order of their labels."""

    earlier: np.ndarray  # int64 (P,): number of the first box of each pair
    later: np.ndarray  # int64 (P,)
    iou: np.ndarray  # float64 (P,): above `SAME_IOU`

    def take(self, rows: np.ndarray) -> BoxPairs:
        """Returns the pairs ``rows``, int64 or bool."""
        return BoxPairs(self.earlier[rows], self.later[rows], self.iou[rows])

    def with_first_partners(self) -> BoxPairs:
        """Returns the pairs of each later box with its first `MAX_PARTNERS` earlier ones."""
        ordered = self.take(np.lexsort((self.earlier, self.later)))
        rank = np.arange(len(ordered.later)) - np.searchsorted(ordered.later, ordered.later)
        return ordered.take(rank < MAX_PARTNERS)


def box_pairs(split: CheckedSplit) -> list[Issue]:
    """Returns pairs of boxes of an image with an IoU above `SAME_IOU`, except crowd regions and exact repetitions.

    A box is paired with only a few earlier boxes, because n copies would form n * n / 2 pairs.
    """
    index = split.index
    rows = np.flatnonzero(~index.crowd & ~index.repeated)
    image = index.image_of_box[rows]
    same_class, other_class = _pairs_by_class(index.boxes_xywh_px[rows], image, index.classes[rows])
    in_pairs = np.unique(np.concatenate([*same_class[:2], *other_class[:2]]))
    boxes = {number: split.box(int(rows[number])) for number in in_pairs.tolist()}
    issues = []
    for kind, pairs in ((DOUBLED, same_class), (TWO_CLASSES, other_class)):
        for first, second, iou in zip(*(array.tolist() for array in pairs)):
            earlier = boxes[first]
            later = boxes[second]
            location = earlier.where or f"box {earlier.number}"
            partner = location if kind == DOUBLED else f"{earlier.class_name} in {location}"
            message = f"{later.class_name}, IoU {iou:.2f} with {partner}"
            issues.append(split.issue_of(kind, message, int(image[second]), (earlier, later)))
    return sorted(issues, key=lambda issue: (issue.kind, issue.images, *(box.number for box in issue.boxes)))


def _pairs_by_class(xywh: np.ndarray, image: np.ndarray, classes: np.ndarray) -> tuple[BoxPairs, BoxPairs]:
    """Returns the pairs of boxes of one class, and of two classes, with at most `MAX_PARTNERS` earlier partners for
    each box. ``xywh``: float64 (n, 4); ``image``, ``classes``: int (n,)."""
    none = BoxPairs(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
    same_class = [none]
    other_class = [none]
    for pairs in _coinciding(xywh, image):
        is_same = classes[pairs.earlier] == classes[pairs.later]
        same_class.append(pairs.take(is_same).with_first_partners())  # already here, or n copies would fill the memory
        other_class.append(pairs.take(~is_same).with_first_partners())
    same, other = (BoxPairs(*map(np.concatenate, zip(*parts))) for parts in (same_class, other_class))
    return same.with_first_partners(), other.with_first_partners()


def _coinciding(xywh: np.ndarray, image: np.ndarray) -> Iterator[BoxPairs]:
    """Yields all pairs of boxes of an image with an IoU above `SAME_IOU`, from `COMPARISONS` comparisons at a time.

    The left edges of two such boxes differ by at most `MAX_SHIFT` of either width. Therefore boxes are sorted by their
    left edges, with the images side by side, and each box is compared with the preceding ones that are near enough, at
    most the last `MAX_NEIGHBORS`.
    """
    if not len(xywh):
        return
    x, y, w, _ = xywh.T
    reach = MAX_SHIFT * w + 1e-6  # for rounding: positions are large with many images
    position = (x - x.min()) + image * (np.ptp(x) + reach.max() + 1)
    order = np.lexsort((y, position))  # then by y, for the rows of a table, which begin at the same x
    rank = np.arange(len(order))
    first = np.searchsorted(position[order], (position - reach)[order])  # the first box that is near enough to each
    first = np.maximum(first, rank - MAX_NEIGHBORS)
    chunks = np.cumsum(rank - first) // COMPARISONS  # number of the chunk in which each box is compared
    for start, stop in _runs(chunks):
        neighbor, box = ragged_ranges(first[start:stop], (rank - first)[start:stop])
        yield _coinciding_of(xywh, order[start + box], order[neighbor])


def _runs(values: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields the start and stop of each run of equal ``values``, int64 (n,), n at least 1."""
    bounds = np.flatnonzero(np.diff(values)) + 1
    yield from itertools.pairwise([0, *bounds.tolist(), len(values)])


def _coinciding_of(xywh: np.ndarray, a: np.ndarray, b: np.ndarray) -> BoxPairs:
    """Returns the pairs among ``a`` and ``b``, int64 (m,), whose boxes have an IoU above `SAME_IOU`."""
    x_a, y_a, w_a, h_a = xywh[a].T
    x_b, y_b, w_b, h_b = xywh[b].T
    width = np.minimum(x_a + w_a, x_b + w_b) - np.maximum(x_a, x_b)
    height = np.minimum(y_a + h_a, y_b + h_b) - np.maximum(y_a, y_b)
    overlap = np.maximum(width, 0) * np.maximum(height, 0)
    iou = overlap / (w_a * h_a + w_b * h_b - overlap)
    return BoxPairs(np.minimum(a, b), np.maximum(a, b), iou).take(iou > SAME_IOU)
