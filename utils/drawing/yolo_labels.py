"""Detections as label files in YOLO's format."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from utils.boxes import scale_boxes, xyxy_to_cxcywh
from utils.files.safe_io import write_whole
from utils.structures import DetectionTable

FRACTION_DIGITS = 9  # of the image's size: a hundred-thousandth of a pixel in an image of 10,000


def write_yolo_labels(path: Path, image_hw: tuple[int, int], found: DetectionTable, *, scores: bool = False) -> None:
    """A line per detection: class, then cx cy w h as fractions of the image's size, and with ``scores`` the score."""
    path.parent.mkdir(parents=True, exist_ok=True)
    boxes = scale_boxes(xyxy_to_cxcywh(found.boxes_xyxy_px), 1 / image_hw[1], 1 / image_hw[0])
    columns = [found.classes[:, None], boxes] + ([found.scores[:, None]] if scores else [])
    rows = np.concatenate(columns, 1)
    form = "%d" + f" %.{FRACTION_DIGITS}f" * 4 + " %.6f" * scores + "\n"
    write_whole(path, "".join(form % tuple(row) for row in rows.tolist()))
