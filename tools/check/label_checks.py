"""Scans the splits of a data set, and finds what is wrong with their files, boxes and classes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from data.index.index import Scan
from data.index.index_settings import IndexSettings
from data.index.load import scan_for_check
from data.labels.findings import UNKNOWN_CLASS, Finding
from data.source.dataset_spec import IGNORED, DatasetSpec
from engine.issues.issue import CheckedSplit, Issue, LabelBox, learned_names
from engine.issues.small_boxes import SMALL_PX, median_side, remedy_for_small_boxes
from tools.check.issue_kinds import (
    DOUBLED,
    IMBALANCE,
    NOT_CHECKED,
    NOT_TRAINED,
    SMALL_OBJECTS,
    TINY,
    TWO_CLASSES,
    UNUSED,
)
from utils.errors import UserError

SAME_IOU = 0.9  # boxes with a higher IoU are taken for the same object
MAX_SHIFT = (1 - SAME_IOU) / SAME_IOU  # between the left edges of two such boxes, as a fraction of either width
COMPARISONS = 1 << 18  # of two boxes at a time, which need some 50 MB
MAX_NEIGHBORS = 1000  # boxes that a box is compared with; no real image has that many boxes starting at one x
MAX_PARTNERS = 2  # earlier boxes that a box is paired with: this many of its class, and of other classes
TINY_PX = 3.0  # longer side at imgsz: less than half a cell of the finest level (stride 8)
SIZE_STEP = 32  # suggested sizes are multiples of the largest stride
# The frequencies of a class in two splits differ if their ratio and the significance of the difference exceed these.
MIN_RATIO = 2.0
MIN_DEVIATIONS = 4.0


def scan_dataset(spec: DatasetSpec, splits: tuple[str, ...], *, workers: int) -> list[CheckedSplit]:
    """Scans ``splits`` and decodes all images; nothing is cached. Raises UserError as `load_index`."""
    return [_scan_split(spec, split, workers) for split in splits]


def scan_readable(spec: DatasetSpec, *, workers: int) -> tuple[list[CheckedSplit], list[Issue]]:
    """Scans all splits as `scan_dataset` does. A split whose files are missing is an issue: some data sets are
    published without the images of their test split. Raises UserError if this is so for all splits."""
    scanned = []
    errors: dict[str, UserError] = {}  # by split
    for split in spec.splits:
        try:
            spec.check_split(split)
        except UserError as error:
            errors[split] = error
            continue
        scanned.append(_scan_split(spec, split, workers))
    if not scanned:
        raise next(iter(errors.values()))
    return scanned, [Issue(NOT_CHECKED, str(error), split) for split, error in errors.items()]


def _scan_split(spec: DatasetSpec, split: str, workers: int) -> CheckedSplit:
    return CheckedSplit(split, *scan_for_check(spec, split, IndexSettings(workers=workers)))


def scan_issues(split: CheckedSplit) -> list[Issue]:
    """Makes issues of the findings of the scan, sorted by kind."""
    issues = [issue for part in split.parts for issue in _issues_of(split, part)]
    return sorted(issues, key=lambda issue: issue.kind)


def _issues_of(split: CheckedSplit, part: Scan) -> list[Issue]:
    """Makes issues of the findings of a part of a split; those of shards name no images."""
    issues = []
    for finding in part.findings:
        location = split.relative(part, finding.where)
        images: tuple[str, ...] = ()
        if part.source is not None and finding.image >= 0:
            images = (split.relative(part, part.source.images[finding.image].name),)
        box = _finding_box(split, part, finding, location)
        issues.append(Issue(finding.kind, finding.message, split.name, images, location, () if box is None else (box,)))
    return issues


def _finding_box(split: CheckedSplit, part: Scan, finding: Finding, location: str) -> LabelBox | None:
    """Returns the labeled box that a finding is about; None if it is about none with finite corners."""
    if not finding.xyxy_px or not np.isfinite(finding.xyxy_px).all():
        return None
    if finding.kind == UNKNOWN_CLASS:
        name = finding.class_name
    else:
        name = learned_names(part)[finding.class_id] or part.spec.as_labeled().names[finding.class_id]
    number = split.index.names.index(name) if name in split.index.names else IGNORED
    return LabelBox(name, number, finding.xyxy_px, where=location)


class BoxPairs(NamedTuple):
    """Pairs of boxes of an image that nearly coincide. Boxes are numbered in the order of their labels."""

    earlier: np.ndarray  # int64 (P,): numbers of the boxes that come first
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
    """Returns pairs of boxes of an image with an IoU above `SAME_IOU`, without crowd regions and exact repetitions.

    A box is paired with a few earlier ones of its class, and of other classes: n copies would form n * n / 2 pairs.
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
            place = earlier.where or f"box {earlier.number}"
            partner = place if kind == DOUBLED else f"{earlier.class_name} in {place}"
            message = f"{later.class_name}, IoU {iou:.2f} with {partner}"
            issues.append(split.issue_of(kind, message, int(image[second]), (earlier, later)))
    return sorted(issues, key=lambda issue: (issue.kind, issue.images, *(box.number for box in issue.boxes)))


def _pairs_by_class(xywh: np.ndarray, image: np.ndarray, classes: np.ndarray) -> tuple[BoxPairs, BoxPairs]:
    """Returns the pairs of boxes of one class, and those of two, with at most `MAX_PARTNERS` earlier partners for each
    box. ``xywh``: float64 (n, 4); ``image``, ``classes``: int (n,)."""
    none = BoxPairs(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
    same_class = [none]
    other_class = [none]
    for pairs in _coinciding(xywh, image):
        is_same = classes[pairs.earlier] == classes[pairs.later]
        same_class.append(pairs.take(is_same).with_first_partners())  # here, too, or n copies would fill the memory
        other_class.append(pairs.take(~is_same).with_first_partners())
    same, other = (BoxPairs(*map(np.concatenate, zip(*parts))) for parts in (same_class, other_class))
    return same.with_first_partners(), other.with_first_partners()


def _coinciding(xywh: np.ndarray, image: np.ndarray) -> Iterator[BoxPairs]:
    """Yields all pairs of boxes of an image with an IoU above `SAME_IOU`, from `COMPARISONS` comparisons at a time.

    The left edges of two such boxes differ by at most `MAX_SHIFT` of either width. So boxes are put in the order of
    their left edges, with the images side by side, and each is compared with those before it that are near enough, but
    not with more than the `MAX_NEIGHBORS` last ones.
    """
    if not len(xywh):
        return
    x, y, w, _ = xywh.T
    reach = MAX_SHIFT * w + 1e-6  # of rounding, as positions are large with many images
    position = (x - x.min()) + image * (np.ptp(x) + reach.max() + 1)
    order = np.lexsort((y, position))  # by y in the rows of a table, which begin at the same x
    places = np.arange(len(order))
    first = np.searchsorted(position[order], (position - reach)[order])  # the first box that is near enough to each
    first = np.maximum(first, places - MAX_NEIGHBORS)
    chunks = np.cumsum(places - first) // COMPARISONS  # number of the chunk in which each box is compared
    for start, stop in _runs(chunks):
        box, neighbor = ragged_ranges(first[start:stop], (places - first)[start:stop])
        yield _coinciding_of(xywh, order[start + box], order[neighbor])


def _runs(values: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields the start and stop of each run of equal ``values``, int64 (n,), of which there is at least one."""
    bounds = np.flatnonzero(np.diff(values)) + 1
    yield from itertools.pairwise([0, *bounds.tolist(), len(values)])


def ragged_ranges(first: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers ``first[i], first[i] + 1, ...``, ``counts[i]`` of them for each i, as one array, and before
    it the i of each: int64 (sum of counts,). ``first``, ``counts``: int64 (n,)."""
    owner = np.repeat(np.arange(len(counts)), counts)
    begins = np.cumsum(counts) - counts  # position of the first number of each range
    return owner, first[owner] + np.arange(len(owner)) - begins[owner]


def _coinciding_of(xywh: np.ndarray, a: np.ndarray, b: np.ndarray) -> BoxPairs:
    """Returns those of the pairs of boxes ``a`` and ``b``, int64 (m,), whose IoU is above `SAME_IOU`."""
    x_a, y_a, w_a, h_a = xywh[a].T
    x_b, y_b, w_b, h_b = xywh[b].T
    width = np.minimum(x_a + w_a, x_b + w_b) - np.maximum(x_a, x_b)
    height = np.minimum(y_a + h_a, y_b + h_b) - np.maximum(y_a, y_b)
    overlap = np.maximum(width, 0) * np.maximum(height, 0)
    iou = overlap / (w_a * h_a + w_b * h_b - overlap)
    return BoxPairs(np.minimum(a, b), np.maximum(a, b), iou).take(iou > SAME_IOU)


def box_sizes(splits: Sequence[CheckedSplit], imgsz: int) -> list[Issue]:
    """Reports boxes that are tiny at ``imgsz``, and whether half of all objects are small."""
    issues = []
    all_sides = []
    for split in splits:
        sizes = split.index.sides_at(imgsz)
        rows = np.flatnonzero(~split.index.crowd)
        all_sides.append(np.sqrt(sizes.prod(1)))
        for i in np.flatnonzero(sizes.max(1, initial=0) < TINY_PX).tolist():
            w, h = sizes[i]
            issues.append(split.issue(TINY, f"{w:.1f}x{h:.1f} px at --imgsz {imgsz}", (int(rows[i]),)))
    median = median_side(np.concatenate(all_sides))
    remedy = remedy_for_small_boxes(median, imgsz, SIZE_STEP, tile=splits[0].index.tile)
    if remedy:
        size = f"the median object has {median:.3g} px (square root of its area) at --imgsz {imgsz}"
        issues.append(Issue(SMALL_OBJECTS, f"{size}, fewer than {SMALL_PX:.0f} px: {remedy}"))
    return issues


def class_use(splits: Sequence[CheckedSplit]) -> list[Issue]:
    """Reports classes without a box, and classes whose frequency differs between the training split and another one.

    The frequency is the fraction of images with an object of the class, since objects of one image are not independent.
    It differs if one is more than `MIN_RATIO` times the other and the two-proportion z-test gives `MIN_DEVIATIONS`.
    """
    names = splits[0].index.names
    counts = [_ClassCounts(split, len(names)) for split in splits]
    total = np.sum([split_counts.boxes for split_counts in counts], axis=0)
    split_names = ", ".join(split.name for split in splits)
    issues = [
        Issue(UNUSED, f"'{names[c]}' (class {c}) has no box in {split_names}") for c in np.flatnonzero(total == 0)
    ]
    train = next((split_counts for split_counts in counts if split_counts.split == "train"), None)
    for other in counts:
        if train is not None and other is not train:
            issues += _class_differences(train, other, names)
    return issues


class _ClassCounts:
    """The use of classes in a split."""

    def __init__(self, split: CheckedSplit, num_classes: int) -> None:
        self.split = split.name
        self.boxes = split.index.boxes_per_class(num_classes)  # int64 (C,)
        self.images = split.index.images_per_class(num_classes)  # int64 (C,)
        self.num_images = len(split.index)


def _class_differences(train: _ClassCounts, other: _ClassCounts, names: Sequence[str]) -> Iterator[Issue]:
    """Yields the classes that are scored without being trained, or whose frequencies in two splits differ."""
    for c in np.flatnonzero(train.boxes + other.boxes).tolist():
        message = (
            f"'{names[c]}': {train.boxes[c]:,} boxes in {train.images[c]:,} of {train.num_images:,} images of train, "
            f"{other.boxes[c]:,} in {other.images[c]:,} of {other.num_images:,} of {other.split}"
        )
        if train.boxes[c] == 0:
            yield Issue(NOT_TRAINED, message, other.split)
        elif _differ(train.images[c], train.num_images, other.images[c], other.num_images):
            yield Issue(IMBALANCE, message, other.split)


def _differ(count_a: int, total_a: int, count_b: int, total_b: int) -> bool:
    """Returns whether two frequencies differ by the limits of `class_use`."""
    if not total_a or not total_b:
        return False
    a = count_a / total_a
    b = count_b / total_b
    pooled = (count_a + count_b) / (total_a + total_b)
    deviation = math.sqrt(pooled * (1 - pooled) * (1 / total_a + 1 / total_b))
    return max(a, b) > MIN_RATIO * min(a, b) and abs(a - b) > MIN_DEVIATIONS * deviation
