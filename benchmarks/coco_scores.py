"""Reads the files of detections that either side of a comparison writes, and scores them with pycocotools."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.evaluation.coco_classes import coco_category_ids
from tests.helpers.scoring import coco_evaluate
from utils.boxes import xywh_to_xyxy
from utils.detections import DetectionTable
from utils.errors import UserError
from utils.labels import GroundTruth


def require_pycocotools() -> None:
    """Raises UserError, before anything is measured, if pycocotools is not installed."""
    if importlib.util.find_spec("pycocotools") is None:
        raise UserError("pycocotools, which scores both sides, is not installed; pip install pycocotools")


def average_precision(predictions: Path, gt: GroundTruth, names: Sequence[str]) -> float:
    """Returns the AP at IoU 0.50 to 0.95 of a file of detections (`read_detections`)."""
    table = read_detections(predictions, gt, names)
    return float(coco_evaluate(gt, table)[0][0]) if table.scores.size else 0.0


def read_detections(predictions: Path, gt: GroundTruth, names: Sequence[str]) -> DetectionTable:
    """Reads COCO's result rows of either side as a table, sorted by image.

    ``image_id`` or ``file_name`` is the stem of the image's file name; a stem of digits may be a number. The peer,
    which names files, numbers classes from 1. This program numbers them from 0, or COCO's 80 as COCO does.

    Args:
        predictions: JSON file.
        gt: ground truth of the same split.
        names: names of the classes.
    """
    rows = json.loads(predictions.read_text())
    indices = {str(int(stem)) if str(stem).isdigit() else stem: index for index, stem in enumerate(gt.image_ids)}
    stems = [Path(row["file_name"]).stem if "file_name" in row else str(row["image_id"]) for row in rows]
    image = np.array([indices[str(int(stem)) if stem.isdigit() else stem] for stem in stems], np.int64)
    ids: Sequence[int] = coco_category_ids(tuple(names)) or range(len(names))
    if rows and "file_name" in rows[0]:
        ids = range(1, len(names) + 1)
    class_of_id = {category: number for number, category in enumerate(ids)}
    classes = np.array([class_of_id[row["category_id"]] for row in rows], np.int64)
    boxes = xywh_to_xyxy(np.array([row["bbox"] for row in rows], np.float64).reshape(-1, 4))
    scores = np.array([row["score"] for row in rows], np.float64)
    order = np.argsort(image, kind="stable")
    return DetectionTable(image[order], boxes[order], scores[order], classes[order])
