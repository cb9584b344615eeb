"""Detections as records: a list of dictionaries, or a pandas DataFrame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from engine.inference.results.result_boxes import Boxes
from utils.boxes import scale_boxes
from utils.machine.packages import require_package

DataFrame: TypeAlias = Any  # pandas.DataFrame; pandas is not required
SUMMARY_COLUMNS = ["name", "class", "confidence", "box"]
TRACK_COLUMN = "track_id"


def records_of(boxes: Boxes, names: Mapping[int, str], *, normalize: bool, decimals: int) -> list[dict[str, Any]]:
    """Returns a record of each detection: `SUMMARY_COLUMNS`, with x1, y1, x2, y2 in the box, and `TRACK_COLUMN` if
    objects were tracked. Numbers are rounded to ``decimals``; ``normalize``: corners as fractions of the image."""
    xyxy = boxes.array[:, :4]
    if normalize:
        height, width = boxes.orig_shape
        xyxy = scale_boxes(xyxy, 1 / width, 1 / height)
    corners = np.round(xyxy.astype(np.float64), decimals).tolist()
    scores = np.round(boxes.table().scores, decimals).tolist()
    records: list[dict[str, Any]] = [
        {"name": names[c], "class": c, "confidence": score, "box": dict(zip(("x1", "y1", "x2", "y2"), box))}
        for c, score, box in zip(boxes.class_numbers, scores, corners)
    ]
    if boxes.track_ids is not None:
        for record, track in zip(records, boxes.track_ids):
            record[TRACK_COLUMN] = track
    return records


def records_to_pandas(records: Sequence[dict[str, Any]], *, has_tracks: bool) -> DataFrame:
    """Converts records to a pandas DataFrame. Raises UserError if pandas is not installed."""
    pandas = require_package("pandas", "to_df()", "use summary(), a list of records")
    columns = [*SUMMARY_COLUMNS, TRACK_COLUMN] if has_tracks else SUMMARY_COLUMNS
    return pandas.DataFrame(records, columns=columns)
