"""Scans the splits of a data set, and finds what is wrong with their files, boxes and classes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from data.index.index import Scan
from data.index.index_settings import IndexSettings
from data.index.load import scan_for_check
from data.labels.findings import UNKNOWN_CLASS, Finding
from data.source.dataset_spec import IGNORED, DatasetSpec
from engine.evaluation.issues import CheckedSplit, Issue, LabelBox, learned_names
from engine.evaluation.small_boxes import SMALL_PX, median_side, remedy_for_small_boxes
from tools.check.issue_kinds import DOUBLED, IMBALANCE, NOT_TRAINED, SMALL_OBJECTS, TINY, TWO_CLASSES, UNUSED

SAME_IOU = 0.9  # boxes with a higher IoU are taken for the same object
MAX_SHIFT = (1 - SAME_IOU) / SAME_IOU  # between the left edges of two such boxes, as a fraction of either width
MAX_PARTNERS = 2  # earlier boxes that a box is paired with: this many of its class, and of other classes
TINY_PX = 3.0  # longer side at imgsz: less than half a cell of the finest level (stride 8)
SIZE_STEP = 32  # suggested sizes are multiples of the largest stride
# The frequencies of a class in two splits differ if their ratio and the significance of the difference exceed these.
MIN_RATIO = 2.0
MIN_DEVIATIONS = 4.0


def scan_dataset(spec: DatasetSpec, splits: tuple[str, ...], *, workers: int) -> list[CheckedSplit]:
    """Scans ``splits`` and decodes all images; nothing is cached. Raises UserError as `load_index`."""
    scanned = []
    for split in splits:
        index, scans = scan_for_check(spec, split, IndexSettings(workers=workers))
        scanned.append(CheckedSplit(split, index, scans))
    return scanned


def scan_issues(split: CheckedSplit) -> list[Issue]:
    """Returns the findings of the scan, sorted by kind."""
    issues = [issue for part in split.parts for issue in _issues_of(split, part)]
    return sorted(issues, key=lambda issue: issue.kind)


def _issues_of(split: CheckedSplit, part: Scan) -> list[Issue]:
    """Returns the findings of a part of a split; those of shards name no images."""
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


def box_pairs(split: CheckedSplit) -> list[Issue]:
    """Returns pairs of boxes of an image with an IoU above `SAME_IOU`, without crowd regions and exact repetitions.

    A box is paired with a few earlier ones of its class, and of other classes: n copies would form n * n / 2 pairs.
    """
    index = split.index
    rows = np.flatnonzero(~index.crowd & ~index.repeated)
    image = index.image_of_box[rows]
    classes = index.classes[rows]
    xywh = index.boxes_xywh_px[rows]
    same_class = _overlapping(xywh, image * len(index.names) + classes, classes, differing=False)
    other_class = _overlapping(xywh, image, classes, differing=True)
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


def _overlapping(
    xywh: np.ndarray, groups: np.ndarray, classes: np.ndarray, *, differing: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Finds pairs of boxes with an IoU above `SAME_IOU`, at most `MAX_PARTNERS` with earlier partners for each box.

    Boxes are sorted by the left edge, so those that nearly coincide are neighbors. Here b may overlap a and c; d begins
    too far from c, which ends the search from c to the right, and e is of another group::

        a  |---------|
        b   |---------|                     from b to the left:  a            (then there is none)
        c     |--------|                    from b to the right: c, d         (d is too far)
        d                |------|           from d to the left:  c            (too far)
        e  |---------|                      of another group, behind all of this one

    All boxes take a step at a time, as arrays: ``other`` moves one place further from each ``box``, and boxes leave
    when they have enough partners or ``other`` is too far. The second direction adds the partners on the other side.

    Args:
        xywh: the boxes, float64 (n, 4).
        groups: int (n,); boxes of the same group are compared with each other.
        classes: int (n,).
        differing: compare only boxes of different classes.

    Returns:
        The number of the earlier box, int64 (p,), that of the later one, and their IoU, float64 (p,).
    """
    boxes = _SortedBoxes(xywh, groups, classes)
    num_partners = np.zeros(len(xywh), np.int64)  # found for each box
    pairs = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))]
    for direction in (-1, 1):
        # Every box is compared with its neighbor, the next one, and so on, as long as these may overlap it.
        box = np.flatnonzero(num_partners < MAX_PARTNERS)
        other = box
        while box.size:
            other = boxes.next_of_other_class(box, other, direction) if differing else other + direction
            may_overlap = boxes.may_overlap(box, other)
            box = box[may_overlap]
            other = other[may_overlap]
            iou = boxes.iou(box, other)
            is_pair = (iou > SAME_IOU) & (boxes.number[other] < boxes.number[box])
            pairs.append((boxes.number[other[is_pair]], boxes.number[box[is_pair]], iou[is_pair]))
            num_partners[box[is_pair]] += 1
            needs_partners = num_partners[box] < MAX_PARTNERS
            box = box[needs_partners]
            other = other[needs_partners]
    earlier, later, iou = (np.concatenate(arrays) for arrays in zip(*pairs))
    return earlier, later, iou


class _SortedBoxes:
    """Boxes in the order of their groups, and within a group by position, so that all partners of a box are near it.

    Methods take positions in this order, int64 (m,); -1 and n are before the first and after the last box.
    """

    def __init__(self, xywh: np.ndarray, groups: np.ndarray, classes: np.ndarray) -> None:
        """Sorts ``xywh``, float64 (n, 4), with ``groups`` and ``classes``, int (n,)."""
        position, size = _along_longer_side(xywh, groups)
        self.number = np.lexsort((position, groups))  # int64 (n,): of each box before it was sorted
        self._position = position[self.number]
        self._size = size[self.number]
        self._group = groups[self.number]
        self._class = classes[self.number]
        self._x, self._y, self._w, self._h = xywh[self.number].T
        # Boxes of one class that follow each other are a run: int64 (n,), its number, and the positions around it.
        run = np.cumsum(np.diff(self._class, prepend=self._class[:1]) != 0)
        self._after_run = np.searchsorted(run, run, side="right")
        self._before_run = np.searchsorted(run, run) - 1

    def next_of_other_class(self, box: np.ndarray, other: np.ndarray, direction: int) -> np.ndarray:
        """Returns the position of the next box after ``other`` whose class is not that of ``box``."""
        position = other + direction
        inside = position.clip(0, len(self.number) - 1)
        beyond_run = self._after_run if direction > 0 else self._before_run
        return np.where(self._class[inside] == self._class[box], beyond_run[inside], position)

    def may_overlap(self, box: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Returns whether boxes are of one group and near enough for an IoU above `SAME_IOU`: bool (m,). ``other`` may
        be outside."""
        inside = other.clip(0, len(self.number) - 1)
        is_near = np.abs(self._position[inside] - self._position[box]) <= MAX_SHIFT * self._size[box]
        return (inside == other) & (self._group[inside] == self._group[box]) & is_near

    def iou(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Returns the IoU of boxes: float64 (m,)."""
        x, y, w, h = self._x, self._y, self._w, self._h
        width = np.minimum(x[a] + w[a], x[b] + w[b]) - np.maximum(x[a], x[b])
        height = np.minimum(y[a] + h[a], y[b] + h[b]) - np.maximum(y[a], y[b])
        overlap = np.maximum(width, 0) * np.maximum(height, 0)
        return overlap / (w[a] * h[a] + w[b] * h[b] - overlap)


def _along_longer_side(xywh: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns left edges and widths of boxes (n, 4), or top edges and heights where the boxes of a group, (n,), are
    spread more vertically, like the rows of a table, which all begin at the same x."""
    if not len(xywh):
        return xywh[:, 0], xywh[:, 2]
    _, group = np.unique(groups, return_inverse=True)
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    corners = xywh[order, :2]
    sizes = xywh[order, 2:]
    extent = np.maximum.reduceat(corners, starts) - np.minimum.reduceat(corners, starts)
    spread = extent / np.maximum.reduceat(sizes, starts)
    along_y = (spread[:, 1] > spread[:, 0])[group]
    return np.where(along_y, xywh[:, 1], xywh[:, 0]), np.where(along_y, xywh[:, 3], xywh[:, 2])


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
