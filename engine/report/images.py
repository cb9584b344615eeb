"""Pictures of images with boxes: the worst images of a validation, label errors, and sheets of a batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from markupsafe import Markup

from data.images.decode import read_reduced
from engine.evaluation.analysis import CORRECT, MISSED, find_errors
from engine.evaluation.matching import Matches, image_ranks
from engine.evaluation.result import PREVIEW_IMAGES, Preview
from engine.report.issues import CheckedSplit, Issue, LabelBox
from utils.batches import Batch
from utils.boxes import cxcywh_to_xyxy, xywh_to_xyxy
from utils.detections import Detections
from utils.drawing.draw import class_colors, draw_boxes, tile_images, write_image
from utils.drawing.page import Card, CardPicture, LegendEntry, code, embed_image
from utils.drawing.text import write_text
from utils.errors import UserError
from utils.pixels import GRAY, RGB8, PixelFormat, as_rgb8

WORST_IMAGES = 16
MAX_LABEL_ERRORS = 30  # drawn
PHOTO_SIDE = 420  # longer side of a whole image, pixels
CROP_SIDE = 300  # longer side of a part, pixels
DENSITY = 1.3  # pixels of a photo per pixel of the page
MAX_ENLARGEMENT = 3.0  # scale
DARK = 64  # images with only lower values are brightened
JPEG_QUALITY = 80
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
LABEL_LEGEND = (
    LegendEntry("label of the wrong class", COLORS["missed"]),
    LegendEntry("detection without a label", COLORS["misplaced"]),
    LegendEntry("other labels", COLORS["correct"]),
)


def worst_legend(counts: np.ndarray) -> list[LegendEntry]:
    """Returns the legend of `worst_images` for the kinds that occur. ``counts``: of errors by kind, int64 (6,)."""
    occurring = [name for name, count in zip(KIND_NAMES, counts.tolist()) if count]
    return [LegendEntry(style, COLORS[style]) for style in ("correct", "label", *occurring)]


class Outline(NamedTuple):
    """A box in a photo."""

    box_xyxy_px: Sequence[float] | np.ndarray  # original pixels
    style: str  # key of `COLORS`
    text: str = ""


class PhotoFile(NamedTuple):
    """An image of a data set."""

    path: str  # absolute
    height: int
    width: int
    pixels: PixelFormat = RGB8

    @staticmethod
    def of(split: CheckedSplit, image: int) -> PhotoFile:
        """Returns the image file with number ``image`` of a split."""
        height, width = split.index.image_hw[image].tolist()
        return PhotoFile(split.index.path(image), height, width, split.index.pixels)

    def whole(self) -> np.ndarray:
        """Returns the window of the whole image: int64 (4,) x0, y0, x1, y1."""
        return np.array([0, 0, self.width, self.height])

    def around(self, boxes: Sequence[LabelBox]) -> np.ndarray:
        """Returns a window around boxes, with a margin of 0.6 of their longer side: int64 (4,). What lies outside the
        image by more than a quarter of its size is left out, and at least the margin of the image is shown."""
        size = self.whole()[2:]
        corners = np.array([box.xyxy_px for box in boxes], np.float64).reshape(-1, 2, 2)
        corners = corners.clip(-size / 4, size * 1.25)
        low = corners.min((0, 1))
        high = corners.max((0, 1))
        margin = np.minimum(max(0.6 * float((high - low).max()), 16.0), size / 4)
        low = np.clip(low - margin, np.minimum(1.2 * low, 0), size - margin)
        high = np.clip(high + margin, margin, size + np.maximum(1.2 * (high - size), 0))
        return np.r_[np.floor(low), np.maximum(np.ceil(high), np.floor(low) + 1)].astype(int)


def photo(
    source: PhotoFile, window: np.ndarray, side: int, outlines: Sequence[Outline], *, label: str, title: str = ""
) -> CardPicture:
    """Draws boxes into a part of an image, or returns a paragraph with the reason why it cannot be read.

    Args:
        window: x0, y0, x1, y1 in original pixels.
        side: longer side of the picture, pixels.
        outlines: earlier ones are on top.
        label: description for screen readers.
    """
    try:
        part = _render(source, window, side)
    except (UserError, OSError) as error:
        return CardPicture(title, Markup('<p class="muted">This image cannot be read ({}).</p>').format(error))
    boxes = np.array([outline.box_xyxy_px for outline in outlines], np.float64).reshape(-1, 4)
    is_shown = np.all((boxes[:, :2] < window[2:]) & (boxes[:, 2:] > window[:2]), axis=1)
    shown = np.flatnonzero(is_shown)[:MAX_OUTLINES]
    boxes = (boxes[shown] - np.tile(window[:2], 2)) * (part.shape[1] / (window[2] - window[0]))
    missing_px = np.maximum(MIN_BOX_SIDE - (boxes[:, 2:] - boxes[:, :2]), 0) / 2
    boxes = np.concatenate([boxes[:, :2] - missing_px, boxes[:, 2:] + missing_px], 1)
    texts = [outlines[i].text for i in shown]
    colors = np.array([[*bytes.fromhex(COLORS[outlines[i].style][1:])] for i in shown], np.uint8).reshape(-1, 3)
    drawn = draw_boxes(part, boxes, texts, colors, thickness=2, text_size=14)
    file = cv2.imencode(".jpg", drawn[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1].tobytes()
    return CardPicture(title, embed_image(file, "jpeg", label, "photo", part.shape[1] / DENSITY))


def _render(source: PhotoFile, window: np.ndarray, side: int) -> np.ndarray:
    """Reads the part ``window``, with sides of at most ``side``: uint8 (H, W, 3) RGB. Raises UserError or OSError."""
    x0, y0, x1, y1 = window
    scale = min(side / max(x1 - x0, y1 - y0), MAX_ENLARGEMENT)
    min_hw = (round(source.height * scale), round(source.width * scale))
    pixels = as_rgb8(read_reduced(source.path, min_hw, pixels=source.pixels)[0])
    if pixels.max(initial=0) < DARK:  # 16-bit values of which few bits are used, or night
        deep = read_reduced(source.path, min_hw, pixels=replace(source.pixels, bits=16))[0]
        pixels = as_rgb8((deep * (65535.0 / max(deep.max(initial=0), 1))).astype(np.uint16))
    gain = np.array([pixels.shape[1] / source.width, pixels.shape[0] / source.height])
    left, top = np.floor(window[:2] * gain).astype(int)
    right, bottom = np.ceil(window[2:] * gain).astype(int)
    part = np.ascontiguousarray(pixels[max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)])
    border_px = max(-top, 0), max(bottom - pixels.shape[0], 0), max(-left, 0), max(right - pixels.shape[1], 0)
    if any(border_px):
        part = cv2.copyMakeBorder(part, *border_px, cv2.BORDER_CONSTANT, value=(GRAY,) * 3)
    size = (max(round((x1 - x0) * scale), 1), max(round((y1 - y0) * scale), 1))
    return cv2.resize(part, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR)


def worst_images(split: CheckedSplit, matches: Matches, largest: int) -> list[Card]:
    """Draws the images with the most errors, those with errors of the kind ``largest`` first; of equally many, those
    with the more confident false positives.

    ``matches``: of the detections above the threshold.
    """
    errors = find_errors(matches)
    ranked = matches.ranked
    image_of_rank = np.argsort(image_ranks(split.index.ground_truth().image_ids))
    found_image = image_of_rank[ranked.group // matches.num_classes]
    object_image = image_of_rank[matches.objects.group // matches.num_classes]
    is_false = errors.outcome >= 0
    count = np.bincount(found_image[is_false], minlength=len(split.index))
    count += np.bincount(object_image[errors.missed], minlength=len(split.index))
    weight = np.bincount(found_image[is_false], ranked.scores[is_false], minlength=len(split.index))
    shows_largest = np.zeros(len(split.index), bool)
    shows_largest[found_image[errors.outcome == largest]] = True
    if largest == MISSED:
        shows_largest[object_image[errors.missed]] = True
    order = np.lexsort((-weight, -count, ~shows_largest))[:WORST_IMAGES]
    names = split.index.names
    object_boxes = xywh_to_xyxy(matches.objects.boxes_xywh)
    cards = []
    for image in order[count[order] > 0].tolist():
        missed = np.flatnonzero((object_image == image) & errors.missed)
        is_explained = (object_image == image) & ~errors.detected & ~errors.missed & ~matches.objects.crowd
        rows = np.flatnonzero(found_image == image)
        rows = rows[np.argsort(-ranked.scores[rows], kind="stable")]
        wrong = rows[is_false[rows]].tolist()
        kinds = [KIND_NAMES[errors.outcome[row]] for row in wrong]
        outlines = [Outline(object_boxes[i], "missed", f"{names[matches.object_classes[i]]}?") for i in missed]
        for row, kind in zip(wrong, kinds):
            text = f"{names[ranked.classes[row]]} {ranked.scores[row]:.2f}"
            outlines.append(Outline(ranked.boxes_xyxy[row], kind, text))
        outlines += [Outline(box, "label") for box in object_boxes[is_explained]]  # of a wrong detection
        outlines += [Outline(ranked.boxes_xyxy[row], "correct") for row in rows[errors.outcome[rows] == CORRECT]]
        counts = Counter([KIND_NAMES[MISSED]] * len(missed) + kinds)
        summary = ", ".join(f"{number} {kind}" for kind, number in counts.most_common())
        name = split.index.paths[image]
        source = PhotoFile.of(split, image)
        picture = photo(source, source.whole(), PHOTO_SIDE, outlines, label=f"{name}: {summary}")
        cards.append(Card([picture], summary, name))
    return cards


def label_error_cards(splits: Sequence[CheckedSplit], issues: Sequence[Issue]) -> list[Card]:
    """Draws the first `MAX_LABEL_ERRORS` issues of `find_label_errors`, each with the row that corrects the label."""
    split_of_name = {split.name: split for split in splits}
    number_of_path = {split.name: {path: i for i, path in enumerate(split.index.paths)} for split in splits}
    cards = []
    for issue in issues[:MAX_LABEL_ERRORS]:
        split = split_of_name[issue.split]
        name = issue.images[0]
        image = number_of_path[issue.split][name]
        suggestion = issue.suggestion
        assert suggestion is not None, "label errors have corrections"
        style = "missed" if issue.boxes else "misplaced"
        outlines = [Outline(suggestion.xyxy_px, style, f"{suggestion.class_name}?")]
        outlines += label_outlines(split, image, issue.boxes)
        source = PhotoFile.of(split, image)
        window = source.around([suggestion])
        picture = photo(source, window, CROP_SIDE, outlines, label=f"Labels in {name}")
        row = split.corrected_row(image, suggestion)
        note = Markup("{}: {}<br>{} {}").format(
            issue.split, issue.where or name, "write" if issue.boxes else "add", code(row)
        )
        cards.append(Card([picture], f"{issue.score:.2f} {issue.kind}: {issue.text}", note, issue.kind))
    return cards


def label_outlines(split: CheckedSplit, image: int, excluded: Sequence[LabelBox] = ()) -> list[Outline]:
    """Outlines the labels of an image except ``excluded``."""
    first, stop = split.index.offsets[image : image + 2].tolist()
    boxes = xywh_to_xyxy(split.index.boxes_xywh_px[first:stop])
    boxes = np.delete(boxes, [box.number for box in excluded if box.number is not None], axis=0)
    return [Outline(box, "correct") for box in boxes]


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
