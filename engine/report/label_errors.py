"""Problems of labels: an `Issue` names boxes of a `CheckedSplit`; and the labels that a model contradicts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from data.index import DatasetIndex, LoadedSplit
from data.spec import IGNORED
from engine.evaluation.analysis import BACKGROUND_IOU
from engine.evaluation.matching import Objects, overlapping_pairs
from utils.boxes import clip_xyxy, scale_boxes, xywh_to_xyxy, xyxy_to_cxcywh, xyxy_to_xywh
from utils.detections import DetectionTable
from utils.files.paths import path_of, relative_name
from utils.strings import listed

SAME_OBJECT = 0.5  # minimum IoU of a detection and a label of one object
MIN_AP50 = 0.5  # labels of classes with a lower AP50 are not judged


class IssueKind(NamedTuple):
    """A kind of issue, its meaning, and the remedy for one issue."""

    name: str
    meaning: str
    remedy: str


MISSING_LABEL = IssueKind(
    "missing label",
    "the model is sure of an object that is not labeled",
    "add the label; its class may be another that the model has not learned",
)
WRONG_CLASS = IssueKind("wrong class", "the model is sure of another class", "change the class")
LABEL_ERRORS = (MISSING_LABEL, WRONG_CLASS)  # these need a model


@dataclass(frozen=True, slots=True)
class LabelBox:
    """A labeled or suggested box."""

    class_name: str
    class_id: int
    xyxy_px: tuple[float, ...]  # original pixels
    where: str | None = None  # label file and line (COCO: and annotation id)

    def content(self) -> dict[str, Any]:
        """Converts to plain data for JSON, without unknown values."""
        values = asdict(self) | {"xyxy_px": [round(v, 2) for v in self.xyxy_px]}
        return {key: value for key, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Issue:
    """A certain or probable problem of a data set. Files are relative to the data set's folder."""

    kind: IssueKind
    text: str  # the problem, in words
    split: str = ""  # empty: the whole data set
    images: tuple[str, ...] = ()
    where: str = ""  # file and line to correct; empty: the first image
    boxes: tuple[LabelBox, ...] = ()  # as labeled, all in the first image
    score: float | None = None  # of label errors, 0 to 1, see `find_label_errors`
    suggestion: LabelBox | None = None  # for label errors: the corrected label
    splits: tuple[str, ...] = ()  # splits of ``images``, if there are several

    def __str__(self) -> str:
        location = self.where or next(iter(self.images), self.split)
        score = "" if self.score is None else f"{self.score:.2f} "
        return f"{score}{location}: {self.text}" if location else f"{score}{self.text}"

    def content(self) -> dict[str, Any]:
        """Converts to plain data for JSON, without empty values."""
        boxes = [box.content() for box in self.boxes]
        suggestion = self.suggestion.content() if self.suggestion else None
        values = asdict(self) | {"kind": self.kind.name, "boxes": boxes, "suggestion": suggestion}
        return {key: value for key, value in values.items() if value not in (None, "", (), [])}


@dataclass(frozen=True)
class CheckedSplit:
    """A split of N usable images and M boxes, as training reads it."""

    name: str
    index: DatasetIndex
    parts: tuple[LoadedSplit, ...] = ()  # the joined data sets, or the split itself; empty: unknown

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Number of each usable image by its path."""
        return {path: number for number, path in enumerate(self.index.paths)}

    @cached_property
    def _labeled_images(self) -> dict[str, tuple[LoadedSplit, int] | None]:
        """The data set that labels an image, and its number there, by path; None if several data sets do."""
        labeled: dict[str, tuple[LoadedSplit, int] | None] = {}
        for part in self.parts:
            for number, name in enumerate(part.labels.images if part.labels else ()):
                path = self.relative(part, name)
                labeled[path] = None if path in labeled else (part, number)
        return labeled

    def image_of(self, row: int) -> int:
        """Returns the image of box ``row``."""
        return int(np.searchsorted(self.index.offsets, row, side="right")) - 1

    def box(self, row: int) -> LabelBox:
        """Returns box ``row`` of the split."""
        index = self.index
        image = self.image_of(row)
        where = None
        labeled = self._labeled_images.get(index.paths[image])
        if labeled is not None and index.row_number[row] >= 0:
            part, number = labeled
            assert part.labels is not None, "it labels the image"
            where = self.relative(part, part.labels.where(number, int(index.row_number[row])))
        return LabelBox(
            class_name=index.names[index.classes[row]],
            class_id=int(index.classes[row]),
            xyxy_px=tuple(xywh_to_xyxy(index.boxes_xywh_px[row]).tolist()),
            where=where,
        )

    def issue(self, kind: IssueKind, text: str, *rows: int) -> Issue:
        """Creates an issue about boxes of one image."""
        boxes = tuple(map(self.box, rows))
        image = self.index.paths[self.image_of(rows[0])]
        return Issue(kind, text, self.name, (image,), boxes[-1].where or "", boxes)

    def relative(self, part: LoadedSplit, name: str) -> str:
        """Converts ``name``, a path relative to the folder of ``part``, to a path relative to the data set's folder."""
        if part.full.root == self.index.root:
            return name
        return relative_name(path_of(name, part.full.root), self.index.root)

    def corrected_row(self, image: str, box: LabelBox) -> str:
        """Returns ``box`` as a row of YOLO's format if the labels of ``image`` have it, else in words."""
        height, width = self.index.image_hw[self.numbers[image]].tolist()
        corners = np.array(box.xyxy_px)
        part, _ = self._labeled_images.get(image) or (None, 0)
        is_yolo = part is not None and part.labels is not None and part.labels.format.name == "yolo"
        names = learned_names(part) if part is not None and is_yolo else []
        if box.class_name not in names:
            return f"{box.class_name}, corners {', '.join(f'{v:.1f}' for v in corners)} px"
        cxcywh = scale_boxes(xyxy_to_cxcywh(clip_xyxy(corners, width, height)), 1 / width, 1 / height)
        return " ".join([str(names.index(box.class_name)), *(f"{v:.6f}" for v in cxcywh)])


def learned_names(part: LoadedSplit) -> list[str | None]:
    """Returns the model's name for each class of the labels; None: the class is ignored."""
    names: dict[int, str | None] = {IGNORED: None}
    names.update(enumerate(part.spec.names))
    return [names[number] for number in part.spec.class_of or range(len(part.spec.names))]


def find_label_errors(
    split: CheckedSplit, table: DetectionTable, class_ap50: np.ndarray, min_score: float = 0.0
) -> list[Issue]:
    """Finds objects without a label, and labels of another class, that a model contradicts with confidence.

    A detection is confident if it scores at least the mean of the best detections of its class's labels, as in
    confident learning (Northcutt, Jiang, Chuang 2021). If it overlaps no label by `SAME_OBJECT`, that of its object is
    missing, with its confidence as the score, unless it overlaps a label of its class by `BACKGROUND_IOU`: then it is
    misplaced. If it is the best on a label of another class, this class is wrong; the score is how much it exceeds the
    best detection of the label's own class.

    Crowd regions explain detections; they and repeated rows are not examined.

    Args:
        table: all detections of the model, D.
        class_ap50: AP50 of each class, float (C,). Classes below `MIN_AP50` are neither judged nor suggested.

    Returns issues that score at least ``min_score``, the highest first.
    """
    truth = split.index.ground_truth()
    row_of = split.index.rows_of_ground_truth()
    table = table.take(np.argsort(table.image_index, kind="stable"))
    objects = Objects(truth.image_of_box, truth.boxes_xywh_px, truth.crowd)
    near = overlapping_pairs(table.image_index, table.boxes_xyxy_px, objects, BACKGROUND_IOU)
    pairs = near.take(near.overlap >= SAME_OBJECT)
    score = table.scores[pairs.detection]
    is_own_class = table.classes[pairs.detection] == truth.classes[pairs.target]
    own_score = np.zeros(len(truth.classes))  # best of each label's own class
    np.maximum.at(own_score, pairs.target[is_own_class], score[is_own_class])

    confident = np.full(len(split.index.names), np.inf)  # by class
    for c in np.flatnonzero(np.nan_to_num(class_ap50) >= MIN_AP50):
        found = own_score[(truth.classes == c) & (own_score > 0)]
        if found.size:
            confident[c] = found.mean()
    is_confident = table.scores >= confident[table.classes]

    errors = []
    is_examined = ~truth.crowd & ~split.index.repeated[row_of] & np.isfinite(confident[truth.classes])
    other = pairs.take(~is_own_class & is_confident[pairs.detection] & is_examined[pairs.target])
    best = dict(zip(other.target.tolist(), other.detection.tolist()))
    for label, detection in zip(other.target.tolist(), other.detection.tolist()):
        if table.scores[detection] > table.scores[best[label]]:
            best[label] = detection
    for label, detection in best.items():
        errors.append((float(table.scores[detection] - own_score[label]), detection, int(row_of[label])))

    is_misplaced = (table.classes[near.detection] == truth.classes[near.target]) & ~truth.crowd[near.target]
    is_confident[near.detection[(near.overlap >= SAME_OBJECT) | is_misplaced]] = False  # explained by a label
    rows = np.flatnonzero(is_confident)
    rows = rows[_is_best_of_object(table.take(rows))]
    errors += [(float(table.scores[row]), row, -1) for row in rows.tolist()]
    errors.sort(key=lambda error: (-error[0], error[1]))
    return [_issue(split, table, *error) for error in errors if error[0] > 0 and error[0] >= min_score]


def _is_best_of_object(table: DetectionTable) -> np.ndarray:
    """Returns whether no detection of any class that overlaps one by `SAME_OBJECT` has a higher score: bool (D,)."""
    objects = Objects(table.image_index, xyxy_to_xywh(table.boxes_xyxy_px), np.zeros(len(table.scores), bool))
    near = overlapping_pairs(table.image_index, table.boxes_xyxy_px, objects, SAME_OBJECT)
    rank = np.argsort(np.argsort(-table.scores, kind="stable"))
    is_best = np.ones(len(table.scores), bool)
    is_best[near.detection[rank[near.detection] > rank[near.target]]] = False
    return is_best


def _issue(split: CheckedSplit, table: DetectionTable, score: float, detection: int, label: int) -> Issue:
    """Creates the issue of a label, or of a missing one (-1)."""
    class_id = int(table.classes[detection])
    name = split.index.names[class_id]
    labeled = () if label < 0 else (split.box(label),)
    what = labeled[0].class_name if labeled else "object without a label"
    corners = labeled[0].xyxy_px if labeled else tuple(table.boxes_xyxy_px[detection].tolist())
    return Issue(
        kind=WRONG_CLASS if labeled else MISSING_LABEL,
        text=f"{what} that looks like {name}",
        split=split.name,
        images=(split.index.paths[int(table.image_index[detection])],),
        where=(labeled[0].where or "") if labeled else "",
        boxes=labeled,
        score=round(score, 4),
        suggestion=LabelBox(name, class_id, corners),
    )


def unjudged_classes(class_ap50: np.ndarray, names: Iterable[str]) -> list[str]:
    """Returns a sentence that names the classes whose labels `find_label_errors` does not judge, if there are any."""
    weak = [f"{name} (AP50 {ap50:.2f})" for name, ap50 in zip(names, class_ap50.tolist()) if ap50 < MIN_AP50]
    return [f"The model is too weak to judge labels of {listed(weak)}."] if weak else []
