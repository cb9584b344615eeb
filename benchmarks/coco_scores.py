"""Reads the files of detections that either side of a comparison writes, and scores them with pycocotools."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from engine.evaluation.coco_classes import COCO_IDS
from utils.detections import DetectionTable
from utils.errors import UserError
from utils.labels import GroundTruth


def require_pycocotools() -> None:
    """Raises UserError, before anything is measured, if pycocotools is not installed."""
    if importlib.util.find_spec("pycocotools") is None:
        raise UserError("pycocotools, which scores both sides, is not installed; pip install pycocotools")


def average_precision(predictions: Path, gt: GroundTruth, classes: int) -> float:
    """Returns the AP at IoU 0.50 to 0.95 of a file of detections.

    Args:
        predictions: COCO's result rows of either side.
        gt: ground truth of the same split.
        classes: number of classes C.
    """
    rows = json.loads(predictions.read_text())
    if not rows:
        return 0.0
    numbered = [
        row | {"image_id": image + 1, "category_id": label}
        for row, image, label in zip(rows, _image_indices(rows, gt), _class_indices(rows, classes).tolist())
    ]
    return float(_evaluate(_coco_ground_truth(gt, classes), numbered).stats[0])


def read_detections(predictions: Path, gt: GroundTruth, classes: int) -> DetectionTable:
    """Reads the same file as `average_precision` as a table, sorted by image."""
    rows = json.loads(predictions.read_text())
    image = np.array(_image_indices(rows, gt), np.int64)
    xywh = np.array([row["bbox"] for row in rows], np.float64).reshape(-1, 4)
    boxes = np.concatenate([xywh[:, :2], xywh[:, :2] + xywh[:, 2:]], axis=1)
    scores = np.array([row["score"] for row in rows], np.float64)
    order = np.argsort(image, kind="stable")
    return DetectionTable(image[order], boxes[order], scores[order], _class_indices(rows, classes)[order])


def _image_indices(rows: list[dict], gt: GroundTruth) -> list[int]:
    """Returns the index in the split of the image of each row.

    ``image_id`` or ``file_name`` is the stem of the image's file name; a stem of digits may be a number.
    """
    indices = {str(stem): index for index, stem in enumerate(gt.image_ids)}
    indices |= {str(int(stem)): index for stem, index in list(indices.items()) if stem.isdigit()}
    stems = [Path(row["file_name"]).stem if "file_name" in row else str(row["image_id"]) for row in rows]
    return [indices[stem] if stem in indices else indices[str(int(stem))] for stem in stems]


def _class_indices(rows: list[dict], classes: int) -> np.ndarray:
    """Returns the class of each row, int64 (N,), from 0.

    The peer, which names files, numbers classes from 1. This program numbers them from 0, or COCO's 80 as COCO does.
    """
    ids = np.array([row["category_id"] for row in rows], np.int64)
    if rows and "file_name" in rows[0]:
        return ids - 1
    if classes == len(COCO_IDS) and ids.max(initial=0) >= classes:
        return np.searchsorted(COCO_IDS, ids)
    return ids


def _coco_ground_truth(gt: GroundTruth, classes: int) -> Any:
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


def _evaluate(coco: Any, rows: list[dict]) -> Any:
    """Returns the finished ``COCOeval`` of detections given as COCO's result rows."""
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        evaluation = COCOeval(coco, coco.loadRes(rows), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation
