"""Detections of a batch, padded, in canvas pixels, and of many images, as flat arrays, in original pixels.

Legend: B images in a batch, K slots per image, D detections. ``_px``: pixels of the original image, upright after EXIF
rotation. ``xyxy``: corners.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Detections(NamedTuple):
    """Detections of a batch after NMS, padded to K per image. An image's slots beyond its count are zero."""

    boxes_xyxy: Tensor  # float32 (B, K, 4) canvas pixels
    scores: Tensor  # float32 (B, K), descending
    classes: Tensor  # int64 (B, K)
    counts: Tensor  # int64 (B,)


def to_host(*selections: Detections) -> list[Detections]:
    """Copies detections to the CPU. The host waits once for the device."""
    copies = [Detections(*(column.to("cpu", non_blocking=True) for column in detections)) for detections in selections]
    device = selections[0].counts.device
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return copies


@dataclass(frozen=True, slots=True)
class DetectionTable:
    """Detections of many images as flat arrays, original pixels."""

    image_index: np.ndarray  # int64 (D,)
    boxes_xyxy_px: np.ndarray  # float64 (D, 4), clipped to the image
    scores: np.ndarray  # float64 (D,)
    classes: np.ndarray  # int64 (D,)

    @classmethod
    def concatenate(cls, tables: Iterable[DetectionTable]) -> DetectionTable:
        """Concatenates tables. Returns an empty table if there are none."""
        empty = cls(np.zeros(0, np.int64), np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64))
        joined = [empty, *tables]
        return cls(*(np.concatenate([getattr(table, column.name) for table in joined]) for column in fields(cls)))

    def take(self, rows: np.ndarray | slice) -> DetectionTable:
        """Selects ``rows``, which are a mask, indices or a slice."""
        return DetectionTable(*(getattr(self, column.name)[rows] for column in fields(self)))
