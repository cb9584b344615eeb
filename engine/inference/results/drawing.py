"""Detections drawn into an image, and described in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from utils.drawing.draw import class_colors, draw_boxes

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
