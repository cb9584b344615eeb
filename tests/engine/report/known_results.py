"""Indexes, scores and errors that are known by construction."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from data.index import DatasetIndex
from engine.evaluation.analysis import KINDS, ErrorSplit
from engine.evaluation.result import EvalResult
from tests.helpers.synthetic_index import index_of


def index(
    boxes: list[int], side: float, names: tuple[str, ...] = ("a", "b", "c"), tile: int = 0, images: int = 1
) -> DatasetIndex:
    """Returns an index of images of 320 pixels, the first with ``boxes`` square boxes of each class."""
    classes = np.repeat(np.arange(len(boxes)), boxes)
    made = index_of(
        names=names[: len(boxes)],
        paths=[f"{i}.jpg" for i in range(images)],
        image_hw=np.full((images, 2), 320),
        offsets=np.array([0, *[len(classes)] * images]),
        boxes_xywh_px=np.tile([0.0, 0, side, side], (len(classes), 1)),
        classes=classes,
    )
    return replace(made, tile=tile)


def scored(*targets: int, ap: float = 0.5, f1: float = 0.5) -> EvalResult:
    classes = len(targets)
    curve = np.zeros((classes, 2))
    return EvalResult(
        metrics={"AP": ap, "AP50": ap, "f1": 0.5, "precision": 0.5, "recall": 0.5},
        class_metrics={
            "AP": np.linspace(ap, ap / 2, classes), "recall": np.full(classes, 0.5), "f1": np.full(classes, f1)
        },
        threshold=0.4, shown_confidence=0.4, ap_small=np.nan, ap_medium=np.nan,
        ap_large=np.nan, class_targets=np.array(targets), confusion=np.zeros((classes + 1, classes + 1), np.int64),
        curve_confidence=np.array([0.0, 1]), curve_precision=curve + 0.5,
        curve_recall=curve + 0.5, pr_recall=np.zeros(101), pr_precision=np.zeros((classes, 101)), num_images=2,
    )  # fmt: skip


def errors_of(costs: dict[int, float], counts: dict[tuple[int, int], int], classes: int = 2) -> ErrorSplit:
    """``counts``: by class and kind."""
    cost = np.array([costs.get(kind, 0.0) for kind in range(len(KINDS))])
    number = np.zeros((classes, len(KINDS)), int)
    for cell, count in counts.items():
        number[cell] = count
    return ErrorSplit(0.5, number, number * cost, cost, 0.0, 0.0)
