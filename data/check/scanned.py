"""A scanned split: where its boxes are in the label files, and what is wrong with its files, boxes and classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data.check.issues import DOUBLED, IMBALANCE, NOT_TRAINED, SMALL_OBJECTS, TINY, TWO_CLASSES, UNUSED, Box, Issue
from data.index.index import SMALL_PX, DatasetIndex, Scan, median_side, remedy_for_small_boxes
from data.index.load import load_index
from data.labels.findings import UNKNOWN_CLASS
from data.spec.dataset_spec import IGNORED, DatasetSpec
from utils.boxes import xywh_to_xyxy
from utils.files.paths import path_of, relative_name

SAME_IOU = 0.9  # boxes that overlap by more are about the same object
TINY_PX = 3.0  # longer side at imgsz; less than half a cell of the finest level (stride 8)
SIZE_STEP = 32  # suggested sizes are multiples of the largest stride
MIN_RATIO, MIN_DEVIATIONS = 2.0, 4.0  # of a class's frequency in two splits: how different, how significant


class CheckedSplit(NamedTuple):
    """A split of N usable images and M boxes, as training reads it."""

    name: str
    index: DatasetIndex
    parts: tuple[Scan, ...] = ()  # in the order of the images; empty: not known

    def box(self, row: int) -> Box:
        index = self.index
        image = self.image_of(row)
        return Box(
            index.names[index.classes[row]],
            int(index.classes[row]),
            tuple(xywh_to_xyxy(index.boxes_xywh_px[row]).tolist()),
            int(row - index.offsets[image]),
            self._where(row, image),
        )

    def image_of(self, row: int) -> int:
        return int(np.searchsorted(self.index.offsets, row, side="right")) - 1

    def part_of(self, image: int) -> tuple[Scan, int] | None:
        """The part that ``image`` is from, and its number in the label files; None if these are not known."""
        for part in self.parts:
            if image < len(part.index):
                return part.source and (part, int(part.numbers[image]))
            image -= len(part.index)
        return None

    def issue(self, kind: str, text: str, rows: tuple[int, ...]) -> Issue:
        """An issue about boxes of one image."""
        boxes = tuple(map(self.box, rows))
        image = self.index.paths[self.image_of(rows[0])]
        return Issue(kind, text, self.name, (image,), boxes[-1].where or "", boxes)

    def relative(self, part: Scan, name: str) -> str:
        """``name``, relative to the folder of ``part``, relative to that of the data set."""
        if part.index.root == self.index.root:
            return name
        return relative_name(path_of(name, part.index.root), self.index.root)

    def _where(self, row: int, image: int) -> str | None:
        line, found = int(self.index.line[row]), self.part_of(image)
        if line < 0 or found is None:
            return None
        part, number = found
        return self.relative(part, part.source.where(number, line))


def learned_names(part: Scan) -> list[str | None]:
    """What the classes of the labels are called for the model; None: they are ignored."""
    names = {IGNORED: None} | dict(enumerate(part.spec.names))
    return [names[number] for number in part.spec.class_of or range(len(part.spec.names))]


def scan_dataset(spec: DatasetSpec, splits: tuple[str, ...], *, workers: int) -> list[CheckedSplit]:
    """Scans ``splits`` and decodes all images; nothing is cached. Raises UserError as `load_index`."""
    scanned = []
    for split in splits:
        parts: list[Scan] = []
        index = load_index(spec, split, workers=workers, checked=parts)
        scanned.append(CheckedSplit(split, index, tuple(parts)))
    return scanned


def scan_issues(split: CheckedSplit) -> list[Issue]:
    """The findings of the scan, by kind."""
    issues = [issue for part in split.parts for issue in _issues_of(split, part)]
    return sorted(issues, key=lambda issue: issue.kind)


def _issues_of(split: CheckedSplit, part: Scan) -> list[Issue]:
    if part.source is None:
        lines = (line.split(": ", 2) for line in part.index.report.lines if line.count(": ") > 1)
        return [Issue(kind, text, split.name, (), split.relative(part, where)) for where, kind, text in lines]

    issues = []
    for found in part.findings:
        where, images, boxes = split.relative(part, found.where), (), ()
        if found.image >= 0:
            images = (split.relative(part, part.source.images[found.image].name),)
        if found.xyxy_px and np.isfinite(found.xyxy_px).all():
            name = found.text.partition(" is not ")[0].strip("'")  # of an unknown class
            if found.kind != UNKNOWN_CLASS:
                name = learned_names(part)[found.class_id] or part.index.names[found.class_id]
            number = split.index.names.index(name) if name in split.index.names else IGNORED
            boxes = (Box(name, number, found.xyxy_px, where=where),)
        issues.append(Issue(found.kind, found.text, split.name, images, where, boxes))
    return issues


def box_pairs(split: CheckedSplit) -> list[Issue]:
    """Pairs of boxes of an image with an IoU above `SAME_IOU`, without crowd regions and exact repetitions."""
    index = split.index
    rows = np.flatnonzero(~index.crowd & ~index.repeated)
    image = index.image_of_box[rows]
    x, y, w, h = index.boxes_xywh_px[rows].T
    issues, distance = [], 1
    while (a := np.flatnonzero(image[distance:] == image[:-distance])).size:  # rows of an image are adjacent
        b, distance = a + distance, distance + 1
        width = np.minimum(x[a] + w[a], x[b] + w[b]) - np.maximum(x[a], x[b])
        height = np.minimum(y[a] + h[a], y[b] + h[b]) - np.maximum(y[a], y[b])
        overlap = np.maximum(width, 0) * np.maximum(height, 0)
        iou = overlap / (w[a] * h[a] + w[b] * h[b] - overlap)
        for i in np.flatnonzero(iou > SAME_IOU).tolist():
            pair = int(rows[a[i]]), int(rows[b[i]])
            name, other = (index.names[index.classes[row]] for row in pair)
            box = split.box(pair[0])
            earlier = box.where or f"box {box.number}"
            kind, what = (DOUBLED, earlier) if name == other else (TWO_CLASSES, f"{name} in {earlier}")
            issues.append(split.issue(kind, f"{other}, IoU {iou[i]:.2f} with {what}", pair))
    return sorted(issues, key=lambda issue: (issue.kind, issue.images, issue.boxes[0].number))


def box_sizes(splits: Sequence[CheckedSplit], imgsz: int) -> list[Issue]:
    """Boxes that are tiny at ``imgsz``, and whether half of all objects are small."""
    issues, all_sizes = [], []
    for split in splits:
        sizes, rows = split.index.sides_at(imgsz), np.flatnonzero(~split.index.crowd)
        all_sizes.append(np.sqrt(sizes.prod(1)))
        for i in np.flatnonzero(sizes.max(1, initial=0) < TINY_PX).tolist():
            w, h = sizes[i]
            issues.append(split.issue(TINY, f"{w:.1f}x{h:.1f} px at --imgsz {imgsz}", (int(rows[i]),)))
    median = median_side(np.concatenate(all_sizes))
    if remedy := remedy_for_small_boxes(median, imgsz, SIZE_STEP, tile=splits[0].index.tile):
        text = f"the median object has {median:.3g} px (square root of its area) at --imgsz {imgsz}"
        issues.append(Issue(SMALL_OBJECTS, f"{text}, fewer than {SMALL_PX:.0f} px: {remedy}"))
    return issues


def class_use(splits: Sequence[CheckedSplit]) -> list[Issue]:
    """Classes without a box, and classes whose frequency differs between the training split and another one.

    The frequency is the fraction of images with an object of the class, since objects of one image are not independent.
    It differs if one is more than `MIN_RATIO` times the other and the two-proportion z-test gives `MIN_DEVIATIONS`.
    """
    names = splits[0].index.names
    boxes = np.array([s.index.boxes_of_classes(len(names)) for s in splits])
    images = np.array([s.index.images_of_classes(len(names)) for s in splits])
    issues = [
        Issue(UNUSED, f"'{names[c]}' (class {c}) has no box in {', '.join(s.name for s in splits)}")
        for c in np.flatnonzero(boxes.sum(0) == 0)
    ]
    train = next((i for i, s in enumerate(splits) if s.name == "train"), None)
    if train is None:
        return issues
    for i, split in enumerate(splits):
        if i == train:
            continue
        for c in np.flatnonzero(boxes.sum(0)).tolist():
            text = f"'{names[c]}': {boxes[train, c]:,} boxes in {images[train, c]:,} of {len(splits[train].index):,} "
            text += f"images of train, {boxes[i, c]:,} in {images[i, c]:,} of {len(split.index):,} of {split.name}"
            if boxes[train, c] == 0 and boxes[i, c]:
                issues.append(Issue(NOT_TRAINED, text, split.name))
            elif _differ(images[train, c], len(splits[train].index), images[i, c], len(split.index)):
                issues.append(Issue(IMBALANCE, text, split.name))
    return issues


def _differ(count_a: int, total_a: int, count_b: int, total_b: int) -> bool:
    if not total_a or not total_b:
        return False
    a, b = count_a / total_a, count_b / total_b
    pooled = (count_a + count_b) / (total_a + total_b)
    deviation = math.sqrt(pooled * (1 - pooled) * (1 / total_a + 1 / total_b))
    return max(a, b) > MIN_RATIO * min(a, b) and abs(a - b) > MIN_DEVIATIONS * deviation
