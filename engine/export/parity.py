"""The gate of exports: a file gets its name only if it detects what the checkpoint detects.

Detections are matched by image and class. Low scores are left out: at the threshold of NMS, a rounding error decides
which of two boxes is kept, and among low scores there are thousands of such pairs. D, E: detections of two models; P:
pairs of them.
"""

from __future__ import annotations

import copy
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from data.samples.readers import SampleReader
from engine.evaluation.evaluator import Evaluator
from engine.evaluation.matching import Objects, match_by_overlap, overlapping_pairs
from engine.evaluation.metrics import nanmean, score_detections
from engine.evaluation.result import EvalResult
from engine.export.formats import format_module, open_exported, require_packages
from engine.export.graphs import ModelGraphs, ResolvedExport, resolve_options
from engine.export.images import letterboxed
from engine.export.metadata import ExportMetadata
from models.detector import Detector
from models.postprocess.detections import BoxDecoder, Selected, select_detections
from models.postprocess.selection import ValidationSettings
from utils.boxes import xyxy_to_xywh
from utils.config.export_formats import EXPORT_FORMATS
from utils.config.settings import ExportConfig, TrainConfig
from utils.detections import DetectionTable
from utils.distributed.context import DistributedContext, torch_distributed_zero_first
from utils.errors import FailedCheck, UserError
from utils.labels import GroundTruth
from utils.logger import get_logger
from utils.strings import counted

CPU = torch.device("cpu")
BATCH = 8
JACKKNIFE_GROUPS = 64
MATCHED_SCORE = 0.05  # detections of lower scores are not matched


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The largest differences that are allowed."""

    min_iou: float  # lowest IoU of a match
    missing: float  # fraction of detections without a match; one detection is allowed in any case
    box: float  # difference of a side, as a fraction of the longer side of the box
    score: float
    on_average: bool  # whether ``box`` and ``score`` limit the mean over the matches, instead of each
    ap: float
    f1: float = math.inf
    # Whether AP may also differ by its paired spread (`Parity.ap_spread`). In few images, rounding moves whole steps of
    # AP. Only for precisions whose other limits demand the same detections, one by one.
    ap_may_spread: bool = True


FLOAT32 = Tolerance(min_iou=0.9, missing=0.01, box=1e-3, score=1e-4, on_average=False, ap=0.001)
FLOAT16 = Tolerance(min_iou=0.9, missing=0.05, box=0.01, score=0.01, on_average=True, ap=0.003)
INT8 = Tolerance(min_iou=0.5, missing=0.25, box=0.1, score=0.1, on_average=True, ap=0.015, f1=0.02, ap_may_spread=False)


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Differences between an exported model and its checkpoint, over all images of a check."""

    images: int
    matched: int
    missing: int  # detections of either model without a match
    box: float  # largest difference
    mean_box: float
    score: float
    mean_score: float
    ap: float  # of the exported model
    ap_checkpoint: float
    ap_spread: float  # twice the standard error of the difference of the two APs over the images; 0: not computed
    f1: float  # of the exported model, at `threshold`
    f1_checkpoint: float
    threshold: float
    worst_image: str

    @property
    def summary(self) -> str:
        return (
            f"AP {self.ap:.4f} (checkpoint {self.ap_checkpoint:.4f}), F1 at {self.threshold:.3f} {self.f1:.4f} "
            f"({self.f1_checkpoint:.4f}); detections: {self.matched} match, {self.missing} do not; boxes differ by at "
            f"most {self.box:.1e} of their size, scores by {self.score:.1e}"
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
        ap_limit = max(allowed.ap, self.ap_spread)
        if not abs(self.ap - self.ap_checkpoint) <= ap_limit:
            messages.append(f"AP is {self.ap:.4f} instead of {self.ap_checkpoint:.4f} (allowed: {ap_limit:.2g})")
        if not abs(self.f1 - self.f1_checkpoint) <= allowed.f1:
            messages.append(f"F1 is {self.f1:.4f} instead of {self.f1_checkpoint:.4f} (allowed: {allowed.f1:g})")
        return messages


class Reference:
    """The checkpoint's detections in the images of a check, computed once for all formats, without box voting.

    Tiles are compared one by one, as if they were images: joining the detections of an image's tiles could turn a
    rounding error into another box.
    """

    def __init__(
        self, model: nn.Module, reader: SampleReader, options: ResolvedExport, metadata: ExportMetadata, path: Path
    ) -> None:
        """Runs the checkpoint. Raises UserError if it detects nothing, so that there is nothing to compare.

        Args:
            model: maps images to what its ``decode`` takes, as the exported models do, see `InferenceModel`.
            reader: reads the images of the check, or tiles of them.
            metadata: of the files, which state the threshold at which F1 is compared; without one, it is the best one.
            path: the checkpoint, for messages.
        """
        self._reader = reader
        self._options = options
        self._metadata = metadata
        self._truth = _ground_truth_of(reader)
        self._result, self._table = self._detect(model, options.nms_iou)
        if not (self._table.scores > MATCHED_SCORE).any():
            raise UserError(
                f"{path}: detects nothing in {counted(len(reader.image_index), 'validation image')} (no score is above "
                f"{MATCHED_SCORE:g}), so an export cannot be checked; train it longer, name other images with --data, "
                "or use --no-check"
            )

    @property
    def conditions(self) -> str:
        """Names the images and the canvases, which differ from val.py's."""
        height, width = self._options.imgsz_hw
        canvas = f"{height}x{width} squares" if height == width else f"{height}x{width}, height x width"
        if self._options.dynamic:
            canvas = f"{max(height, width)} px rectangles"
        return f"{counted(len(self._reader.image_index), 'image')} ({canvas}, no box voting)"

    def compare(self, exported: nn.Module, allowed: Tolerance) -> Parity:
        """Runs an exported model on the same images, and returns how its detections differ from the checkpoint's."""
        threshold = self._metadata.confidence
        if threshold is None:
            threshold = self._result.shown_confidence
        result, table = self._detect(exported, self._metadata.nms_iou)
        pairs = match_tables(self._table, table, allowed.min_iou)
        ap_spread = 0.0
        if allowed.ap_may_spread and not abs(result.ap - self._result.ap) <= allowed.ap:
            num_classes = len(self._metadata.names)
            ap_spread = 2 * ap_difference_error(self._truth, self._table, table, num_classes=num_classes)
        samples = self._reader.sample_index
        return Parity(
            images=len(self._reader.image_index),
            matched=len(pairs.image),
            missing=len(pairs.missing),
            box=float(pairs.box.max(initial=0)),
            mean_box=float(pairs.box.sum() / max(len(pairs.box), 1)),
            score=float(pairs.score.max(initial=0)),
            mean_score=float(pairs.score.sum() / max(len(pairs.score), 1)),
            ap=float(np.nan_to_num(result.ap)),
            ap_checkpoint=float(np.nan_to_num(self._result.ap)),
            ap_spread=ap_spread,
            f1=_f1_at(result, threshold),
            f1_checkpoint=_f1_at(self._result, threshold),
            threshold=threshold,
            worst_image=samples.path(pairs.worst_image(len(samples))),
        )

    def _detect(self, model: nn.Module, nms_iou: float | None) -> tuple[EvalResult, DetectionTable]:
        """Runs a model on the images. Returns its scores and its detections."""
        settings = ValidationSettings(iou_thres=nms_iou, box_voting=False)

        def postprocess(model: nn.Module, raw: list[Tensor]) -> Selected:
            decoder = cast(BoxDecoder, model)
            for_ap, *_ = settings.selections(decoder.nms_iou)
            found = select_detections(*decoder.decode(raw), for_ap)
            return Selected(found, found, found)

        evaluator = Evaluator(
            ground_truth=self._truth,
            num_classes=len(self._metadata.names),
            postprocess=postprocess,
            ctx=DistributedContext.single(CPU),
        )
        evaluation = evaluator.run(model, letterboxed(self._reader, self._options, self._metadata.stride, BATCH))
        assert evaluation is not None  # only other ranks have none
        return evaluation.result, evaluation.for_ap


def _ground_truth_of(reader: SampleReader) -> GroundTruth:
    """Returns the labels of images or tiles, in pixels of the images, as `Evaluator` converts detections."""
    truth = reader.sample_index.ground_truth()
    if reader.tiles is None:
        return truth
    boxes = truth.boxes_xywh_px.copy()
    boxes[:, :2] += np.repeat(reader.tiles.windows[:, :2], np.diff(truth.offsets), axis=0)
    return replace(truth, boxes_xywh_px=boxes)


@dataclass(frozen=True)
class Pairs:
    """Detections of two models: P pairs, and Q detections of either model that the other lacks."""

    image: np.ndarray  # int64 (P,)
    box: np.ndarray  # float64 (P,) largest difference of a side, as a fraction of the longer side of the box
    score: np.ndarray  # float64 (P,) difference
    missing: np.ndarray  # int64 (Q,) images

    def worst_image(self, images: int) -> int:
        """Returns the image, of so many, with the most missing detections, or else the largest difference."""
        worst = np.zeros(images)
        np.maximum.at(worst, self.image, self.box + self.score)
        np.add.at(worst, self.missing, 1)
        return int(worst.argmax())


def match_tables(first: DetectionTable, second: DetectionTable, min_iou: float) -> Pairs:
    """Pairs detections of two models that have the same image and class, the best IoU first, and of equal ones the most
    alike scores.

    A detection counts as missing if its score is clearly above `MATCHED_SCORE`, so that rounding does not decide: half
    of it is enough for a partner.
    """
    num_classes = 1 + max(int(table.classes.max(initial=0)) for table in (first, second))
    tables = []
    groups = []  # a number for the image and class of each detection
    for table in (first, second):
        candidates = table.take(table.scores > MATCHED_SCORE / 2)
        group = candidates.image_index * num_classes + candidates.classes
        order = np.argsort(group, kind="stable")
        tables.append(candidates.take(order))
        groups.append(group[order])
    first, second = tables
    crowd = np.zeros(len(second.scores), bool)
    objects = Objects(groups[1], xyxy_to_xywh(second.boxes_xyxy_px), crowd=crowd)
    pairs = overlapping_pairs(groups[0], first.boxes_xyxy_px, objects, min_iou)
    alike = -np.abs(first.scores[pairs.detection] - second.scores[pairs.target])
    partner = match_by_overlap(pairs, alike, len(first.scores), len(second.scores))  # row in second, or -1: (D,)
    is_paired = partner >= 0
    is_second_paired = np.zeros(len(second.scores), bool)
    is_second_paired[partner[is_paired]] = True

    one = first.take(is_paired)
    other = second.take(partner[is_paired])
    is_compared = np.maximum(one.scores, other.scores) > MATCHED_SCORE
    one = one.take(is_compared)
    other = other.take(is_compared)
    longer_side = (one.boxes_xyxy_px[:, 2:] - one.boxes_xyxy_px[:, :2]).max(1, initial=0)
    largest = np.abs(one.boxes_xyxy_px - other.boxes_xyxy_px).max(1, initial=0)
    only_in_first = first.image_index[~is_paired & (first.scores > MATCHED_SCORE)]
    only_in_second = second.image_index[~is_second_paired & (second.scores > MATCHED_SCORE)]
    return Pairs(
        image=one.image_index,
        box=largest / np.maximum(longer_side, 1),
        score=np.abs(one.scores - other.scores),
        missing=np.r_[only_in_first, only_in_second],
    )


def ap_difference_error(
    truth: GroundTruth, first: DetectionTable, second: DetectionTable, *, num_classes: int
) -> float:
    """Returns the standard error of the difference between two models' APs in the same images, by the jackknife (Efron
    and Stein 1981) over at most `JACKKNIFE_GROUPS` groups of images; 0 for a single image."""
    groups = min(truth.num_images, JACKKNIFE_GROUPS)
    differences = []
    for group in range(groups):
        is_kept = np.arange(truth.num_images) % groups != group
        boxes = is_kept[truth.image_of_box]
        remaining = replace(
            truth,
            offsets=np.r_[0, (np.diff(truth.offsets) * is_kept).cumsum()],
            boxes_xywh_px=truth.boxes_xywh_px[boxes],
            classes=truth.classes[boxes],
            crowd=truth.crowd[boxes],
            area_px=truth.area_px[boxes],
        )
        rows = (table.take(is_kept[table.image_index]) for table in (first, second))
        before, after = (score_detections(remaining, table, num_classes).result.ap for table in rows)
        differences.append(after - before)
    return float(np.sqrt((groups - 1) * np.nan_to_num(np.nanvar(differences))))


def _f1_at(result: EvalResult, threshold: float) -> float:
    """Returns the mean F1 of the classes that have objects, at a confidence threshold."""
    column = min(int(np.searchsorted(result.curve_confidence, threshold)), len(result.curve_confidence) - 1)
    return float(np.nan_to_num(nanmean(result.curve_f1[:, column])))


def try_export(ctx: DistributedContext, config: TrainConfig, model: Detector) -> None:
    """Exports the untrained model of a run with ``--export``, so that a format that fails does so before the
    training."""
    if not config.export:
        return
    with torch_distributed_zero_first(ctx):
        if ctx.is_main:
            try_formats(model, config.export, config.imgsz)


def try_formats(detector: Detector, formats: Sequence[str], imgsz: int) -> None:
    """Exports ``detector`` to a temporary folder and compares all boxes and scores on noise: before training there may
    be no detections to compare. Raises FailedCheck for a file that computes something else, and UserError if an export
    fails."""
    started = time.monotonic()
    require_packages(formats)
    detector = copy.deepcopy(detector).to(CPU)
    config = ExportConfig(weights="untrained.pt", format=list(formats), check=False)
    options = resolve_options(config, detector.fuse(), imgsz)
    graphs = ModelGraphs(detector, options)
    names = detector.names
    metadata = ExportMetadata(names=names, imgsz_hw=options.imgsz_hw, channels=detector.channels)
    images = torch.rand(graphs.images().shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = graphs.module(half=False)(images)
    for name in dict.fromkeys(formats):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"untrained{EXPORT_FORMATS[name].suffix}")
            format_module(name).write(graphs, path, metadata)
            _, session = open_exported(path, CPU)
            difference = (session.run(images) - expected).abs()
        box = difference[:, :4].max().item() / imgsz
        score = difference[:, 4:].max().item()
        if not (box <= FLOAT32.box and score <= FLOAT32.score):
            raise FailedCheck(
                f"--export {name}: the file does not compute what the model does: boxes differ by {box:.2g} of the "
                f"image, scores by {score:.2g}"
            )
    get_logger().info("--export: tested: %s (%.0f s)", ", ".join(formats), time.monotonic() - started)
