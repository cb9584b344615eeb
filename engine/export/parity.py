"""The check of an export: its own runtime and the checkpoint detect objects in the same images.

Detections are matched by image and class. Those of low scores are left out: at the threshold of NMS, a rounding error
decides which of two boxes is kept, and among low scores there are thousands of such pairs.

AP alone cannot judge: that of a model which has learned nothing is zero, whatever its file computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from data.index.index import DatasetIndex
from data.loading.shared_memory import new_pixels
from data.loading.worker import collate
from data.render.letterbox import CanvasRule
from data.samples.dataset import LoadImagesAndLabels
from data.samples.readers import ImageReader
from engine.evaluation.evaluator import Evaluator, Postprocess
from engine.evaluation.matching import Objects, match_by_overlap, overlapping_pairs
from engine.evaluation.metrics import nanmean, score_detections
from engine.evaluation.result import EvalResult
from engine.inference.model import InferenceModel
from models.postprocess.detections import (
    SCORED,
    SELECTIONS,
    ValidationSettings,
    detections_to_score,
    select_for_validation,
)
from utils.batches import Batch, to_float
from utils.boxes import xyxy_to_xywh
from utils.config.settings import ExportConfig
from utils.detections import Detections, DetectionTable
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.strings import counted

BATCH = 8
MATCHED_SCORE = 0.05  # detections of lower scores are not matched


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The largest differences that are allowed."""

    min_iou: float  # of a match
    missing: float  # fraction of detections without a match; one detection is allowed in any case
    box: float  # of a side, as a fraction of the longer side of the box
    score: float
    on_average: bool  # whether ``box`` and ``score`` limit the mean over the matches, instead of each
    ap: float
    f1: float = math.inf


FLOAT32 = Tolerance(min_iou=0.9, missing=0.01, box=1e-3, score=1e-4, on_average=False, ap=0.001)
FLOAT16 = Tolerance(min_iou=0.9, missing=0.05, box=0.01, score=0.01, on_average=True, ap=0.003)
INT8 = Tolerance(min_iou=0.5, missing=0.25, box=0.1, score=0.1, on_average=True, ap=0.015, f1=0.02)


def tolerance_of(config: ExportConfig) -> Tolerance:
    """Returns what is allowed for the precision of an export."""
    if config.int8:
        return INT8
    return FLOAT16 if config.half else FLOAT32


@dataclass(frozen=True)
class Parity:
    """How an exported model differs from its checkpoint."""

    images: int
    matched: int
    missing: int  # detections of either model without a match
    box: float  # largest difference
    mean_box: float
    score: float
    mean_score: float
    ap: float  # of the exported model
    ap_checkpoint: float
    f1: float  # at the threshold, of the exported model
    f1_checkpoint: float
    threshold: float
    worst_image: str

    @property
    def line(self) -> str:
        return (
            f"{counted(self.images, 'image')}: AP {self.ap:.4f} (checkpoint {self.ap_checkpoint:.4f}), F1 at "
            f"{self.threshold:.3f} {self.f1:.4f} ({self.f1_checkpoint:.4f}); detections: {self.matched} of both, "
            f"at most {self.box:.1e} of a box's size and {self.score:.1e} in score apart, "
            f"{self.missing} without a counterpart"
        )

    def violations(self, allowed: Tolerance) -> list[str]:
        """Returns a message for each value that is out of tolerance, as NaN always is."""
        messages = []
        if not self.matched:
            messages.append("it has none of the checkpoint's detections")
        box = self.mean_box if allowed.on_average else self.box
        score = self.mean_score if allowed.on_average else self.score
        on_average = " on average" if allowed.on_average else ""
        if not box <= allowed.box:
            messages.append(f"boxes differ by {box:.2g} of their size{on_average} (allowed: {allowed.box:g})")
        if not score <= allowed.score:
            messages.append(f"scores differ by {score:.2g}{on_average} (allowed: {allowed.score:g})")
        total = self.matched + self.missing
        if self.missing > 1 and self.missing / total > allowed.missing:
            messages.append(
                f"{self.missing} of {total} detections have no counterpart of their class (allowed: "
                f"{allowed.missing:.0%})"
            )
        if not abs(self.ap - self.ap_checkpoint) <= allowed.ap:
            messages.append(f"AP is {self.ap:.4f} instead of {self.ap_checkpoint:.4f} (allowed: {allowed.ap:g})")
        if not abs(self.f1 - self.f1_checkpoint) <= allowed.f1:
            messages.append(f"F1 is {self.f1:.4f} instead of {self.f1_checkpoint:.4f} (allowed: {allowed.f1:g})")
        return messages


def spread(index: DatasetIndex, count: int) -> DatasetIndex:
    """Selects at most ``count`` images, evenly spread, in their order."""
    chosen = np.linspace(0, len(index) - 1, min(count, len(index))).round().astype(np.int64)
    return index.take(np.unique(chosen))


def calibration_images(index: DatasetIndex, config: ExportConfig) -> Iterator[np.ndarray]:
    """Yields letterboxed batches float32 (B, C, H, W) in [0, 1], each of ``config.batch`` images."""
    for batch in letterboxed(index, replace(config, dynamic=False), 1, config.batch):
        if len(batch.images) == config.batch:
            yield to_float(batch.images, torch.device("cpu"), torch.float32, channels_last=False).numpy()


def letterboxed(index: DatasetIndex, config: ExportConfig, stride: int, size: int) -> Iterator[Batch]:
    """Yields batches of ``size`` images on the canvases of an export.

    A dynamic model gets rectangles of several sizes, even if its images are padded to squares elsewhere, since its file
    must take any canvas.
    """
    samples = LoadImagesAndLabels(ImageReader(index, imgsz=max(config.imgsz), reduces=False))
    height, width = config.imgsz
    canvases = CanvasRule(max(config.imgsz), stride, fixed_hw=None if config.dynamic else (height, width))
    for request in samples.requests(size, canvases):
        pixels = new_pixels(len(request.keys), request.canvas_hw, index.pixels)
        yield collate(samples.render(request.keys, list(pixels.numpy())), pixels)


class Reference:
    """The checkpoint's detections in the images of a check, computed once for all formats.

    Attributes:
        shown: scores with the thresholds on the canvases of the file.
        table: detections that exported models are compared with.
        result: scores of ``table``.
    """

    def __init__(self, model: InferenceModel, index: DatasetIndex, config: ExportConfig) -> None:
        """Runs the checkpoint. Raises UserError if it detects nothing, so that there is nothing to compare.

        Args:
            model: the checkpoint.
            index: the images of the check.
            config: of `resolve_options`.
        """
        self._index = index
        self._letterboxed = partial(letterboxed, index, config, model.stride, BATCH)  # anew for each model
        self._truth = index.ground_truth()
        settings = ValidationSettings(iou_thres=config.iou_thres, box_voting=config.box_voting)

        def postprocess(model: nn.Module, raw: list[Tensor]) -> dict[str, Detections]:
            return select_for_validation(model, raw) | {SCORED: detections_to_score(model, raw, settings)}

        self.shown, self.table = self._score(model, postprocess)
        self.result = score_detections(self._truth, self.table, model.num_classes)
        if not (self.table.scores > MATCHED_SCORE).any():
            raise UserError(
                f"{model.path}: detects nothing in {counted(len(index), 'validation image')} (no score is above "
                f"{MATCHED_SCORE:g}), so an export cannot be checked; train it longer, name other images with --data, "
                "or use --no-check"
            )

    def compare(self, exported: InferenceModel, allowed: Tolerance, *, threshold: float | None = None) -> Parity:
        """Runs an exported model on the same images, and returns how its detections differ from the checkpoint's.

        Args:
            allowed: its ``min_iou`` is the lowest IoU of two detections that match.
            threshold: confidence at which F1 of the scored detections is compared; None: the checkpoint's best one.
        """
        if threshold is None:
            threshold = self.result.best_confidence
        settings = ValidationSettings(iou_thres=exported.nms_iou, box_voting=False)

        def postprocess(model: nn.Module, raw: list[Tensor]) -> dict[str, Detections]:
            return dict.fromkeys(SELECTIONS, detections_to_score(model, raw, settings))

        result, table = self._score(exported, postprocess)
        differences = match_tables(self.table, table, allowed.min_iou)
        matched = len(differences.image)
        worst = np.zeros(len(self._index))
        np.maximum.at(worst, differences.image, differences.box + differences.score)
        np.add.at(worst, differences.missing, 1)
        return Parity(
            images=len(worst),
            matched=matched,
            missing=len(differences.missing),
            box=float(differences.box.max(initial=0)),
            mean_box=float(differences.box.sum() / max(matched, 1)),
            score=float(differences.score.max(initial=0)),
            mean_score=float(differences.score.sum() / max(matched, 1)),
            ap=float(np.nan_to_num(result.ap)),
            ap_checkpoint=float(np.nan_to_num(self.result.ap)),
            f1=f1_at(result, threshold),
            f1_checkpoint=f1_at(self.result, threshold),
            threshold=threshold,
            worst_image=self._index.path(int(worst.argmax())),
        )

    def _score(self, model: InferenceModel, postprocess: Postprocess) -> tuple[EvalResult, DetectionTable]:
        """Runs a model on the images. Returns its scores and the detections that are scored."""
        evaluator = Evaluator(
            ground_truth=self._truth,
            num_classes=model.num_classes,
            postprocess=postprocess,
            ctx=DistributedContext.single(torch.device("cpu")),
        )
        result = evaluator.run(model, self._letterboxed())
        if result is None or evaluator.detections is None:
            raise RuntimeError("a single process has no scores")
        return result, evaluator.detections


@torch.no_grad()
def largest_difference(model: InferenceModel, exported: InferenceModel, images: Tensor) -> tuple[float, float]:
    """Compares the boxes of two models that return them in the same order, on ``images`` float32 (B, C, H, W).

    Returns the largest difference of a coordinate, as a fraction of the longer side of the images, and of a score; nan
    if one has nan.
    """
    boxes, scores = model.decode(model(images))
    other_boxes, other_scores = exported.decode(exported(images))
    box = (boxes - other_boxes).abs().max().item() / max(images.shape[2:])
    return box, (scores - other_scores).abs().max().item()


class Differences(NamedTuple):
    """Detections of two models: P pairs, and Q of either that the other lacks."""

    image: np.ndarray  # int64 (P,)
    box: np.ndarray  # float64 (P,) largest difference of a side, as a fraction of the longer side of the box
    score: np.ndarray  # float64 (P,) difference
    missing: np.ndarray  # int64 (Q,) images


def match_tables(first: DetectionTable, second: DetectionTable, min_iou: float) -> Differences:
    """Pairs detections of two models that have the same image and class, the best IoU first.

    A detection counts as missing if its score is clearly above `MATCHED_SCORE`, so that rounding does not decide.
    """
    classes = 1 + max(int(t.classes.max(initial=0)) for t in (first, second))

    def groups(table: DetectionTable) -> np.ndarray:
        return table.image_index * classes + table.classes

    a, b = (table.take(table.scores > MATCHED_SCORE / 2) for table in (first, second))
    a, b = (table.take(np.argsort(groups(table), kind="stable")) for table in (a, b))
    objects = Objects(groups(b), xyxy_to_xywh(b.boxes_xyxy_px), np.zeros(len(b.scores), bool))
    pairs = overlapping_pairs(groups(a), a.boxes_xyxy_px, objects, min_iou)
    alike = -np.abs(a.scores[pairs.detection] - b.scores[pairs.target])
    partner = match_by_overlap(pairs, alike, len(a.scores), len(b.scores))

    compared = partner >= 0
    compared &= np.maximum(a.scores, b.scores[partner] if len(b.scores) else 0.0) > MATCHED_SCORE
    one, other = a.take(compared), b.take(partner[compared])
    sides = one.boxes_xyxy_px[:, 2:] - one.boxes_xyxy_px[:, :2]
    unmatched = np.ones(len(b.scores), bool)
    unmatched[partner[partner >= 0]] = False
    return Differences(
        image=one.image_index,
        box=np.abs(one.boxes_xyxy_px - other.boxes_xyxy_px).max(1, initial=0) / np.maximum(sides.max(1, initial=0), 1),
        score=np.abs(one.scores - other.scores),
        missing=np.r_[
            a.image_index[(partner < 0) & (a.scores > MATCHED_SCORE)],
            b.image_index[unmatched & (b.scores > MATCHED_SCORE)],
        ],
    )


def f1_at(result: EvalResult, threshold: float) -> float:
    """Returns the mean F1 of the classes that have objects, at a confidence threshold."""
    column = min(int(np.searchsorted(result.curve_confidence, threshold)), len(result.curve_confidence) - 1)
    return float(np.nan_to_num(nanmean(result.curve_f1[:, column])))
