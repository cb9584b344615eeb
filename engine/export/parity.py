"""The check of an export: its own runtime and the checkpoint detect objects in the same images.

Detections are matched by image and class. Those of low scores are left out: at the threshold of NMS, a rounding error
decides which of two boxes is kept, and among low scores there are thousands of such pairs.

Legend: D detections of one model, E of the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from engine.evaluation.evaluator import Evaluator
from engine.export.images import CheckSet
from engine.inference.model import InferenceModel
from models.postprocess.detections import select_detections
from utils.distributed.context import DistributedContext
from utils.structures import Detections, DetectionTable, EvalResult

MATCHED_SCORE = 0.05  # detections of lower scores are not matched
LEAST_IOU = 0.9  # of a match
MISSING = 0.01  # fraction of detections without a match that is allowed, and one in any case


@dataclass(frozen=True)
class Tolerance:
    """The largest differences that are allowed; infinity where there is no limit."""

    box: float  # of a side, as a fraction of the longer side of the box
    score: float
    missing: float  # fraction of detections without a match
    ap: float
    f1: float


FLOAT32 = Tolerance(box=1e-3, score=1e-4, missing=MISSING, ap=0.001, f1=math.inf)
FLOAT16 = Tolerance(box=math.inf, score=math.inf, missing=math.inf, ap=0.003, f1=math.inf)
INT8 = Tolerance(box=math.inf, score=math.inf, missing=math.inf, ap=0.015, f1=0.02)


@dataclass(frozen=True)
class Parity:
    """How an exported model differs from its checkpoint."""

    images: int
    matched: int
    missing: int  # detections of either model without a match
    box: float
    score: float
    ap: float  # of the exported model
    ap_checkpoint: float
    f1: float  # at the checkpoint's threshold, of the exported model
    f1_checkpoint: float
    threshold: float
    worst_image: str

    @property
    def line(self) -> str:
        """The figures as text."""
        return (
            f"{self.images} images: AP {self.ap:.4f} (checkpoint {self.ap_checkpoint:.4f}), F1 at {self.threshold:.3f} "
            f"{self.f1:.4f} ({self.f1_checkpoint:.4f}); {self.matched} detections of both differ by at most "
            f"{self.box:.1e} of a box's size and {self.score:.1e} in score, {self.missing} of one only"
        )

    def violations(self, allowed: Tolerance) -> list[str]:
        """What is out of tolerance, as text."""
        fraction = self.missing / max(self.matched + self.missing, 1)
        found = []
        if self.box > allowed.box:
            found.append(f"boxes differ by {self.box:.2g} of their size (allowed: {allowed.box:g})")
        if self.score > allowed.score:
            found.append(f"scores differ by {self.score:.2g} (allowed: {allowed.score:g})")
        if self.missing > 1 and fraction > allowed.missing:
            found.append(f"{self.missing} detections have no counterpart of their class")
        if not abs(self.ap - self.ap_checkpoint) <= allowed.ap:
            found.append(f"AP is {self.ap:.4f} instead of {self.ap_checkpoint:.4f} (allowed: {allowed.ap:g})")
        if not abs(self.f1 - self.f1_checkpoint) <= allowed.f1:
            found.append(f"F1 is {self.f1:.4f} instead of {self.f1_checkpoint:.4f} (allowed: {allowed.f1:g})")
        return found


def tolerance(*, half: bool, int8: bool) -> Tolerance:
    """What is allowed for a precision."""
    return INT8 if int8 else FLOAT16 if half else FLOAT32


class Reference:
    """The checkpoint's detections in the images of a check, computed once for all formats."""

    def __init__(self, model: InferenceModel, images: CheckSet, *, layout: str, nms_iou: float | None) -> None:
        """
        Args:
            model: the checkpoint.
            layout: of the exports.
            nms_iou: threshold of the NMS that the detections need; None: none.
        """
        self._images, self._layout, self._classes = images, layout, model.num_classes
        self.result, self.table = self._run(model, nms_iou)
        self.threshold = self.result.best_confidence if model.confidence is None else model.confidence

    def compare(self, exported: InferenceModel) -> Parity:
        """Runs an exported model on the same images."""
        result, table = self._run(exported, exported.nms_iou)
        matches = match_tables(self.table, table)
        total = matches.box + matches.score + (matches.missing > 0)
        images = len(self._images.paths)
        return Parity(
            images=images,
            matched=int(matches.matched.sum()),
            missing=int(matches.missing.sum()),
            box=float(matches.box.max(initial=0)),
            score=float(matches.score.max(initial=0)),
            ap=_number(result.ap),
            ap_checkpoint=_number(self.result.ap),
            f1=f1_at(result, self.threshold),
            f1_checkpoint=f1_at(self.result, self.threshold),
            threshold=self.threshold,
            worst_image=self._images.paths[int(np.argmax(np.pad(total, (0, images - len(total)))))],
        )

    def _run(self, model: InferenceModel, nms_iou: float | None) -> tuple[EvalResult, DetectionTable]:
        evaluator = Evaluator(
            ground_truth=self._images.ground_truth,
            num_classes=self._classes,
            postprocess=partial(_postprocess, nms_iou=nms_iou, multi_label=self._layout != "deepstream"),
            ctx=DistributedContext.single(torch.device("cpu")),
        )
        result = evaluator.run(model, self._images.batches)
        return result, evaluator.detections


def _postprocess(model: nn.Module, raw: list[Tensor], *, nms_iou: float | None, multi_label: bool) -> Detections:
    boxes, scores = model.decode(raw)
    return select_detections(boxes, scores, conf_thres=0.001, iou_thres=nms_iou, max_det=300, multi_label=multi_label)


@dataclass(frozen=True)
class Matches:
    """By image, arrays (images,)."""

    matched: np.ndarray  # detections that both models have
    missing: np.ndarray  # detections of either that the other lacks
    box: np.ndarray  # largest difference of a side, as a fraction of the longer side of the box
    score: np.ndarray  # largest difference


def match_tables(first: DetectionTable, second: DetectionTable) -> Matches:
    """Pairs detections of two models that have the same image and class, the best IoU first.

    A detection counts as missing if its score is clearly above `MATCHED_SCORE`, so that rounding does not decide.
    """
    images = 1 + max((int(t.image_index.max(initial=-1)) for t in (first, second)), default=-1)
    columns = np.zeros((4, images))
    for image in range(images):
        columns[:, image] = _match_image(_rows(first, image), _rows(second, image))
    return Matches(columns[0].astype(int), columns[1].astype(int), columns[2], columns[3])


def _rows(table: DetectionTable, image: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    chosen = (table.image_index == image) & (table.scores > MATCHED_SCORE / 2)
    return table.boxes_xyxy_px[chosen], table.scores[chosen], table.classes[chosen]


def _match_image(first: tuple[np.ndarray, ...], second: tuple[np.ndarray, ...]) -> tuple[float, ...]:
    (a, a_scores, a_classes), (b, b_scores, b_classes) = first, second
    overlap = np.where(a_classes[:, None] == b_classes[None], _iou(a, b), 0.0)  # (D, E)
    order = np.argsort(-overlap, axis=None, kind="stable")
    order = order[overlap.ravel()[order] > LEAST_IOU]
    free_a, free_b = np.ones(len(a), bool), np.ones(len(b), bool)
    box = score = 0.0
    matched = 0
    for i, j in zip(*np.unravel_index(order, overlap.shape)):
        if free_a[i] and free_b[j]:
            free_a[i] = free_b[j] = False
            if a_scores[i] > MATCHED_SCORE:
                size = max(a[i, 2] - a[i, 0], a[i, 3] - a[i, 1], 1.0)
                box = max(box, float(np.abs(a[i] - b[j]).max() / size))
                score = max(score, abs(float(a_scores[i] - b_scores[j])))
                matched += 1
    missing = int((free_a & (a_scores > MATCHED_SCORE)).sum() + (free_b & (b_scores > MATCHED_SCORE)).sum())
    return matched, missing, box, score


def _iou(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """IoU of each pair of boxes xyxy (D, 4) and (E, 4): (D, E)."""
    low, high = np.maximum(a[:, None, :2], b[None, :, :2]), np.minimum(a[:, None, 2:], b[None, :, 2:])
    overlap = (high - low).clip(0).prod(-1)
    areas = [(t[:, 2:] - t[:, :2]).prod(-1) for t in (a, b)]
    return overlap / np.maximum(areas[0][:, None] + areas[1][None] - overlap, 1e-9)


def f1_at(result: EvalResult, threshold: float) -> float:
    """The mean F1 of the classes that have objects, at a confidence."""
    at = min(int(np.searchsorted(result.curve_confidence, threshold)), len(result.curve_confidence) - 1)
    precision, recall = result.curve_precision[:, at], result.curve_recall[:, at]
    known = ~np.isnan(recall) & (result.class_targets > 0)
    total = (precision + recall)[known]
    f1 = 2 * (precision * recall)[known] / np.where(total > 0, total, 1.0)
    return float(f1.mean()) if len(f1) else 0.0


def _number(value: float) -> float:
    return 0.0 if math.isnan(value) else value
