"""Detections in the format of COCO's results files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from utils.boxes import xyxy_to_xywh
from utils.structures import DetectionTable, GroundTruth
from utils.whole_file import replacing

# What float32 holds of a box: at thousandths of a pixel, one box of BCCD fell from one side of IoU 0.95 to the other
# (AP 0.5929 to 0.5935).
SCORE_DIGITS = 8
BOX_DIGITS = 5
_ROWS = 4096  # lines written at a time


def write_predictions(path: str | Path, table: DetectionTable, gt: GroundTruth) -> None:
    """One object a line: image_id, category_id, bbox (x, y, w, h in pixels), score; ids are those of ``gt``.

    pycocotools reads the file with ``loadRes``.
    """
    image_ids = [json.dumps(i) for i in gt.image_ids]
    boxes = np.round(xyxy_to_xywh(table.boxes_xyxy_px), BOX_DIGITS)
    scores = np.round(table.scores, SCORE_DIGITS)
    categories = np.asarray(gt.category_ids, dtype=np.int64)[table.classes]
    with replacing(path) as file:
        file.write(b"[")
        separator = "\n"
        for start in range(0, scores.size, _ROWS):
            part = slice(start, start + _ROWS)
            columns = (v[part].tolist() for v in (table.image_index, categories, boxes, scores))
            rows = [
                f'{{"image_id": {image_ids[i]}, "category_id": {c}, "bbox": {b}, "score": {s}}}'
                for i, c, b, s in zip(*columns)
            ]
            file.write((separator + ",\n".join(rows)).encode())
            separator = ",\n"
        file.write(b"\n]\n")
