"""The boxes of one image, with the attributes that programs written for Ultralytics' results use.

Frame: original pixels; values whose name ends in ``n`` are divided by the image's width and height. N detections of one
image, highest confidence first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from utils.boxes import scale_boxes, xyxy_to_cxcywh
from utils.detections import DetectionTable

PLAIN_COLUMNS = 6  # x1, y1, x2, y2, confidence, class
TRACKED_COLUMNS = 7  # x1, y1, x2, y2, id of the track, confidence, class


class Boxes:
    """Boxes with confidences and classes, as one tensor or array. ``boxes[0]`` and the items of an iteration are
    `Boxes` with one row."""

    def __init__(self, data: Tensor | np.ndarray, orig_shape: tuple[int, int]) -> None:
        """``data``: float (N, 6) or (6,): x1, y1, x2, y2, confidence, class; of tracked objects (N, 7) or (7,): the id
        of the track before the confidence. ``orig_shape``: height and width of the image."""
        self.data = data[None] if data.ndim == 1 else data
        height, width = orig_shape
        self.orig_shape = (height, width)
        if self.data.ndim != 2 or self.data.shape[1] not in (PLAIN_COLUMNS, TRACKED_COLUMNS):
            raise ValueError(
                f"rows of {PLAIN_COLUMNS} or {TRACKED_COLUMNS} numbers are expected, got the shape {tuple(data.shape)}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def xyxy(self) -> Tensor | np.ndarray:
        """Corners (N, 4)."""
        return self.data[:, :4]

    @property
    def xywh(self) -> Tensor | np.ndarray:
        """Center, width and height (N, 4)."""
        return _to_centers(self.xyxy)

    @property
    def xyxyn(self) -> Tensor | np.ndarray:
        """Corners (N, 4), normalized."""
        return self._normalized(self.xyxy)

    @property
    def xywhn(self) -> Tensor | np.ndarray:
        """Center, width and height (N, 4), normalized."""
        return self._normalized(self.xywh)

    @property
    def conf(self) -> Tensor | np.ndarray:
        """Confidences (N,)."""
        return self.data[:, -2]

    @property
    def cls(self) -> Tensor | np.ndarray:
        """Classes (N,), whole numbers of the type of ``data``."""
        return self.data[:, -1]

    @property
    def is_track(self) -> bool:
        """True if objects were tracked."""
        return self.data.shape[1] == TRACKED_COLUMNS

    @property
    def id(self) -> Tensor | np.ndarray | None:
        """Ids of tracks (N,), whole numbers of the type of ``data``; None if objects were not tracked."""
        return self.data[:, 4] if self.is_track else None

    @property
    def class_numbers(self) -> list[int]:
        """Classes as integers."""
        return self.array[:, -1].astype(int).tolist()

    @property
    def track_ids(self) -> list[int] | None:
        """Ids of tracks as integers; None if objects were not tracked."""
        return self.array[:, 4].astype(int).tolist() if self.is_track else None

    def table(self) -> DetectionTable:
        """Converts the boxes to the detections of one image, in float64."""
        boxes = self.array
        return DetectionTable(
            image_index=np.zeros(len(boxes), np.int64),
            boxes_xyxy_px=boxes[:, :4].astype(np.float64),
            scores=boxes[:, -2].astype(np.float64),
            classes=boxes[:, -1].astype(np.int64),
        )

    def cpu(self) -> Boxes:
        """Returns itself: detections are on the CPU."""
        return self

    def numpy(self) -> Boxes:
        """Returns the boxes with ``data`` as an array."""
        return Boxes(self.array, self.orig_shape)

    @property
    def array(self) -> np.ndarray:
        """``data`` as an array."""
        return self.data if isinstance(self.data, np.ndarray) else self.data.numpy()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor | np.ndarray) -> Boxes:
        return Boxes(self.data[index], self.orig_shape)

    def __iter__(self) -> Iterator[Boxes]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"Boxes(shape={self.shape}, orig_shape={self.orig_shape}, data={self.data})"

    def _normalized(self, boxes: Tensor | np.ndarray) -> Tensor | np.ndarray:
        height, width = self.orig_shape
        return scale_boxes(cast(Tensor, boxes), 1 / width, 1 / height)  # or an array, see `_to_centers`


def _to_centers(boxes: Tensor | np.ndarray) -> Tensor | np.ndarray:
    return xyxy_to_cxcywh(cast(Tensor, boxes))  # either type; mypy rejects a union of both


def boxes_of(table: DetectionTable, image_hw: tuple[int, int], tracks: np.ndarray | None = None) -> Boxes:
    """Converts the detections of one image to float32 on the CPU. ``tracks``: ids (N,) of their tracks."""
    ids = [] if tracks is None else [tracks[:, None]]
    columns = [table.boxes_xyxy_px, *ids, table.scores[:, None], table.classes[:, None]]
    return Boxes(torch.from_numpy(np.concatenate(columns, 1).astype(np.float32)), image_hw)
