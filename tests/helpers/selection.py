"""Selections of detections with settings as keywords."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from models.postprocess.detections import select_detections
from models.postprocess.selection import PostprocessSettings
from models.postprocess.tiles import stitch_views
from utils.detections import Detections, DetectionTable


def select(boxes_xyxy: Tensor, scores: Tensor, **settings: Any) -> Detections:
    return select_detections(boxes_xyxy, scores, PostprocessSettings(**settings))


def stitch(table: DetectionTable, windows: np.ndarray, **settings: Any) -> DetectionTable:
    return stitch_views(table, windows, PostprocessSettings(conf_thres=0.0, **settings))
