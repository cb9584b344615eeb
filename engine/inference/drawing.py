"""Detections drawn into an image, shown on the screen, and described in words."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import cv2
import numpy as np

from utils.drawing.draw import class_colors, draw_boxes
from utils.errors import UserError

ClassNames: TypeAlias = "Mapping[int, str] | Sequence[str]"


def draw_detections(
    image: np.ndarray,
    boxes_xyxy_px: np.ndarray,
    *,
    classes: np.ndarray,
    scores: np.ndarray | None,
    tracks: Sequence[int] | np.ndarray | None,
    names: ClassNames | None,
    line_width: int = 0,
) -> np.ndarray:
    """Draws boxes (N, 4) into a copy of ``image``, uint8 (H, W, 3) RGB.

    Args:
        classes, scores: (N,); without scores, labels do not show them.
        tracks: ids (N,), each with its own color; None: one color per class.
        names: class names; None: without labels.
        line_width: pixels; 0: by image size.
    """
    labels = None if names is None else label_texts(names, classes.tolist(), scores, tracks)
    colors = class_colors(classes if tracks is None else np.asarray(tracks))
    return draw_boxes(image, boxes_xyxy_px, labels, colors, thickness=line_width)


def label_texts(
    names: ClassNames, classes: Iterable[int], scores: Iterable[float] | None, tracks: Iterable[int] | None = None
) -> list[str]:
    """Returns the labels of boxes, such as ``#3 person 0.85``; without confidences if ``scores`` is None, and without
    ids if ``tracks`` is None."""
    texts = [names[c] for c in classes]
    if tracks is not None:
        texts = [f"#{track} {text}" for track, text in zip(tracks, texts)]
    if scores is not None:
        texts = [f"{text} {score:.2f}" for text, score in zip(texts, scores)]
    return texts


def describe_counts(counts: Mapping[int, int], names: ClassNames) -> str:
    """Lists detections by class, such as ``person 2, bus 1``. Names are not inflected: they may be in any language."""
    return ", ".join(f"{names[c]} {count:,}" for c, count in sorted(counts.items())) or "nothing found"


class Window:
    """A window on the screen that shows one image at a time. Raises UserError where none can be opened."""

    NAME = "lockstep"

    def __init__(self) -> None:
        # Without a display, some builds of OpenCV end the process instead of raising.
        has_display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
        try:
            if sys.platform.startswith("linux") and not has_display:
                raise UserError("no window can be opened: there is no display; images can be saved instead")
            cv2.namedWindow(self.NAME, cv2.WINDOW_NORMAL)
        except cv2.error:
            raise UserError(
                "this OpenCV cannot open windows (a headless build?); images can be saved instead"
            ) from None

    def show(self, image: np.ndarray, *, wait: bool) -> bool:
        """Shows ``image`` (RGB); with ``wait``, until a key is pressed. Returns False if the key is q or Esc."""
        cv2.imshow(self.NAME, image[..., ::-1])
        return cv2.waitKey(0 if wait else 1) & 0xFF not in (ord("q"), 27)

    def close(self) -> None:
        cv2.destroyWindow(self.NAME)
