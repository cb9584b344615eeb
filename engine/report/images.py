"""Pictures of images with boxes: the worst images of a validation, issues with labels, and sheets of a batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from data.images.decode import read_reduced
from data.index import DatasetIndex
from engine.evaluation.analysis import CORRECT, MISSED, find_errors
from engine.evaluation.matching import Matches, image_ranks
from engine.evaluation.result import PREVIEW_IMAGES, Preview
from engine.report.label_errors import CheckedSplit, Issue
from utils.batches import Batch
from utils.boxes import cxcywh_to_xyxy, xywh_to_xyxy
from utils.detections import Detections
from utils.drawing.draw import class_colors, draw_boxes, tile_images, write_image
from utils.drawing.page import Card, Picture
from utils.drawing.text import write_text
from utils.errors import UserError
from utils.files.paths import path_of
from utils.pixels import as_rgb8

WORST_IMAGES = 16
PHOTO_SIDE = 420  # longer side of a whole image, pixels
CROP_SIDE = 300  # longer side of a part, pixels
MAX_ENLARGEMENT = 3.0  # scale
DARK = 64  # images with only lower values are brightened
MIN_BOX_SIDE = 8  # pixels; smaller boxes would be drawn as dots
MAX_OUTLINES = 150  # in a photo; more would hide it
PICTURED_IMAGES = 16  # images of a batch on a sheet
# By the name of each kind of error, in the order of `engine.evaluation.analysis.KINDS`.
KIND_COLORS = {
    "wrong class": "#e599f7",
    "misplaced": "#74c0fc",
    "wrong class and misplaced": "#faa2c1",
    "duplicate": "#ffe066",
    "spurious": "#ffa94d",
    "missed": "#ff8787",
}
KIND_NAMES = tuple(KIND_COLORS)
COLORS = {"correct": "#20c05c", "label": "#ffffff", **KIND_COLORS}
ISSUE_COLORS = {"box in question": "#ffa94d", "first of two boxes": "#74c0fc", "other labels": "#20c05c"}


class Outline(NamedTuple):
    """A box in a photo."""

    xyxy_px: Sequence[float] | np.ndarray  # original pixels
    color: str  # such as #20c05c
    text: str = ""


def photo(
    index: DatasetIndex, name: str, size_hw: Sequence[int], outlines: Sequence[Outline], label: str, focus: int = 0
) -> Picture | str:
    """Draws boxes into the image ``name`` of a data set, or returns why it cannot be read.

    Args:
        size_hw: its size; empty if it is not known, because the scan has left the image out.
        outlines: earlier ones are on top.
        label: description for screen readers.
        focus: number of outlines, the first ones, around which a part of the image is shown; 0: all of it.
    """
    path = path_of(name, index.root)
    try:
        height, width = size_hw or read_reduced(path, (1, 1), index.pixels)[1]
        low = np.zeros(2, int)
        high = size = np.array([width, height])
        if focus:
            corners = np.array([outline.xyxy_px for outline in outlines[:focus]], np.float64).reshape(-1, 2, 2)
            margin = np.minimum(max(0.6 * float(np.ptp(corners, axis=(0, 1)).max()), 16.0), size / 4)
            low = np.floor(np.clip(corners.min((0, 1)) - margin, 0, size - margin)).astype(int)
            high = np.ceil(np.clip(corners.max((0, 1)) + margin, margin, size)).astype(int)
        scale = min((CROP_SIDE if focus else PHOTO_SIDE) / (high - low).max(), MAX_ENLARGEMENT)
        min_hw = (round(height * scale), round(width * scale))
        image = as_rgb8(read_reduced(path, min_hw, index.pixels)[0])
        if image.max(initial=0) < DARK:  # 16-bit values of which few bits are used, or night
            deep = read_reduced(path, min_hw, replace(index.pixels, bits=16))[0]
            image = as_rgb8((deep * (65535.0 / max(deep.max(initial=0), 1))).astype(np.uint16))
    except (UserError, OSError) as error:
        return f"This image cannot be read ({error})."
    gain = np.array([image.shape[1], image.shape[0]]) / size
    left, top = np.floor(low * gain).astype(int)
    right, bottom = np.ceil(high * gain).astype(int)
    drawn_size = np.maximum(np.round((high - low) * scale), 1).astype(int)
    interpolation = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    part = cv2.resize(np.ascontiguousarray(image[top:bottom, left:right]), drawn_size, interpolation=interpolation)
    boxes = np.array([outline.xyxy_px for outline in outlines], np.float64).reshape(-1, 4)
    shown = np.flatnonzero(np.all((boxes[:, :2] < high) & (boxes[:, 2:] > low), axis=1))[:MAX_OUTLINES]
    boxes = (boxes[shown] - np.tile(low, 2)) * scale
    missing_px = np.maximum(MIN_BOX_SIDE - (boxes[:, 2:] - boxes[:, :2]), 0) / 2
    boxes = np.concatenate([boxes[:, :2] - missing_px, boxes[:, 2:] + missing_px], 1)
    texts = [outlines[i].text for i in shown]
    colors = np.array([[*bytes.fromhex(outlines[i].color[1:])] for i in shown], np.uint8).reshape(-1, 3)
    return Picture(label, draw_boxes(part, boxes, texts, colors, thickness=2, text_size=14), is_photo=True)


def worst_images(index: DatasetIndex, matches: Matches, largest: int) -> list[Card]:
    """Draws the images with the most errors, those with errors of the kind ``largest`` first; of equally many, those
    with the more confident false positives.

    ``matches``: of the detections above the threshold.
    """
    errors = find_errors(matches)
    ranked = matches.ranked
    image_of_rank = np.argsort(image_ranks(index.ground_truth().image_ids))
    found_image = image_of_rank[ranked.group // matches.num_classes]
    object_image = image_of_rank[matches.objects.group // matches.num_classes]
    is_false = errors.outcome >= 0
    error_image = np.r_[object_image[errors.missed], found_image[is_false]]
    error_kind = np.r_[np.full(int(errors.missed.sum()), MISSED), errors.outcome[is_false]]
    count = np.bincount(error_image, minlength=len(index))
    confidence = np.bincount(found_image[is_false], ranked.scores[is_false], minlength=len(index))
    shows_largest = np.bincount(error_image[error_kind == largest], minlength=len(index)) > 0
    order = np.lexsort((-confidence, -count, ~shows_largest))[:WORST_IMAGES]
    object_boxes = xywh_to_xyxy(matches.objects.boxes_xywh)
    cards = []
    for image in order[count[order] > 0].tolist():
        missed = np.flatnonzero((object_image == image) & errors.missed)
        is_explained = (object_image == image) & ~errors.detected & ~errors.missed & ~matches.objects.crowd
        rows = np.flatnonzero(found_image == image)
        rows = rows[np.argsort(-ranked.scores[rows], kind="stable")]
        outlines = [
            Outline(object_boxes[i], COLORS["missed"], f"{index.names[matches.object_classes[i]]}?") for i in missed
        ]
        for row in rows[is_false[rows]]:
            text = f"{index.names[ranked.classes[row]]} {ranked.scores[row]:.2f}"
            outlines.append(Outline(ranked.boxes_xyxy[row], COLORS[KIND_NAMES[errors.outcome[row]]], text))
        outlines += [Outline(box, COLORS["label"]) for box in object_boxes[is_explained]]  # of a wrong detection
        correct = rows[errors.outcome[rows] == CORRECT]
        outlines += [Outline(ranked.boxes_xyxy[row], COLORS["correct"]) for row in correct]
        kinds = Counter(KIND_NAMES[kind] for kind in error_kind[error_image == image])
        text = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
        name = index.paths[image]
        picture = photo(index, name, index.image_hw[image].tolist(), outlines, f"{name}: {text}")
        cards.append(Card([("", picture)], text, name))
    return cards


def issue_card(splits: Mapping[str, CheckedSplit], issue: Issue) -> Card:
    """Draws what an issue is about: a part of its first image, with the boxes in question, or else the first two of its
    images, of different splits if there are. A correction of a label is shown as the row to write."""
    images = list(zip(issue.splits or (issue.split,) * len(issue.images), issue.images))
    shown = images[:1]
    if len(images) > 1:
        shown.append(next((image for image in images if image[0] != images[0][0]), images[1]))
    boxes = [] if issue.suggestion is None else [issue.suggestion]
    boxes += reversed(issue.boxes)
    questioned, first_of_two, others = ISSUE_COLORS.values()
    colors = [questioned] * len(boxes)
    if len(issue.boxes) == 2:
        colors[-1] = first_of_two
    focused = [Outline(box.xyxy_px, color, box.class_name) for box, color in zip(boxes, colors)]
    photos = []
    for split_name, name in shown:
        index = splits[split_name].index
        size_hw: list[int] = []
        outlines = [*focused]
        number = splits[split_name].numbers.get(name)
        if number is not None:
            size_hw = index.image_hw[number].tolist()
            first, stop = index.offsets[number : number + 2].tolist()
            outlines += [Outline(box, others) for box in xywh_to_xyxy(index.boxes_xywh_px[first:stop])]
        label = f"{issue.kind.name} in {name}"
        title = f"{split_name}: {name}" if len(shown) > 1 else ""
        photos.append((title, photo(index, name, size_hw, outlines, label, focus=len(focused))))
    note = f"{issue.split}: {issue.where or issue.images[0]}" if len(shown) == 1 else ""
    if issue.suggestion is not None:
        verb = "write" if issue.boxes else "add"
        note += f"; {verb} {splits[issue.split].corrected_row(issue.images[0], issue.suggestion)}"
    score = "" if issue.score is None else f"{issue.score:.2f} "
    return Card(photos, f"{score}{issue.kind.name}: {issue.text}", note)


def write_preview(preview: Preview | None, names: Sequence[str], threshold: float, out: Path) -> np.ndarray | None:
    """Writes a picture of the first batch of a validation with its labels and the detections that score above
    ``threshold``, and returns the picture; None if there is no batch."""
    if preview is None:
        return None
    sheet = draw_batch(preview.batch, names, preview.detections, threshold=threshold)
    if sheet is not None:
        write_image(out, sheet)
    return sheet


def draw_batch(
    batch: Batch, names: Sequence[str], detections: Detections | None = None, *, threshold: float = 0.0
) -> np.ndarray | None:
    """Draws a sheet of the first images of a batch with their labels, uint8 (H, W, 3) RGB; None for an empty batch.

    ``detections``: in canvas pixels; those that score above ``threshold`` are drawn in a second picture of each image.
    """
    limit = PICTURED_IMAGES if detections is None else PREVIEW_IMAGES
    images = as_rgb8(batch.images[:limit].numpy(force=True).transpose(0, 2, 3, 1))
    if not len(images):
        return None
    pictures = []
    rows = batch.targets.on_host
    for i, (image, path) in enumerate(zip(images, batch.paths)):
        height, width = image.shape[:2]
        labels = rows[rows[:, 0] == i, 1:]
        classes = labels[:, 0].astype(int)
        boxes = cxcywh_to_xyxy(labels[:, 1:] * np.array([width, height, width, height]))
        caption = Path(path).name if detections is None else f"labels: {Path(path).name}"
        labeled = draw_boxes(image, boxes, [names[c] for c in classes], class_colors(classes))
        pictures.append(_captioned(labeled, caption))
        if detections is not None:
            count = int(detections.counts[i])
            boxes, scores, classes = (
                values[i, :count].numpy(force=True)
                for values in (detections.boxes_xyxy, detections.scores, detections.classes)
            )
            keep = scores > threshold
            texts = [f"{names[c]} {score:.2f}" for c, score in zip(classes[keep], scores[keep])]
            drawn = draw_boxes(image, boxes[keep], texts, class_colors(classes[keep]))
            pictures.append(_captioned(drawn, f"detections above {threshold:.3f}"))
    columns = math.ceil(math.sqrt(len(pictures))) if detections is None else min(len(pictures), 4)
    return tile_images(pictures, columns)


def _captioned(image: np.ndarray, caption: str) -> np.ndarray:
    write_text(image, caption, (0, image.shape[0]), 11, np.array([40, 40, 40]))
    return image
