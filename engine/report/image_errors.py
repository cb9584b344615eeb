"""The errors in each image, and a gallery of the images with the most, for a report.

Legend: D detections, M objects, N images.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from data.check.gallery import source_of
from data.check.photos import COLORS, PHOTO_SIDE, Album, Outline, Version, outlines
from data.check.scanned import CheckedSplit
from engine.evaluation.analysis import KINDS, MISSED, find_errors
from engine.evaluation.matching import image_ranks, match_detections
from utils.boxes import xywh_to_xyxy
from utils.drawing.page import Card
from utils.structures import DetectionTable, GroundTruth

CORRECT, IGNORED = -1, -2  # outcomes besides the kinds of errors
# By kind of error, in the order of `KINDS`: the words, and the style of the box.
KIND_WORDS = ("wrong class", "badly placed", "wrong class and badly placed", "duplicate", "spurious", "missed")
KIND_STYLES = ("class", "location", "both", "duplicate", "spurious", "missed")
KIND_LEGEND = (
    ("correct", COLORS["correct"]),
    *((words, COLORS[style]) for words, style in zip(KIND_WORDS, KIND_STYLES)),
    ("label, not found", COLORS["label"]),
)
MOST_IMAGES, MOST_BYTES = 40, 1_800_000  # of JPEG files
MOST_BOXES = 60  # errors of an image that are drawn


class ImageErrors(NamedTuple):
    """Detections and objects of all images with their outcomes. Boxes are in pixels of the original image."""

    threshold: float
    image: np.ndarray  # int64 (D,)
    boxes_xyxy_px: np.ndarray  # float64 (D, 4)
    scores: np.ndarray  # float64 (D,)
    classes: np.ndarray  # int64 (D,)
    outcome: np.ndarray  # int64 (D,) `CORRECT`, `IGNORED` (in a crowd region), or the position in `KINDS`
    target: np.ndarray  # int64 (D,) the object that an error of class or location is about, else -1
    object_image: np.ndarray  # int64 (M,)
    object_boxes_xyxy_px: np.ndarray  # float64 (M, 4)
    object_classes: np.ndarray  # int64 (M,)
    crowd: np.ndarray  # bool (M,)
    found: np.ndarray  # bool (M,) matched by a true positive
    missed: np.ndarray  # bool (M,) not found, and no error is about it
    num_images: int

    def counts(self) -> np.ndarray:
        """Errors by image and kind: int64 (N, 6)."""
        wrong = self.outcome >= 0
        cells = np.r_[
            self.image[wrong] * len(KINDS) + self.outcome[wrong], self.object_image[self.missed] * len(KINDS) + MISSED
        ]
        return np.bincount(cells, minlength=self.num_images * len(KINDS)).reshape(self.num_images, len(KINDS))

    def of_class(self, kind: int) -> tuple[np.ndarray, np.ndarray]:
        """The image and the class of each error of a kind: int64 (n,) each. A missed object has its own class, a false
        positive that of the detection."""
        if kind == MISSED:
            return self.object_image[self.missed], self.object_classes[self.missed]
        rows = self.outcome == kind
        return self.image[rows], self.classes[rows]

    def backgrounds(self) -> int:
        """How many images without any object have detections."""
        return len(np.setdiff1d(self.image, self.object_image))


def find_image_errors(gt: GroundTruth, table: DetectionTable, num_classes: int, threshold: float) -> ImageErrors:
    """Matches the detections that score at least ``threshold`` as COCO does, at IoU 0.5."""
    kept = table.scores >= threshold
    matches = match_detections(gt, table.take(kept), num_classes)
    errors, ranked, objects = find_errors(matches), matches.ranked, matches.objects
    image_of_rank = np.argsort(image_ranks(gt.image_ids))
    outcome = np.where(errors.true_positive, CORRECT, IGNORED)
    outcome[errors.row] = errors.kind
    target = np.full(outcome.size, -1, dtype=np.int64)
    target[errors.row] = errors.target
    return ImageErrors(
        threshold=threshold,
        image=image_of_rank[ranked.group // num_classes],
        boxes_xyxy_px=ranked.boxes_xyxy,
        scores=ranked.scores,
        classes=ranked.classes,
        outcome=outcome,
        target=target,
        object_image=image_of_rank[objects.group // num_classes],
        object_boxes_xyxy_px=xywh_to_xyxy(objects.boxes_xywh),
        object_classes=matches.object_classes,
        crowd=objects.crowd,
        found=errors.found,
        missed=errors.missed,
        num_images=gt.num_images,
    )


def worst_images(errors: ImageErrors, most: int) -> list[int]:
    """At most ``most`` images with errors. The first half are those with the most errors (the confidences of false
    positives decide between equal ones). The others are, in turn, the worst image of each pair of class and kind that
    is not among them yet, so that all have examples."""
    counts = errors.counts()
    wrong = errors.outcome >= 0
    weight = np.bincount(errors.image[wrong], errors.scores[wrong], minlength=errors.num_images)
    order = np.lexsort((-weight, -counts.sum(1)))
    order = order[counts.sum(1)[order] > 0]
    rank = np.full(errors.num_images, order.size)
    rank[order] = np.arange(order.size)
    chosen = dict.fromkeys(order[: -(-most // 2)].tolist())
    examples: list[tuple[int, int]] = []  # how many errors the pair of class and kind has, and its worst image
    for kind in range(len(KINDS)):
        image, classes = errors.of_class(kind)
        for c in np.unique(classes):
            of_pair = image[classes == c]
            if chosen.keys().isdisjoint(of_pair.tolist()):
                examples.append((of_pair.size, int(of_pair[np.argmin(rank[of_pair])])))
    examples.sort(reverse=True)
    chosen |= dict.fromkeys(image for _, image in examples)
    chosen |= dict.fromkeys(order.tolist())
    return list(chosen)[:most]


def worst_gallery(split: CheckedSplit, errors: ImageErrors) -> list[Card]:
    """The images of ``split`` with the most errors, labels next to detections."""
    album = Album(MOST_BYTES)
    return [_card(split, errors, image, album) for image in worst_images(errors, MOST_IMAGES)]


def _card(split: CheckedSplit, errors: ImageErrors, image: int, album: Album) -> Card:
    names = split.index.names
    of_image, objects = np.flatnonzero(errors.image == image), np.flatnonzero(errors.object_image == image)
    wrong = of_image[errors.outcome[of_image] >= 0]
    wrong = wrong[np.argsort(-errors.scores[wrong], kind="stable")]
    counts = Counter(KIND_WORDS[k] for k in errors.outcome[wrong].tolist())
    counts += Counter({KIND_WORDS[MISSED]: int(errors.missed[objects].sum())})
    text = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    plain = objects[~errors.crowd[objects]]
    found = errors.found[plain]
    labels = [
        Outline(errors.object_boxes_xyxy_px[m], "missed" if errors.missed[m] else "label",
                names[errors.object_classes[m]])
        for m in plain[~found][:MOST_BOXES].tolist()
    ]  # fmt: skip
    labels += outlines(errors.object_boxes_xyxy_px[plain[found]], "correct")
    detections = [
        Outline(errors.boxes_xyxy_px[row], KIND_STYLES[errors.outcome[row]],
                f"{names[errors.classes[row]]} {errors.scores[row]:.2f}")
        for row in wrong[:MOST_BOXES].tolist()
    ]  # fmt: skip
    detections += outlines(errors.boxes_xyxy_px[of_image[errors.outcome[of_image] == CORRECT]], "correct")
    name, source = split.index.paths[image], source_of(split, image)
    pictures = album.pictures(
        source,
        source.whole(),
        PHOTO_SIDE,
        Version("labels", f"Labels of {name}", labels),
        Version("detections", f"Detections in {name}: {text}", detections),
    )
    return Card(pictures, text, name)
