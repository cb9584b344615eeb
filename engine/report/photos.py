"""Small pictures of a data set's images with boxes, embedded in a page as JPEG files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import cv2
import numpy as np
from markupsafe import Markup

from data.images.decode import read_reduced
from utils.drawing.draw import draw_boxes
from utils.drawing.page import CardPicture, embed_image
from utils.errors import UserError
from utils.pixels import GRAY, RGB8, PixelFormat, as_rgb8

PHOTO_SIDE = 420  # longer side of a whole image, pixels
CROP_SIDE = 300  # longer side of a part, pixels
DENSITY = 1.3  # pixels of a photo per pixel of the page
MAX_ENLARGEMENT = 3.0  # scale
DARK = 64  # images with only lower values are brightened
JPEG_QUALITY = 80
MIN_BOX_SIDE = 8  # pixels; smaller boxes would be drawn as dots
LINE_PX = 2
TEXT_PX = 14
MAX_OUTLINES = 150  # maximum number in a photo; more would hide it
# Colors of boxes by style, see `engine.report.image_errors.KIND_STYLES` for the styles of errors.
COLORS = {
    "correct": "#20c05c",
    "label": "#ffffff",
    "missed": "#ff8787",
    "spurious": "#ffa94d",
    "class": "#e599f7",
    "location": "#74c0fc",
    "both": "#faa2c1",
    "duplicate": "#ffe066",
}


class Outline(NamedTuple):
    """A box in a photo."""

    box_xyxy_px: Sequence[float] | np.ndarray  # original pixels
    style: str  # key of `COLORS`
    text: str = ""


class Overlay(NamedTuple):
    """A drawing of boxes into a photo."""

    title: str  # on the card
    label: str  # description of the picture for screen readers
    outlines: Sequence[Outline]  # earlier ones are on top


class PhotoFile(NamedTuple):
    """An image of a data set."""

    path: str  # absolute
    height: int
    width: int
    pixels: PixelFormat = RGB8

    def whole(self) -> np.ndarray:
        """Returns the window of the whole image: int64 (4,) x0, y0, x1, y1."""
        return np.array([0, 0, self.width, self.height])

    def around(self, boxes_xyxy_px: np.ndarray) -> np.ndarray:
        """Returns a window around boxes, float (n, 4), with a margin: int64 (4,), x0, y0, x1, y1.

        If a box exceeds the image, so does the window, by at most a fifth more. A box far outside is clipped
        to a quarter of the image's size around it. Examples of one box along x, in an image that is 400 wide:

            box         in reach    margin   window      limited by
            100 to 200  100 to 200  60       40 to 260
            10 to 60    10 to 60    30       0 to 90     the image
            -50 to 50   -50 to 50   60       -60 to 110  1.2 * -50, beyond the image
            450 to 900  450 to 500  30       370 to 520  400 - 30: the window shows a margin of the image
        """
        size = self.whole()[2:]
        reach = size / 4  # how far outside the image a box may be
        boxes = np.clip(boxes_xyxy_px, np.tile(-reach, 2), np.tile(size + reach, 2))
        low = boxes[:, :2].min(0)
        high = boxes[:, 2:].max(0)
        margin = max(0.6 * float((high - low).max()), 16.0)
        shown_image = np.minimum(reach, margin)  # a window shows at least this much of the image
        before_image = np.minimum(1.2 * low, 0)
        behind_image = 1.2 * np.maximum(high - size, 0)
        low = np.clip(low - margin, before_image, size - shown_image)
        high = np.clip(high + margin, shown_image, size + behind_image)
        return np.r_[np.floor(low), np.maximum(np.ceil(high), np.floor(low) + 1)].astype(int)


class Album:
    """Renders the photos of a page, in one gallery or several, up to ``max_bytes`` of JPEG files."""

    def __init__(self, max_bytes: int = 0) -> None:
        self._bytes_left = max_bytes
        self._is_full = False  # a photo did not fit

    def add_bytes(self, count: int) -> None:
        """Raises the limit by ``count`` for the next gallery, which may also use bytes that earlier ones left."""
        self._bytes_left += count
        self._is_full = False

    def pictures(self, source: PhotoFile, window: np.ndarray, side: int, *overlays: Overlay) -> list[CardPicture]:
        """Renders a window of an image once for each overlay.

        Args:
            window: x0, y0, x1, y1 in original pixels.
            side: longer side of the pictures, pixels.

        Returns a picture for each overlay, or one paragraph with the reason why the image is not shown.
        """
        if self._is_full:
            return _NOT_SHOWN
        try:
            part = _render(source, window, side)
        except (UserError, OSError) as error:
            return [CardPicture("", _muted(f"This image cannot be read ({error})."))]
        drawn = (_draw_outlines(part, window, overlay.outlines)[..., ::-1] for overlay in overlays)
        quality = [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY]
        files = [cv2.imencode(".jpg", picture, quality)[1].tobytes() for picture in drawn]
        size = sum(map(len, files))
        if size > self._bytes_left:
            self._is_full = True
            return _NOT_SHOWN
        self._bytes_left -= size
        width = part.shape[1] / DENSITY
        return [
            CardPicture(overlay.title, embed_image(file, "jpeg", overlay.label, "photo", width))
            for overlay, file in zip(overlays, files)
        ]


def in_window(boxes_xyxy_px: np.ndarray, window: np.ndarray) -> np.ndarray:
    """Returns which boxes (n, 4) are at least partly in ``window``: bool (n,)."""
    starts_before_end = boxes_xyxy_px[:, :2] < window[2:]
    ends_after_start = boxes_xyxy_px[:, 2:] > window[:2]
    return np.all(starts_before_end & ends_after_start, axis=1)


def outlines(boxes_xyxy_px: np.ndarray, style: str) -> list[Outline]:
    """Creates outlines of boxes (n, 4) without texts."""
    return [Outline(box, style) for box in boxes_xyxy_px]


def _draw_outlines(part: np.ndarray, window: np.ndarray, drawn: Sequence[Outline]) -> np.ndarray:
    """Draws boxes into a copy of ``part``, which shows ``window``."""
    boxes = np.array([outline.box_xyxy_px for outline in drawn], np.float64).reshape(-1, 4)
    shown = np.flatnonzero(in_window(boxes, window))[:MAX_OUTLINES]
    boxes = (boxes[shown] - np.tile(window[:2], 2)) * (part.shape[1] / (window[2] - window[0]))
    missing_px = np.maximum(MIN_BOX_SIDE - (boxes[:, 2:] - boxes[:, :2]), 0) / 2
    boxes = np.concatenate([boxes[:, :2] - missing_px, boxes[:, 2:] + missing_px], 1)
    texts = [drawn[i].text for i in shown]
    colors = np.array([[*bytes.fromhex(COLORS[drawn[i].style][1:])] for i in shown], np.uint8).reshape(-1, 3)
    return draw_boxes(part, boxes, texts, colors, thickness=LINE_PX, text_size=TEXT_PX)


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


def _muted(text: str) -> Markup:
    return Markup('<p class="muted">{}</p>').format(text)


_NOT_SHOWN = [CardPicture("", _muted("Not shown: the page would become too large."))]
