"""The errors in each image, and a gallery of the images with the most, for a report.

Legend: D detections, E errors, M objects, N images.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.evaluation.analysis import CORRECT, KINDS, MISSED, find_errors
from engine.evaluation.matching import image_ranks, match_detections
from engine.issues.issue import CheckedSplit
from engine.report.gallery import source_of
from engine.report.photos import COLORS, PHOTO_SIDE, Album, Outline, Overlay, outlines
from utils.boxes import xywh_to_xyxy
from utils.detections import DetectionTable
from utils.drawing.page import Card, LegendEntry
from utils.labels import GroundTruth

# Name of each kind of error, in the order of `KINDS`, and style of its box.
KIND_WORDS = ("wrong class", "badly placed", "wrong class and badly placed", "duplicate", "spurious", "missed")
KIND_STYLES = ("class", "location", "both", "duplicate", "spurious", "missed")
KIND_LEGEND = (
    LegendEntry("correct", COLORS["correct"]),
    *(LegendEntry(words, COLORS[style]) for words, style in zip(KIND_WORDS, KIND_STYLES)),
    LegendEntry("label, not found", COLORS["label"]),
)
MAX_CARDS = 40
MAX_GALLERY_BYTES = 1_800_000  # total size of the gallery's JPEG files
MAX_BOXES = 60  # errors drawn in an image


class FoundBoxes(NamedTuple):
    """The detections that score above the threshold, and their outcomes (`Errors`)."""

    image: np.ndarray  # int64 (D,)
    classes: np.ndarray  # int64 (D,)
    scores: np.ndarray  # float64 (D,)
    boxes_xyxy_px: np.ndarray  # float64 (D, 4)
    outcome: np.ndarray  # int64 (D,)


class LabeledObjects(NamedTuple):
    """The labeled objects, and whether they are found (`Errors`)."""

    image: np.ndarray  # int64 (M,)
    classes: np.ndarray  # int64 (M,)
    boxes_xyxy_px: np.ndarray  # float64 (M, 4)
    crowd: np.ndarray  # bool (M,)
    detected: np.ndarray  # bool (M,)
    missed: np.ndarray  # bool (M,)


class ErrorList(NamedTuple):
    """All E errors: false positives, with the class of the detection, and missed objects, with their own class."""

    image: np.ndarray  # int64 (E,)
    classes: np.ndarray  # int64 (E,)
    kind: np.ndarray  # int64 (E,)


@dataclass(frozen=True, eq=False)
class ImageErrors:
    """Outcomes of detections that score above ``threshold`` and of objects, matched as COCO does at IoU 0.5."""

    threshold: float
    num_images: int
    found: FoundBoxes
    objects: LabeledObjects
    all: ErrorList

    @staticmethod
    def of(gt: GroundTruth, table: DetectionTable, num_classes: int, threshold: float) -> ImageErrors:
        matches = match_detections(gt, table.take(table.scores > threshold), num_classes)
        image_of_rank = np.argsort(image_ranks(gt.image_ids))
        outcomes = find_errors(matches)
        ranked = matches.ranked
        found = FoundBoxes(
            image=image_of_rank[ranked.group // num_classes],
            classes=ranked.classes,
            scores=ranked.scores,
            boxes_xyxy_px=ranked.boxes_xyxy,
            outcome=outcomes.outcome,
        )
        objects = LabeledObjects(
            image=image_of_rank[matches.objects.group // num_classes],
            classes=matches.object_classes,
            boxes_xyxy_px=xywh_to_xyxy(matches.objects.boxes_xywh),
            crowd=matches.objects.crowd,
            detected=outcomes.detected,
            missed=outcomes.missed,
        )
        false = found.outcome >= 0
        missed = objects.missed
        errors = ErrorList(
            image=np.r_[found.image[false], objects.image[missed]],
            classes=np.r_[found.classes[false], objects.classes[missed]],
            kind=np.r_[found.outcome[false], np.full(missed.sum(), MISSED)],
        )
        return ImageErrors(threshold, gt.num_images, found, objects, errors)

    def counts(self) -> np.ndarray:
        """Counts errors by image and kind: int64 (N, 6)."""
        cells = self.all.image * len(KINDS) + self.all.kind
        return np.bincount(cells, minlength=self.num_images * len(KINDS)).reshape(self.num_images, len(KINDS))

    def backgrounds(self) -> int:
        """Counts the images that have detections but no object."""
        return len(np.setdiff1d(self.found.image, self.objects.image))


def worst_images(errors: ImageErrors, max_images: int) -> list[int]:
    """Selects images with errors.

    The first half are those with the most errors (ties: the highest confidences of false positives). The others are the
    worst image for each pair of class and kind that has no example among these, the most frequent pairs first.
    """
    count = errors.counts().sum(1)
    found = errors.found
    false = found.outcome >= 0
    weight = np.bincount(found.image[false], found.scores[false], minlength=errors.num_images)
    order = np.lexsort((-weight, -count))
    order = order[count[order] > 0]
    rank = np.full(errors.num_images, order.size)
    rank[order] = np.arange(order.size)
    chosen = dict.fromkeys(order[: -(-max_images // 2)].tolist())
    examples: list[tuple[int, int]] = []  # number of errors of a pair of class and kind, and its worst image
    pairs = errors.all.classes * len(KINDS) + errors.all.kind
    for pair in np.unique(pairs):
        images = errors.all.image[pairs == pair]
        if chosen.keys().isdisjoint(images.tolist()):
            examples.append((images.size, int(images[np.argmin(rank[images])])))
    examples.sort(reverse=True)
    chosen |= dict.fromkeys(image for _, image in examples)
    chosen |= dict.fromkeys(order.tolist())
    return list(chosen)[:max_images]


def worst_gallery(split: CheckedSplit, errors: ImageErrors) -> list[Card]:
    """Creates cards of the images of ``split`` with the most errors, labels next to detections."""
    album = Album(MAX_GALLERY_BYTES)
    return [_card(split, errors, image, album) for image in worst_images(errors, MAX_CARDS)]


def _card(split: CheckedSplit, errors: ImageErrors, image: int, album: Album) -> Card:
    name = split.index.paths[image]
    class_names = split.index.names
    summary = _summary(errors, image)
    source = source_of(split, image)
    pictures = album.pictures(
        source,
        source.whole(),
        PHOTO_SIDE,
        Overlay("labels", f"Labels of {name}", _label_outlines(errors, image, class_names)),
        Overlay("detections", f"Detections in {name}: {summary}", _detection_outlines(errors, image, class_names)),
    )
    return Card(pictures, summary, name)


def _summary(errors: ImageErrors, image: int) -> str:
    """Counts the errors of an image, the most frequent kind first; equally frequent kinds are ordered by their most
    confident detection."""
    counts = Counter(KIND_WORDS[kind] for kind in errors.found.outcome[_wrong_detections(errors, image)].tolist())
    counts += Counter({KIND_WORDS[MISSED]: int(errors.objects.missed[errors.objects.image == image].sum())})
    return ", ".join(f"{count} {words}" for words, count in counts.most_common())


def _wrong_detections(errors: ImageErrors, image: int) -> np.ndarray:
    """Returns the rows of the false positives in an image, the most confident first: int64 (n,)."""
    found = errors.found
    rows = np.flatnonzero((found.image == image) & (found.outcome >= 0))
    return rows[np.argsort(-found.scores[rows], kind="stable")]


def _label_outlines(errors: ImageErrors, image: int, names: Sequence[str]) -> list[Outline]:
    """Outlines the labels of an image, except crowd regions; undetected ones are on top."""
    objects = errors.objects
    rows = np.flatnonzero((objects.image == image) & ~objects.crowd)
    is_detected = objects.detected[rows]
    boxes = objects.boxes_xyxy_px
    not_detected = [
        Outline(boxes[row], "missed" if objects.missed[row] else "label", names[objects.classes[row]])
        for row in rows[~is_detected][:MAX_BOXES].tolist()
    ]
    return not_detected + outlines(boxes[rows[is_detected]], "correct")


def _detection_outlines(errors: ImageErrors, image: int, names: Sequence[str]) -> list[Outline]:
    """Outlines the detections in an image; wrong ones are on top, the most confident first."""
    found = errors.found
    wrong_outlines = [
        Outline(
            found.boxes_xyxy_px[row],
            KIND_STYLES[found.outcome[row]],
            f"{names[found.classes[row]]} {found.scores[row]:.2f}",
        )
        for row in _wrong_detections(errors, image)[:MAX_BOXES].tolist()
    ]
    is_correct = (found.image == image) & (found.outcome == CORRECT)
    return wrong_outlines + outlines(found.boxes_xyxy_px[is_correct], "correct")
