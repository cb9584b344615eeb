"""Small pictures of a data set's images on a page, and boxes drawn over them.

Photos are small JPEG files inside the page (`pictures` in utils/drawing/page.py). Boxes are SVG, in pixels of the page.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import cv2
import numpy as np
from markupsafe import Markup

from data.image_io.decode import read_reduced
from utils.config.pixels import RGB8, PixelFormat, as_rgb8
from utils.errors import UserError
from utils.structures import GRAY

PHOTO_SIDE, CROP_SIDE = 420, 300  # pixels
DENSITY = 1.3  # pixels of a photo per pixel of the page
MOST_ENLARGED = 3.0
DARK = 64  # an image whose samples are all below is stretched
JPEG_QUALITY = 80
LEAST_SIDE = 6  # pixels of a drawn box, which else would be a dot
LETTER_PX, LINE_PX = 7.4, 11  # of the text over a photo


class Photo(NamedTuple):
    jpeg: bytes
    width: int
    height: int


class Source(NamedTuple):
    """An image of a data set."""

    path: str  # absolute
    height: int
    width: int
    pixels: PixelFormat = RGB8

    def whole(self) -> np.ndarray:
        """int64 (4,) x0, y0, x1, y1."""
        return np.array([0, 0, self.width, self.height])

    def around(self, boxes_xyxy_px: np.ndarray) -> np.ndarray:
        """The part of the image around boxes, float (n, 4), with some of what surrounds them: int64 (4,), x0, y0, x1,
        y1. Where a box exceeds the image, so does the part, by at most a quarter of the image's size."""
        size = self.whole()[2:]
        beyond = size / 4
        boxes = np.clip(boxes_xyxy_px, np.tile(-beyond, 2), np.tile(size + beyond, 2))
        low, high = boxes[:, :2].min(0), boxes[:, 2:].max(0)
        margin = max(0.6 * float((high - low).max()), 16.0)
        low = np.clip(low - margin, np.minimum(1.2 * low, 0), size - np.minimum(beyond, margin))
        high = np.clip(high + margin, np.minimum(beyond, margin), size + 1.2 * np.maximum(high - size, 0))
        return np.r_[np.floor(low), np.maximum(np.ceil(high), np.floor(low) + 1)].astype(int)


class Photos:
    """Small versions of images, kept from one page to the next."""

    def __init__(self) -> None:
        self._kept: dict[tuple, Photo | str] = {}
        self._used: set[tuple] = set()

    def begin_page(self) -> None:
        """Forgets what the last page did not use."""
        self._kept = {key: self._kept[key] for key in self._used if key in self._kept}
        self._used = set()

    def of(self, source: Source, window: np.ndarray, side: int) -> Photo | str:
        """The part ``window`` of an image (x0, y0, x1, y1 in original pixels) with its longer side at most ``side``, or
        why there is none."""
        key = (source, side, *window.tolist())
        self._used.add(key)
        if key not in self._kept:
            try:
                self._kept[key] = _render(source, window, side)
            except (UserError, OSError) as error:
                self._kept[key] = f"This image cannot be read ({error})."
        return self._kept[key]


def _render(source: Source, window: np.ndarray, side: int) -> Photo:
    x0, y0, x1, y1 = window
    scale = min(side / max(x1 - x0, y1 - y0), MOST_ENLARGED)
    least_hw = round(source.height * scale), round(source.width * scale)
    pixels = as_rgb8(read_reduced(source.path, least_hw, pixels=source.pixels)[0])
    if pixels.max(initial=0) < DARK:  # 16-bit samples of which few bits are used, or night
        deep = read_reduced(source.path, least_hw, pixels=replace(source.pixels, bits=16))[0]
        pixels = as_rgb8((deep * (65535.0 / max(deep.max(initial=0), 1))).astype(np.uint16))
    gain = np.array([pixels.shape[1] / source.width, pixels.shape[0] / source.height])
    (left, top), (right, bottom) = np.floor(window[:2] * gain).astype(int), np.ceil(window[2:] * gain).astype(int)
    part = np.ascontiguousarray(pixels[max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)])
    beyond = max(-top, 0), max(bottom - pixels.shape[0], 0), max(-left, 0), max(right - pixels.shape[1], 0)
    if any(beyond):
        part = cv2.copyMakeBorder(part, *beyond, cv2.BORDER_CONSTANT, value=(GRAY,) * 3)
    size = (max(round((x1 - x0) * scale), 1), max(round((y1 - y0) * scale), 1))
    part = cv2.resize(part, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR)
    done, encoded = cv2.imencode(".jpg", part[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    if not done:
        raise UserError("it cannot be encoded as JPEG")
    return Photo(encoded.tobytes(), *size)


class View:
    """A photo on the page, and the mapping of boxes to its units, which are pixels of the page.

    Args:
        element: draws the photo.
        window: the part of the image that it shows, in original pixels.
    """

    def __init__(self, element: Markup, window: np.ndarray, width: float, height: float) -> None:
        self._element, self._window, self._width, self._height = element, window, width, height
        self._scale = width / (window[2] - window[0])
        self._texts: list[tuple[float, float, float]] = []  # left, right and base line of each

    def shows(self, boxes: np.ndarray) -> np.ndarray:
        """Which boxes, xyxy (n, 4) in original pixels, are in the picture at least in part: bool (n,)."""
        return (boxes[:, :2] < self._window[2:]).all(1) & (boxes[:, 2:] > self._window[:2]).all(1)

    def rect(self, box: np.ndarray, style: str, title: str, text: str = "") -> Markup:
        """An outlined box with a tooltip. ``text`` is above it or inside its top edge, or else below it; it is left out
        where it would cover the text of an earlier box."""
        x0, y0, x1, y1 = self._place(box)
        shape = Markup('<rect class="{}" x="{:.0f}" y="{:.0f}" width="{:.0f}" height="{:.0f}"><title>{}</title></rect>')
        x0, y0 = min(x0, (x0 + x1 - LEAST_SIDE) / 2), min(y0, (y0 + y1 - LEAST_SIDE) / 2)
        drawn = shape.format(style, x0, y0, max(x1 - x0, LEAST_SIDE), max(y1 - y0, LEAST_SIDE), title)
        if not text:
            return drawn
        length = LETTER_PX * len(text)
        x = max(min(x0 + 1, self._width - length), 1)
        for base in (y0 - 3 if y0 > LINE_PX + 3 else y0 + LINE_PX, y1 + LINE_PX):
            y = min(max(base, LINE_PX), self._height - 3)
            if all(x >= right or left >= x + length or abs(y - other) >= LINE_PX for left, right, other in self._texts):
                self._texts.append((x, x + length, y))
                return drawn + Markup('<text class="{}" x="{:.0f}" y="{:.0f}">{}</text>').format(style, x, y, text)
        return drawn

    def outlines(self, boxes: np.ndarray, style: str, most: int = 150) -> Markup:
        """Many boxes, at most ``most``, in one element; those outside the picture are left out."""
        placed = (self._place(box) for box in boxes[self.shows(boxes)][:most])
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


class Album:
    """Puts photos into the ``pictures`` of a page, until the JPEG files that it has added have ``most_bytes``."""

    def __init__(self, pictures: dict[str, tuple], photos: Photos, most_bytes: int) -> None:
        self._pictures, self._photos, self._left = pictures, photos, most_bytes

    def view(self, source: Source, window: np.ndarray, side: int) -> View | Markup:
        """The part ``window`` of an image, or a paragraph that says why it is not shown. Arguments: see `Photos.of`."""
        photo = self._photos.of(source, window, side)
        if isinstance(photo, str):
            return _muted(photo)
        if len(photo.jpeg) > self._left:
            return _muted("Not shown: the page would become too large.")
        self._left -= len(photo.jpeg)
        name = "p" + hashlib.blake2b(repr((source, side, *window.tolist())).encode(), digest_size=8).hexdigest()
        size = round(photo.width / DENSITY, 1), round(photo.height / DENSITY, 1)
        self._pictures[name] = (photo.jpeg, *size)
        return View(Markup('<use href="#{}"/>').format(name), window, *size)


def _muted(text: str) -> Markup:
    return Markup('<p class="muted">{}</p>').format(text)
