"""The galleries of a report: the worst images, suspicious labels, and backgrounds with detections.

Photos are small JPEG files inside the page. Boxes are drawn over them as SVG, in pixels of the photo.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import cv2
import numpy as np
from markupsafe import Markup

from data.image_io.decode import read_reduced
from data.index.index import DatasetIndex
from engine.evaluation.image_errors import (
    CORRECT,
    ImageErrors,
    overlap,
    suspicious_labels,
    worst_backgrounds,
    worst_images,
)
from engine.evaluation.tide import BACKGROUND, CLASS, MISSED
from utils.errors import UserError
from utils.visualize.page import Card, Page, gallery

# By kind of error, in the order of `engine.evaluation.tide.KINDS`: the words, and the class of the style sheet.
KIND_WORDS = ("wrong class", "badly placed", "wrong class and badly placed", "duplicate", "spurious", "missed")
KIND_STYLES = ("class", "location", "both", "duplicate", "spurious", "missed")
MOST_IMAGES, MOST_SUSPECTS, MOST_BACKGROUNDS = 40, 36, 12
PHOTO_SIDE, CROP_SIDE = 420, 300  # pixels
DENSITY = 1.3  # pixels of a photo per pixel of the page
MOST_BYTES = {"worst": 1_500_000, "labels": 600_000, "backgrounds": 400_000}  # of JPEG files, by gallery
MOST_ENLARGED = 3.0
MOST_BOXES = 60  # errors of an image that are drawn one by one
MOST_CORRECT = 150
JPEG_QUALITY = 80
LETTER_PX, LINE_PX = 6.9, 11  # of the text over a photo


class Photo(NamedTuple):
    jpeg: bytes
    width: int
    height: int


class Photos:
    """Small versions of the images of a split, kept from one page to the next."""

    def __init__(self, index: DatasetIndex) -> None:
        self._index = index
        self._kept: dict[tuple[int, ...], Photo | str] = {}
        self._used: set[tuple[int, ...]] = set()

    def begin_page(self) -> None:
        """Forgets what the last page did not use."""
        self._kept = {key: self._kept[key] for key in self._used if key in self._kept}
        self._used = set()

    def of(self, image: int, window: np.ndarray, side: int) -> Photo | str:
        """The part ``window`` of an image (x0, y0, x1, y1 in original pixels) with its longer side at most ``side``, or
        why there is none."""
        key = (image, side, *(int(v) for v in window))
        self._used.add(key)
        if key not in self._kept:
            try:
                self._kept[key] = self._render(image, window, side)
            except (UserError, OSError) as error:
                self._kept[key] = f"This image cannot be read ({error})."
        return self._kept[key]

    def _render(self, image: int, window: np.ndarray, side: int) -> Photo:
        height, width = (int(v) for v in self._index.image_hw[image])
        x0, y0, x1, y1 = window
        scale = min(side / max(x1 - x0, y1 - y0), MOST_ENLARGED)
        pixels, _ = read_reduced(self._index.path(image), (round(height * scale), round(width * scale)))
        gain = np.array([pixels.shape[1] / width, pixels.shape[0] / height])
        (left, top), (right, bottom) = np.floor(window[:2] * gain).astype(int), np.ceil(window[2:] * gain).astype(int)
        part = np.ascontiguousarray(pixels[max(top, 0) : bottom, max(left, 0) : right])
        size = (max(round((x1 - x0) * scale), 1), max(round((y1 - y0) * scale), 1))
        part = cv2.resize(part, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR)
        done, encoded = cv2.imencode(".jpg", part[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
        if not done:
            raise UserError("it cannot be encoded as JPEG")
        return Photo(encoded.tobytes(), *size)


class _View:
    """A photo on the page, and the mapping of boxes to its units, which are pixels of the page.

    Args:
        element: draws the photo.
        window: the part of the image that it shows, in original pixels.
    """

    def __init__(self, element: Markup, window: np.ndarray, width: float, height: float) -> None:
        self._element, self._window, self._width, self._height = element, window, width, height
        self._scale = width / (window[2] - window[0])
        self._texts: list[tuple[float, float, float]] = []  # left, right and base of each

    def rect(self, box: np.ndarray, style: str, title: str, text: str = "") -> Markup:
        """An outlined box with a tooltip. ``text`` is above it or inside its top edge; it is left out where it would
        cover the text of an earlier box."""
        x0, y0, x1, y1 = self._place(box)
        shape = Markup('<rect class="{}" x="{:.0f}" y="{:.0f}" width="{:.0f}" height="{:.0f}"><title>{}</title></rect>')
        drawn = shape.format(style, x0, y0, max(x1 - x0, 1), max(y1 - y0, 1), title)
        if not text:
            return drawn
        length = LETTER_PX * len(text)
        x = max(min(x0 + 1, self._width - length), 1)
        y = min(max(y0 - 3 if y0 > LINE_PX + 3 else y0 + LINE_PX, LINE_PX), self._height - 3)
        if any(x < right and left < x + length and abs(y - base) < LINE_PX for left, right, base in self._texts):
            return drawn
        self._texts.append((x, x + length, y))
        return drawn + Markup('<text class="{}" x="{:.0f}" y="{:.0f}">{}</text>').format(style, x, y, text)

    def outlines(self, boxes: np.ndarray, style: str) -> Markup:
        """Many boxes in one element."""
        placed = (self._place(box) for box in boxes[:MOST_CORRECT])
        path = "".join(f"M{x0:.0f} {y0:.0f}H{x1:.0f}V{y1:.0f}H{x0:.0f}z" for x0, y0, x1, y1 in placed)
        return Markup('<path class="{}" d="{}"/>').format(style, path) if path else Markup()

    def svg(self, label: str, shapes: Sequence[Markup]) -> Markup:
        """The photo under ``shapes``; shapes made after this call belong to another picture."""
        self._texts = []
        size = f"{self._width:g}", f"{self._height:g}"
        head = '<svg class="photo" viewBox="0 0 {} {}" width="{}" height="{}" role="img" aria-label="{}">{}{}</svg>'
        return Markup(head).format(*size, *size, label, self._element, Markup("").join(shapes))

    def _place(self, box: np.ndarray) -> np.ndarray:
        return (box - np.tile(self._window[:2], 2)) * self._scale


class Galleries:
    """Makes the three galleries of a page from the errors of a validation.

    Args:
        out: the page that keeps the photos.
    """

    def __init__(self, out: Page, photos: Photos, index: DatasetIndex, errors: ImageErrors) -> None:
        self._page, self._photos, self._index, self._errors = out, photos, index, errors
        self._names = index.names
        photos.begin_page()

    def worst(self) -> Markup | None:
        """The images with the most errors, labels beside detections; None if there is no error."""
        return self._gallery("worst", worst_images(self._errors, MOST_IMAGES), self._worst, "Worst images")

    def labels(self) -> Markup | None:
        """Crops of the labels that confident detections contradict; None if there are none."""
        rows = suspicious_labels(self._errors, MOST_SUSPECTS).tolist()
        return self._gallery("labels", rows, self._suspect, "Suspicious labels", small=True)

    def backgrounds(self) -> Markup | None:
        """Images without objects that have detections; None if there are none."""
        images = worst_backgrounds(self._errors, MOST_BACKGROUNDS)
        return self._gallery("backgrounds", images, self._background, "Backgrounds with detections", small=True)

    def _gallery(
        self,
        which: str,
        items: Sequence[int],
        make_card: Callable[[int, int], tuple[Card, int]],
        label: str,
        *,
        small: bool = False,
    ) -> Markup | None:
        """The cards of ``items``; ``make_card`` takes an item and the bytes left for photos, and returns a card
        and the bytes that it took."""
        cards, left = [], MOST_BYTES[which]
        for item in items:
            card, size = make_card(item, left)
            left -= size
            cards.append(card)
        if not cards:
            return None
        tags = {tag for card in cards for tag in card.tags}
        classes = sorted({int(c) for c, _ in tags})
        kinds = sorted({int(k) for _, k in tags})
        menus = [
            ("Class", [(str(c), self._names[c]) for c in classes]),
            ("Kind of error", [(str(k), KIND_WORDS[k]) for k in kinds]),
        ]
        body = gallery(cards, menus if tags else [], label)
        return Markup('<div class="small">{}</div>').format(body) if small else body

    def _worst(self, image: int, left: int) -> tuple[Card, int]:
        errors, tags = self._errors, set()
        of_image, objects = np.flatnonzero(errors.image == image), np.flatnonzero(errors.object_image == image)
        view, size, problem = self._view(image, self._whole(image), PHOTO_SIDE, left)
        wrong = of_image[errors.outcome[of_image] >= 0]
        wrong = wrong[np.argsort(-errors.scores[wrong], kind="stable")]
        missed = objects[errors.missed[objects]]
        for row in wrong.tolist():
            kind = int(errors.outcome[row])
            tags.add((int(errors.classes[row]), kind))
            if kind == CLASS:
                tags.add((int(errors.object_classes[errors.target[row]]), kind))
        tags |= {(int(errors.object_classes[m]), MISSED) for m in missed}
        counts = Counter(KIND_WORDS[k] for k in errors.outcome[wrong].tolist()) + Counter(
            {KIND_WORDS[MISSED]: missed.size}
        )
        said = ", ".join(f"{count} {word}" for word, count in counts.most_common())
        caption = Markup("{}<br><span class='muted'>{}</span>").format(said, self._index.paths[image])
        if view is None:
            body = Markup('<p class="muted">{}</p>').format(problem)
        else:
            body = Markup('<div class="pair"><div>labels{}</div><div>detections{}</div></div>').format(
                view.svg(f"Labels of {self._index.paths[image]}", self._truth(view, objects)),
                view.svg(f"Detections in {self._index.paths[image]}: {said}", self._detections(view, of_image, wrong)),
            )
        return Card(body, caption, _texts(tags)), size

    def _truth(self, view: _View, objects: np.ndarray) -> list[Markup]:
        errors = self._errors
        plain = objects[~errors.crowd[objects]]
        shapes = [view.outlines(errors.object_boxes_xyxy_px[plain[errors.found[plain]]], "correct")]
        for m in plain[~errors.found[plain]][:MOST_BOXES].tolist():
            name, is_missed = self._names[errors.object_classes[m]], bool(errors.missed[m])
            title = f"{name}: missed" if is_missed else f"{name}: not found as labeled"
            shapes.append(view.rect(errors.object_boxes_xyxy_px[m], "missed" if is_missed else "label", title, name))
        return shapes

    def _detections(self, view: _View, of_image: np.ndarray, wrong: np.ndarray) -> list[Markup]:
        errors = self._errors
        shapes = [view.outlines(errors.boxes_xyxy_px[of_image[errors.outcome[of_image] == CORRECT]], "correct")]
        return shapes + [self._error(view, row) for row in wrong[:MOST_BOXES].tolist()][::-1]

    def _error(self, view: _View, row: int) -> Markup:
        errors, kind = self._errors, int(self._errors.outcome[row])
        text = f"{self._names[errors.classes[row]]} {errors.scores[row]:.2f}"
        return view.rect(errors.boxes_xyxy_px[row], KIND_STYLES[kind], f"{text}: {KIND_WORDS[kind]}", text)

    def _suspect(self, row: int, left: int) -> tuple[Card, int]:
        errors, names = self._errors, self._names
        image, kind, target = int(errors.image[row]), int(errors.outcome[row]), int(errors.target[row])
        seen, score = names[errors.classes[row]], f"{errors.scores[row]:.2f}"
        boxes = errors.boxes_xyxy_px[row][None]
        tags = {(int(errors.classes[row]), kind)}
        if kind == BACKGROUND:
            said = f"no label where the model sees {seen} ({score})"
        else:
            boxes = np.r_[boxes, errors.object_boxes_xyxy_px[target][None]]
            labeled = names[errors.object_classes[target]]
            tags.add((int(errors.object_classes[target]), kind))
            if kind == CLASS:
                said = f"labeled {labeled}, the model sees {seen} ({score})"
            else:
                iou = f"{overlap(errors, row):.2f}"
                said = f"the label {labeled} and the model's box ({score}) overlap little (IoU {iou})"
        window = self._around(image, boxes)
        view, size, problem = self._view(image, window, CROP_SIDE, left)
        if view is None:
            body = Markup('<p class="muted">{}</p>').format(problem)
        else:
            shapes = [view.rect(boxes[1], "label", "label")] if len(boxes) > 1 else []
            body = view.svg(f"{said}, in {self._index.paths[image]}", [*shapes, self._error(view, row)])
        caption = Markup("{}<br><span class='muted'>{}</span>").format(said, self._index.paths[image])
        return Card(body, caption, _texts(tags)), size

    def _background(self, image: int, left: int) -> tuple[Card, int]:
        errors = self._errors
        rows = np.flatnonzero(errors.image == image)
        rows = rows[np.argsort(-errors.scores[rows], kind="stable")]
        best = rows[0]
        said = f"{rows.size} detection(s), the best {self._names[errors.classes[best]]} ({errors.scores[best]:.2f})"
        view, size, problem = self._view(image, self._whole(image), CROP_SIDE, left)
        if view is None:
            body = Markup('<p class="muted">{}</p>').format(problem)
        else:
            shapes = [self._error(view, row) for row in rows[:MOST_BOXES].tolist()][::-1]
            body = view.svg(f"{self._index.paths[image]}: {said}", shapes)
        return Card(body, Markup("{}<br><span class='muted'>{}</span>").format(said, self._index.paths[image])), size

    def _view(self, image: int, window: np.ndarray, side: int, left: int) -> tuple[_View | None, int, str]:
        """The view, the bytes it adds to the page, and why there is no view."""
        photo = self._photos.of(image, window, side)
        if isinstance(photo, str):
            return None, 0, photo
        if len(photo.jpeg) > left:
            return None, 0, "Not shown: the page would become too large."
        name = "p" + "x".join(str(v) for v in (image, side, *(int(v) for v in window)))
        size = round(photo.width / DENSITY, 1), round(photo.height / DENSITY, 1)
        return _View(self._page.picture(name, photo.jpeg, *size), window, *size), len(photo.jpeg), ""

    def _whole(self, image: int) -> np.ndarray:
        height, width = (int(v) for v in self._index.image_hw[image])
        return np.array([0, 0, width, height])

    def _around(self, image: int, boxes: np.ndarray) -> np.ndarray:
        """The part of an image around boxes, with some of what surrounds them; whole pixels."""
        low, high = boxes[:, :2].min(0), boxes[:, 2:].max(0)
        margin = max(0.6 * float((high - low).max()), 16.0)
        limit = self._whole(image)[2:]
        low, high = np.maximum(np.floor(low - margin), 0), np.minimum(np.ceil(high + margin), limit)
        return np.r_[low, np.maximum(high, low + 1)].astype(int)


def _texts(tags: set[tuple[int, int]]) -> tuple[tuple[str, str], ...]:
    return tuple((str(c), str(k)) for c, k in sorted(tags))
