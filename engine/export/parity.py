"""The gate of exports: a file gets its name only if it scores as the checkpoint does.

AP and F1 are compared for every file, as val.py measures them on the file's canvas. They do not show small faults, nor
faults in the file of a model that has learned little, so boxes and scores of the layout raw are also compared one by
one.

Legend: B images, N boxes, C classes.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from data.samples.readers import SampleReader
from engine.evaluation.evaluator import Evaluator
from engine.evaluation.metrics import nanmean
from engine.evaluation.result import EvalResult, Evaluation
from engine.export.formats import format_module, open_exported, require_packages
from engine.export.graphs import END2END_MIN_SCORE, ModelGraphs, ResolvedExport, resolve_options
from engine.export.images import letterboxed
from engine.export.metadata import ExportMetadata
from models.detector import Detector
from models.postprocess.detections import BoxDecoder, Selected, select_detections, select_for_validation
from models.postprocess.selection import PostprocessSettings
from utils.batches import Batch, to_float
from utils.boxes import cxcywh_to_xyxy
from utils.config.export_formats import EXPORT_FORMATS
from utils.config.settings import ExportConfig, TrainConfig
from utils.distributed.context import DistributedContext, torch_distributed_zero_first
from utils.errors import FailedCheck, UserError
from utils.labels import GroundTruth
from utils.logger import get_logger
from utils.strings import counted

CPU = torch.device("cpu")
BATCH = 8
COMPARED_SCORE = 0.05  # boxes and scores are compared where one of the models has a higher score
LEARNED_AP = 0.05  # AP of a class that a file may not lose
MAX_LOST_F1 = 0.05  # the threshold is the best one of the checkpoint, not of the file


class CheckedModel(BoxDecoder, Protocol):
    """The part of a model that a check needs; an `InferenceModel` has it."""

    path: Path
    names: tuple[str, ...]
    stride: int

    def __call__(self, images: Tensor, /) -> list[Tensor]: ...

    def threshold(self, *, box_voting: bool) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The largest differences that are allowed."""

    box: float  # mean, see `mean_differences`
    score: float  # mean
    ap: float  # by which that of the file may be lower


FLOAT32 = Tolerance(box=1e-3, score=1e-4, ap=0.005)
FLOAT16 = Tolerance(box=0.005, score=0.003, ap=0.01)
INT8 = Tolerance(box=0.1, score=0.1, ap=0.015)


def mean_differences(expected: tuple[Tensor, Tensor], found: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Compares boxes (B, N, 4), xyxy pixels, and scores (B, N, C) where one of the scores is above `COMPARED_SCORE`, or
    all if none is: those of a model before its training.

    Returns the mean differences of the boxes, which is the largest of a box's coordinates as a fraction of its longer
    side, and of the scores; nan if one of them is nan.
    """
    (boxes, scores), (found_boxes, found_scores) = expected, found
    is_compared = ~(torch.maximum(scores, found_scores) <= COMPARED_SCORE)  # True where a score is nan
    if not is_compared.any():
        is_compared = torch.ones_like(is_compared)
    longer_side = (boxes[..., 2:] - boxes[..., :2]).abs().amax(-1).clamp(min=1)
    box = ((found_boxes - boxes).abs().amax(-1) / longer_side)[is_compared.any(-1)]
    return box.mean().item(), (found_scores - scores).abs()[is_compared].mean().item()


def difference_problems(box: float, score: float, allowed: Tolerance) -> list[str]:
    """Returns a message for each of the `mean_differences` that is out of tolerance, as nan always is."""
    problems = []
    if not box <= allowed.box:
        problems.append(f"boxes differ by {box:.2g} of their size on average (allowed: {allowed.box:g})")
    if not score <= allowed.score:
        problems.append(f"scores differ by {score:.2g} on average (allowed: {allowed.score:g})")
    return problems


class Parity(NamedTuple):
    """The result of a check."""

    summary: str
    problems: list[str]  # what is out of tolerance; empty: the file passes


class Reference:
    """The checkpoint's scores on the images of a check, computed once for all formats.

    AP and F1 are val.py's, but for the canvas, which is the file's, and for files whose graphs have NMS: these are
    compared with the checkpoint after the same NMS, without box voting. Tiles are scored one by one, as if they were
    images.
    """

    def __init__(self, model: CheckedModel, reader: SampleReader, options: ResolvedExport) -> None:
        """Runs the checkpoint's ``model``, with the ``nms_iou`` of the file, on the images, or tiles, of ``reader``.
        Raises UserError if there is no object or it detects nothing, so that there is nothing to compare."""
        self._reader = reader
        self._options = options
        self._model = model
        self._truth = _ground_truth_of(reader)
        images = counted(len(reader.image_index), "validation image")
        if not self._truth.boxes_per_class(len(model.names)).any():
            raise UserError(
                f"{model.path}: there is no object in {images}, so an export cannot be checked; name other images with "
                "--data, take more with --check-images, or use --no-check"
            )
        evaluation = self._evaluate(model)
        self.result = evaluation.result
        if not (evaluation.for_ap.scores > COMPARED_SCORE).any():
            raise UserError(
                f"{model.path}: detects nothing in {images} (no score is above {COMPARED_SCORE:g}), so an export "
                "cannot be checked; train it longer, name other images with --data, or use --no-check"
            )

    @property
    def conditions(self) -> str:
        """Names the images, the canvases, which may differ from val.py's, and an NMS that differs from val.py's."""
        height, width = self._options.imgsz_hw
        canvas = f"{height}x{width} squares" if height == width else f"{height}x{width}, height x width"
        if self._options.dynamic:
            canvas = f"{max(height, width)} px rectangles"
        if self._options.end2end and self._options.nms_iou is not None:
            canvas += f", NMS at {self._options.nms_iou:g}, no box voting"
        return f"{counted(len(self._reader.image_index), 'image')} ({canvas})"

    def compare(self, exported: CheckedModel, allowed: Tolerance) -> Parity:
        """Scores an exported model on the same images, with its own threshold."""
        expected = self.result
        found = self._evaluate(exported).result
        threshold = exported.threshold(box_voting=True)
        f1, expected_f1 = (_f1_at(result, threshold) for result in (found, expected))
        summary = f"AP {found.ap:.4f} (checkpoint {expected.ap:.4f}), F1 {f1:.4f} ({expected_f1:.4f}) at confidence "
        summary += f"{threshold:.3f}"
        problems = []
        if not self._options.end2end:
            images = to_float(next(self._batches()).images, CPU, torch.float32, channels_last=False)
            with torch.no_grad():
                outputs = [model.decode(model(images)) for model in (self._model, exported)]
            box, score = mean_differences(*outputs)
            problems += difference_problems(box, score, allowed)
            summary += f"; mean differences: boxes {box:.1e} of their size, scores {score:.1e}"
        if found.ap < expected.ap - allowed.ap:
            problems.append(f"AP is {found.ap:.4f} instead of {expected.ap:.4f} (allowed: {allowed.ap:g} less)")
        if f1 < expected_f1 - MAX_LOST_F1:
            problems.append(f"F1 is {f1:.4f} instead of {expected_f1:.4f} (allowed: {MAX_LOST_F1:g} less)")
        for lost in np.flatnonzero((expected.class_ap >= LEARNED_AP) & (found.class_ap == 0)):
            problems.append(f"it does not detect {self._model.names[lost]}")
        return Parity(summary, problems)

    def _batches(self) -> Iterator[Batch]:
        return letterboxed(self._reader, self._options, self._model.stride, BATCH)

    def _evaluate(self, model: CheckedModel) -> Evaluation:
        evaluator = Evaluator(
            ground_truth=self._truth,
            num_classes=len(self._model.names),
            postprocess=_select_rows if self._options.end2end else select_for_validation,
            ctx=DistributedContext.single(CPU),
        )
        evaluation = evaluator.run(cast(nn.Module, model), self._batches())
        assert evaluation is not None  # only other ranks have none
        return evaluation


def _select_rows(model: nn.Module, raw: list[Tensor]) -> Selected:
    """Selects the detections of `EndToEnd`, from its rows or from the boxes of the checkpoint."""
    decoder = cast(BoxDecoder, model)
    settings = PostprocessSettings(conf_thres=END2END_MIN_SCORE, iou_thres=decoder.nms_iou, box_voting=False)
    rows = select_detections(*decoder.decode(raw), settings)
    return Selected(rows, rows)


def _ground_truth_of(reader: SampleReader) -> GroundTruth:
    """Returns the labels of images or tiles, in pixels of the images, as `Evaluator` converts detections."""
    truth = reader.sample_index.ground_truth()
    if reader.tiles is None:
        return truth
    boxes = truth.boxes_xywh_px.copy()
    boxes[:, :2] += np.repeat(reader.tiles.windows[:, :2], np.diff(truth.offsets), axis=0)
    return replace(truth, boxes_xywh_px=boxes)


def _f1_at(result: EvalResult, threshold: float) -> float:
    """Returns the mean F1 of the classes that have objects, at a confidence threshold."""
    column = min(int(np.searchsorted(result.curve_confidence, threshold)), len(result.curve_confidence) - 1)
    return float(np.nan_to_num(nanmean(result.curve_f1[:, column])))


def try_export(ctx: DistributedContext, config: TrainConfig, model: Detector) -> None:
    """Exports the untrained model of a run with ``--export`` to a temporary folder, so that a format that fails does so
    before the training. Compares all boxes and scores on noise: there may be no detections yet. Raises FailedCheck for
    a file that computes something else, and UserError if an export fails."""
    if not config.export:
        return
    with torch_distributed_zero_first(ctx):
        if ctx.is_main:
            _try_formats(model, config)


def _try_formats(model: Detector, training: TrainConfig) -> None:
    formats = list(dict.fromkeys(training.export))
    started = time.monotonic()
    require_packages(formats)
    detector = copy.deepcopy(model).to(CPU)
    config = ExportConfig(weights="untrained.pt", format=formats, check=False)
    options = resolve_options(config, detector.fuse(), training.imgsz)
    graphs = ModelGraphs(detector, options)
    metadata = ExportMetadata(names=detector.names, imgsz_hw=options.imgsz_hw, channels=detector.channels)
    images = torch.rand(graphs.images().shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = graphs.module(half=False)(images)
    for name in formats:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"untrained{EXPORT_FORMATS[name].suffix}")
            format_module(name).write(graphs, path, metadata)
            _, session = open_exported(path, CPU)
            found = session.run(images)
        columns = [output.transpose(1, 2) for output in (expected, found)]
        outputs = [(cxcywh_to_xyxy(each[..., :4]), each[..., 4:]) for each in columns]
        problems = difference_problems(*mean_differences(*outputs), FLOAT32)
        if problems:
            raise FailedCheck(f"--export {name}: the file does not compute what the model does: {'; '.join(problems)}")
    get_logger().info("--export: tested: %s (%.0f s)", ", ".join(formats), time.monotonic() - started)
