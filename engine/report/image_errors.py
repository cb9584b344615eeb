"""The errors in each image, and a gallery of the images with the most, for a report.

Legend: D detections, M objects, N images.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from engine.evaluation.analysis import CORRECT, KINDS, MISSED, find_errors
from engine.evaluation.issues import CheckedSplit
from engine.evaluation.matching import image_ranks, match_detections
from engine.report.gallery import source_of
from engine.report.photos import COLORS, PHOTO_SIDE, Album, Outline, Version, outlines
from utils.boxes import xywh_to_xyxy
from utils.drawing.page import Card
from utils.structures import DetectionTable, GroundTruth

# By kind of error, in the order of `KINDS`: the words, and the style of the box.
KIND_WORDS = ("wrong class", "badly placed", "wrong class and badly placed", "duplicate", "spurious", "missed")
KIND_STYLES = ("class", "location", "both", "duplicate", "spurious", "missed")
KIND_LEGEND = (
    ("correct", COLORS["correct"]),
    *((words, COLORS[style]) for words, style in zip(KIND_WORDS, KIND_STYLES)),
    ("label, not found", COLORS["label"]),
)
MAX_IMAGES, MAX_BYTES = 40, 1_800_000  # of JPEG files
MAX_BOXES = 60  # errors of an image that are drawn


class ImageErrors:
    """What became of the detections that score above ``threshold``, and of the objects, matched as COCO does at IoU
    0.5."""

    def __init__(self, gt: GroundTruth, table: DetectionTable, num_classes: int, threshold: float) -> None:
        matches = match_detections(gt, table.take(table.scores > threshold), num_classes)
        image_of_rank = np.argsort(image_ranks(gt.image_ids))
        self.threshold, self.num_images = threshold, gt.num_images
        detections, objects = matches.ranked, matches.objects
        self.detections, (self.outcome, _, self.found, self.missed) = detections, find_errors(matches)
        self.image = image_of_rank[detections.group // num_classes]  # int64 (D,)
        self.object_image = image_of_rank[objects.group // num_classes]  # int64 (M,)
        self.object_classes, self.crowd = matches.object_classes, objects.crowd  # (M,)
        self.object_boxes_xyxy_px = xywh_to_xyxy(objects.boxes_xywh)  # (M, 4)
        # All errors, int64: false positives, with the class of the detection, and missed objects, with their own.
        false, missed = self.outcome >= 0, self.missed
        self.error_image = np.r_[self.image[false], self.object_image[missed]]
        self.error_class = np.r_[detections.classes[false], self.object_classes[missed]]
        self.error_kind = np.r_[self.outcome[false], np.full(missed.sum(), MISSED)]

    def counts(self) -> np.ndarray:
        """Errors by image and kind: int64 (N, 6)."""
        cells = self.error_image * len(KINDS) + self.error_kind
        return np.bincount(cells, minlength=self.num_images * len(KINDS)).reshape(self.num_images, len(KINDS))

    def backgrounds(self) -> int:
        """How many images without any object have detections."""
        return len(np.setdiff1d(self.image, self.object_image))


def worst_images(errors: ImageErrors, most: int) -> list[int]:
    """At most ``most`` images with errors. The first half are those with the most errors (the confidences of false
    positives decide between equal ones). The others are, in turn, the worst image of each pair of class and kind that
    is not among them yet, so that all have examples."""
    count, false = errors.counts().sum(1), errors.outcome >= 0
    weight = np.bincount(errors.image[false], errors.detections.scores[false], minlength=errors.num_images)
    order = np.lexsort((-weight, -count))
    order = order[count[order] > 0]
    rank = np.full(errors.num_images, order.size)
    rank[order] = np.arange(order.size)
    chosen = dict.fromkeys(order[: -(-most // 2)].tolist())
    examples: list[tuple[int, int]] = []  # how many errors the pair of class and kind has, and its worst image
    pairs = errors.error_class * len(KINDS) + errors.error_kind
    for pair in np.unique(pairs):
        of_pair = errors.error_image[pairs == pair]
        if chosen.keys().isdisjoint(of_pair.tolist()):
            examples.append((of_pair.size, int(of_pair[np.argmin(rank[of_pair])])))
    examples.sort(reverse=True)
    chosen |= dict.fromkeys(image for _, image in examples)
    chosen |= dict.fromkeys(order.tolist())
    return list(chosen)[:most]


def worst_gallery(split: CheckedSplit, errors: ImageErrors) -> list[Card]:
    """The images of ``split`` with the most errors, labels next to detections."""
    album = Album(MAX_BYTES)
    return [_card(split, errors, image, album) for image in worst_images(errors, MAX_IMAGES)]


def _card(split: CheckedSplit, errors: ImageErrors, image: int, album: Album) -> Card:
    names = split.index.names
    of_image, objects = np.flatnonzero(errors.image == image), np.flatnonzero(errors.object_image == image)
    wrong = of_image[errors.outcome[of_image] >= 0]
    wrong = wrong[np.argsort(-errors.detections.scores[wrong], kind="stable")]
    counts = Counter(KIND_WORDS[k] for k in errors.outcome[wrong].tolist())
    counts += Counter({KIND_WORDS[MISSED]: int(errors.missed[objects].sum())})
    text = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    plain = objects[~errors.crowd[objects]]
    found = errors.found[plain]
    boxes, detected = errors.object_boxes_xyxy_px, errors.detections
    labels = [
        Outline(boxes[m], "missed" if errors.missed[m] else "label", names[errors.object_classes[m]])
        for m in plain[~found][:MAX_BOXES].tolist()
    ]
    labels += outlines(boxes[plain[found]], "correct")
    detections = [
        Outline(
            detected.boxes_xyxy[row],
            KIND_STYLES[errors.outcome[row]],
            f"{names[detected.classes[row]]} {detected.scores[row]:.2f}",
        )
        for row in wrong[:MAX_BOXES].tolist()
    ]
    detections += outlines(detected.boxes_xyxy[of_image[errors.outcome[of_image] == CORRECT]], "correct")
    name, source = split.index.paths[image], source_of(split, image)
    pictures = album.pictures(
        source,
        source.whole(),
        PHOTO_SIDE,
        Version("labels", f"Labels of {name}", labels),
        Version("detections", f"Detections in {name}: {text}", detections),
    )
    return Card(pictures, text, name)
