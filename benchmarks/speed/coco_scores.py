"""Scores prediction files with pycocotools, for both sides of a comparison."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from data.labels.coco_classes import COCO_IDS
from utils.labels import GroundTruth


def coco_ground_truth(gt: GroundTruth, classes: int) -> Any:
    """Returns a pycocotools ``COCO``; images are numbered from 1 in the order of the split, classes from 0."""
    from pycocotools.coco import COCO

    coco = COCO()
    image = np.repeat(np.arange(gt.num_images), np.diff(gt.offsets)) + 1
    rows = zip(image.tolist(), gt.classes.tolist(), gt.boxes_xywh_px.tolist(), gt.area_px.tolist(), gt.crowd.tolist())
    coco.dataset = {
        "images": [{"id": i + 1, "height": int(h), "width": int(w)} for i, (h, w) in enumerate(gt.image_hw)],
        "categories": [{"id": c, "name": str(c)} for c in range(classes)],
        "annotations": [
            {"id": n + 1, "image_id": i, "category_id": c, "bbox": b, "area": a, "iscrowd": int(crowd)}
            for n, (i, c, b, a, crowd) in enumerate(rows)
        ],
    }
    with contextlib.redirect_stdout(io.StringIO()):
        coco.createIndex()
    return coco


def image_indices(rows: list[dict], gt: GroundTruth) -> list[int]:
    """Returns the index in the split of the image of each row of COCO's results.

    Args:
        rows: ``image_id`` or ``file_name`` is the stem of the image's file name; a stem of digits may be a number.
        gt: ground truth of the split.
    """
    indices = {str(stem): index for index, stem in enumerate(gt.image_ids)}
    indices |= {str(int(stem)): index for stem, index in list(indices.items()) if stem.isdigit()}
    stems = [Path(row["file_name"]).stem if "file_name" in row else str(row["image_id"]) for row in rows]
    return [indices[stem] if stem in indices else indices[str(int(stem))] for stem in stems]


def average_precision(predictions: Path, gt: GroundTruth, classes: int) -> float:
    """Returns the AP at IoU 0.50 to 0.95 of a file of detections.

    Args:
        predictions: file in COCO's format (`image_indices`).
        gt: ground truth of the same split.
        classes: C. The file may number classes from 0, from 1 or as COCO; the numbering that fits best is used.
    """
    rows = json.loads(predictions.read_text())
    rows = [row | {"image_id": index + 1} for row, index in zip(rows, image_indices(rows, gt))]
    if not rows:
        return 0.0
    coco = coco_ground_truth(gt, classes)
    numberings = [range(classes), range(1, classes + 1)]
    if classes == len(COCO_IDS):
        numberings.append(COCO_IDS)
    scores = []
    for ids in numberings:
        class_of = {category_id: number for number, category_id in enumerate(ids)}
        numbered = [row | {"category_id": class_of.get(row["category_id"], -1)} for row in rows]
        scores.append(evaluate(coco, numbered).stats[0])
    return float(max(scores))


def evaluate(coco: Any, rows: list[dict]) -> Any:
    """Returns the finished ``COCOeval`` of detections given as COCO's result rows."""
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        evaluation = COCOeval(coco, coco.loadRes(rows), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation
