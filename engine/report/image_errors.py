"""The errors in each image, and a gallery of the images with the most, for a report.

Legend: D detections, M objects, N images.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

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


class ImageErrors:
    """Outcomes of detections that score above ``threshold`` and of objects, matched as COCO does at IoU 0.5.

    Attributes:
        detections: D detections; ``image`` int64 (D,) and ``outcome`` int64 (D,), see `Errors`.
        object_image, object_classes, crowd, object_boxes_xyxy_px: M objects, with ``detected`` and ``missed`` bool
            (M,), see `Errors`.
        error_image, error_class, error_kind: all errors, int64 (E,): false positives, with the class of the detection,
            and missed objects, with their own class.
    """

    def __init__(self, gt: GroundTruth, table: DetectionTable, num_classes: int, threshold: float) -> None:
        matches = match_detections(gt, table.take(table.scores > threshold), num_classes)
        image_of_rank = np.argsort(image_ranks(gt.image_ids))
        errors = find_errors(matches)
        detections = matches.ranked
        objects = matches.objects
        self.threshold = threshold
        self.num_images = gt.num_images
        self.detections = detections
        self.outcome = errors.outcome
        self.detected = errors.detected
        self.missed = errors.missed
        self.image = image_of_rank[detections.group // num_classes]
        self.object_image = image_of_rank[objects.group // num_classes]
        self.object_classes = matches.object_classes
        self.crowd = objects.crowd
        self.object_boxes_xyxy_px = xywh_to_xyxy(objects.boxes_xywh)
        false = self.outcome >= 0
        missed = self.missed
        self.error_image = np.r_[self.image[false], self.object_image[missed]]
        self.error_class = np.r_[detections.classes[false], self.object_classes[missed]]
        self.error_kind = np.r_[self.outcome[false], np.full(missed.sum(), MISSED)]

    def counts(self) -> np.ndarray:
        """Counts errors by image and kind: int64 (N, 6)."""
        cells = self.error_image * len(KINDS) + self.error_kind
        return np.bincount(cells, minlength=self.num_images * len(KINDS)).reshape(self.num_images, len(KINDS))

    def backgrounds(self) -> int:
        """Counts the images that have detections but no object."""
        return len(np.setdiff1d(self.image, self.object_image))


def worst_images(errors: ImageErrors, max_images: int) -> list[int]:
    """Selects images with errors.

    The first half are those with the most errors (ties: the highest confidences of false positives). The others are the
    worst image for each pair of class and kind that has no example among these, the most frequent pairs first.
    """
    count = errors.counts().sum(1)
    false = errors.outcome >= 0
    weight = np.bincount(errors.image[false], errors.detections.scores[false], minlength=errors.num_images)
    order = np.lexsort((-weight, -count))
    order = order[count[order] > 0]
    rank = np.full(errors.num_images, order.size)
    rank[order] = np.arange(order.size)
    chosen = dict.fromkeys(order[: -(-max_images // 2)].tolist())
    examples: list[tuple[int, int]] = []  # number of errors of a pair of class and kind, and its worst image
    pairs = errors.error_class * len(KINDS) + errors.error_kind
    for pair in np.unique(pairs):
        images = errors.error_image[pairs == pair]
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
    counts = Counter(KIND_WORDS[kind] for kind in errors.outcome[_wrong_detections(errors, image)].tolist())
    counts += Counter({KIND_WORDS[MISSED]: int(errors.missed[errors.object_image == image].sum())})
    return ", ".join(f"{count} {words}" for words, count in counts.most_common())


def _wrong_detections(errors: ImageErrors, image: int) -> np.ndarray:
    """Returns the rows of the false positives in an image, the most confident first: int64 (n,)."""
    rows = np.flatnonzero((errors.image == image) & (errors.outcome >= 0))
    return rows[np.argsort(-errors.detections.scores[rows], kind="stable")]


def _label_outlines(errors: ImageErrors, image: int, names: Sequence[str]) -> list[Outline]:
    """Outlines the labels of an image, except crowd regions; undetected ones are on top."""
    objects = np.flatnonzero((errors.object_image == image) & ~errors.crowd)
    is_detected = errors.detected[objects]
    boxes = errors.object_boxes_xyxy_px
    not_detected = [
        Outline(boxes[m], "missed" if errors.missed[m] else "label", names[errors.object_classes[m]])
        for m in objects[~is_detected][:MAX_BOXES].tolist()
    ]
    return not_detected + outlines(boxes[objects[is_detected]], "correct")


def _detection_outlines(errors: ImageErrors, image: int, names: Sequence[str]) -> list[Outline]:
    """Outlines the detections in an image; wrong ones are on top, the most confident first."""
    table = errors.detections
    wrong_outlines = [
        Outline(
            table.boxes_xyxy[row],
            KIND_STYLES[errors.outcome[row]],
            f"{names[table.classes[row]]} {table.scores[row]:.2f}",
        )
        for row in _wrong_detections(errors, image)[:MAX_BOXES].tolist()
    ]
    is_correct = (errors.image == image) & (errors.outcome == CORRECT)
    return wrong_outlines + outlines(table.boxes_xyxy[is_correct], "correct")
