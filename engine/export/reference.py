"""The check of an export: the file, in its own runtime, and the checkpoint detect objects in the same images."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from data.samples.readers import SampleReader
from engine.evaluation.evaluator import Evaluator, Postprocess
from engine.evaluation.metrics import nanmean, score_detections
from engine.evaluation.result import EvalResult
from engine.export.differences import MATCHED_SCORE, Differences, match_tables
from engine.export.export_data import letterboxed
from engine.export.parity import Parity, Tolerance
from engine.formats.resolved_export import ResolvedExport
from engine.inference.model import InferenceModel
from models.postprocess.detections import Selected, detections_to_score, select_for_validation
from models.postprocess.selection import ValidationSettings
from utils.detections import DetectionTable
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.labels import GroundTruth
from utils.strings import counted

BATCH = 8
JACKKNIFE_GROUPS = 64


class Reference:
    """The checkpoint's detections in the images of a check, computed once for all formats.

    Tiles are compared one by one, as if they were images: joining the detections of an image's tiles could turn a
    rounding error into another box.

    Attributes:
        shown: scores with the thresholds on the canvases of the file.
        table: detections that exported models are compared with.
        result: scores of ``table``.
    """

    def __init__(self, model: InferenceModel, reader: SampleReader, options: ResolvedExport) -> None:
        """Runs the checkpoint. Raises UserError if it detects nothing, so that there is nothing to compare.

        Args:
            model: the checkpoint.
            reader: reads the images of the check, or tiles of them.
            options: result of `resolve_options`.
        """
        self._reader = reader
        self._letterboxed = partial(letterboxed, reader, options, model.stride, BATCH)  # anew for each model
        self._truth = _ground_truth_of(reader)
        settings = ValidationSettings(iou_thres=options.nms_iou, box_voting=options.box_voting)

        def postprocess(model: nn.Module, raw: list[Tensor]) -> Selected:
            return select_for_validation(model, raw)._replace(for_ap=detections_to_score(model, raw, settings))

        self.shown, self.table = self._score(model, postprocess)
        self.result = score_detections(self._truth, self.table, model.num_classes)
        if not (self.table.scores > MATCHED_SCORE).any():
            raise UserError(
                f"{model.path}: detects nothing in {counted(len(reader.image_index), 'validation image')} (no score is "
                f"above {MATCHED_SCORE:g}), so an export cannot be checked; train it longer, name other images with "
                "--data, or use --no-check"
            )

    def compare(self, exported: InferenceModel, allowed: Tolerance, *, threshold: float | None = None) -> Parity:
        """Runs an exported model on the same images, and returns how its detections differ from the checkpoint's.

        Args:
            allowed: its ``min_iou`` is the lowest IoU of two detections that match.
            threshold: confidence at which F1 of the scored detections is compared; None: the checkpoint's best one.
        """
        if threshold is None:
            threshold = self.result.shown_confidence
        settings = ValidationSettings(iou_thres=exported.nms_iou, box_voting=False)

        def postprocess(model: nn.Module, raw: list[Tensor]) -> Selected:
            return Selected(*[detections_to_score(model, raw, settings)] * 3)

        result, table = self._score(exported, postprocess)
        differences = match_tables(self.table, table, allowed.min_iou)
        ap_spread = 0.0
        if allowed.ap_may_spread and not abs(result.ap - self.result.ap) <= allowed.ap:
            ap_spread = 2 * ap_difference_error(self._truth, self.table, table, num_classes=exported.num_classes)
        samples = self._reader.sample_index
        return Parity(
            images=len(self._reader.image_index),
            matched=len(differences.image),
            missing=len(differences.missing),
            box=float(differences.box.max(initial=0)),
            mean_box=_mean(differences.box),
            score=float(differences.score.max(initial=0)),
            mean_score=_mean(differences.score),
            ap=float(np.nan_to_num(result.ap)),
            ap_checkpoint=float(np.nan_to_num(self.result.ap)),
            ap_spread=ap_spread,
            f1=f1_at(result, threshold),
            f1_checkpoint=f1_at(self.result, threshold),
            threshold=threshold,
            worst_image=samples.path(_worst_image(differences, len(samples))),
        )

    def _score(self, model: InferenceModel, postprocess: Postprocess) -> tuple[EvalResult, DetectionTable]:
        """Runs a model on the images. Returns its scores and the detections that are scored."""
        evaluator = Evaluator(
            ground_truth=self._truth,
            num_classes=model.num_classes,
            postprocess=postprocess,
            ctx=DistributedContext.single(torch.device("cpu")),
        )
        evaluation = evaluator.run(model, self._letterboxed())
        if evaluation is None:
            raise RuntimeError("a single process has no scores")
        return evaluation.result, evaluation.for_ap


def _ground_truth_of(reader: SampleReader) -> GroundTruth:
    """Returns the labels of images or tiles, in pixels of the images, as `Evaluator` converts detections."""
    truth = reader.sample_index.ground_truth()
    if reader.tiles is None:
        return truth
    boxes = truth.boxes_xywh_px.copy()
    boxes[:, :2] += np.repeat(reader.tiles.windows[:, :2], np.diff(truth.offsets), axis=0)
    return replace(truth, boxes_xywh_px=boxes)


def ap_difference_error(
    truth: GroundTruth, first: DetectionTable, second: DetectionTable, *, num_classes: int
) -> float:
    """Returns the standard error of the difference between two models' APs in the same images, by the jackknife (Efron
    and Stein 1981) over at most `JACKKNIFE_GROUPS` groups of images; 0 for a single image."""
    groups = min(truth.num_images, JACKKNIFE_GROUPS)
    differences = []
    for group in range(groups):
        is_kept = np.arange(truth.num_images) % groups != group
        remaining = _objects_of(truth, is_kept)
        aps = []
        for table in (first, second):
            rows = table.take(is_kept[table.image_index])
            aps.append(score_detections(remaining, rows, num_classes).ap)
        differences.append(aps[1] - aps[0])
    return float(np.sqrt((groups - 1) * np.nan_to_num(np.nanvar(differences))))


def _objects_of(truth: GroundTruth, is_kept: np.ndarray) -> GroundTruth:
    """Removes the objects of the images that are not kept. ``is_kept``: bool (N,)."""
    boxes = is_kept[truth.image_of_box]
    counts = np.diff(truth.offsets) * is_kept
    return replace(
        truth,
        offsets=np.r_[0, counts.cumsum()],
        boxes_xywh_px=truth.boxes_xywh_px[boxes],
        classes=truth.classes[boxes],
        crowd=truth.crowd[boxes],
        area_px=truth.area_px[boxes],
    )


def _mean(values: np.ndarray) -> float:
    """Returns the mean of ``values`` (P,); 0 if there are none."""
    return float(values.sum() / max(len(values), 1))


def _worst_image(differences: Differences, images: int) -> int:
    """Returns the image with the most missing detections, or else the largest difference of a pair."""
    worst = np.zeros(images)
    np.maximum.at(worst, differences.image, differences.box + differences.score)
    np.add.at(worst, differences.missing, 1)
    return int(worst.argmax())


def f1_at(result: EvalResult, threshold: float) -> float:
    """Returns the mean F1 of the classes that have objects, at a confidence threshold."""
    column = min(int(np.searchsorted(result.curve_confidence, threshold)), len(result.curve_confidence) - 1)
    return float(np.nan_to_num(nanmean(result.curve_f1[:, column])))
