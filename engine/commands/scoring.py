"""Scores a model on a split, with tiles and test-time augmentation, for val.py and tools."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from torch import Tensor, nn

from data.dataset.spec import DatasetSpec
from data.index.index import DatasetIndex
from data.loading.build import (
    build_val_loader,
    check_has_images,
    check_same_data,
    log_loader_workers,
    open_tile_reader,
    open_val_index,
)
from data.loading.loader import ValidationLoader
from data.render.letterbox import CanvasRule
from data.samples.readers import ImageReader, SampleReader
from data.samples.tiles import TiledIndex
from engine.evaluation.evaluator import build_evaluator
from engine.evaluation.result import Evaluation
from engine.inference.model import CheckpointModel, InferenceModel, autocast_type
from engine.inference.model_data import class_columns
from engine.inference.settings import resolve_imgsz
from models.detector import CPU_CHUNK
from models.postprocess.detections import select_for_validation
from models.postprocess.selection import ValidationSettings
from models.postprocess.tiles import Tiles
from models.postprocess.tiling import TiledDetector, ViewInput
from models.postprocess.tta import TestTimeAugmentation
from utils.config.settings import Hyperparameters, ValConfig
from utils.detections import Detections
from utils.distributed.context import DistributedContext, broadcast_object
from utils.labels import GroundTruth
from utils.logger import progress


@dataclass(frozen=True)
class SplitScores:
    """The scores of a model on a split, and the detections that were scored."""

    evaluation: Evaluation
    truth: GroundTruth
    index: DatasetIndex
    canvases: CanvasRule


def score(
    config: ValConfig,
    model: InferenceModel,
    spec: DatasetSpec,
    ctx: DistributedContext,
    *,
    index: DatasetIndex | None = None,
) -> SplitScores | None:
    """Scores a model on the split ``config.task``. Every process of the run must call this; all but rank 0 get None.

    | tiles                         | who cuts them   | their size for the model | who joins the detections |
    | ----------------------------- | --------------- | ------------------------ | ------------------------ |
    | of the training (`scaled`)    | the loader      | scaled to ``imgsz``      | the evaluator            |
    | of ``--tile N``               | `TiledDetector` | N pixels                 | `TiledDetector`          |

    ``index``: index of the split, if it is already open.
    """
    canvases = model.canvases(resolve_imgsz(config.imgsz, model), rect=config.rect)
    config = replace(config, imgsz=canvases.imgsz)
    tiles = Tiles.from_config(config, model.tile or spec.tile)
    if tiles is not None:
        tiles.check(model.stride, model.input_hw)
    loader = _open_loader(ctx, config, spec, canvases, tiles=tiles, index=index)
    settings = _settings_of(config, model, spec)
    detector: nn.Module = _with_tta(model) if config.tta else model
    evaluator = replace(
        build_evaluator(ctx, loader, model.nms_iou, settings),
        amp_dtype=broadcast_object(ctx, autocast_type(model, config.amp)),
        progress=partial(progress, desc=config.task, total=len(loader), unit="batch", enabled=ctx.is_main),
    )
    if tiles is not None and not tiles.scaled:
        detector = _with_tiles(ctx, config, model, detector, tiles, settings)
        evaluator = replace(evaluator, postprocess=_stitch)
    evaluation = evaluator.run(detector, loader)
    if evaluation is None:
        return None
    return SplitScores(evaluation, evaluator.ground_truth, loader.index, canvases)


def _settings_of(config: ValConfig, model: InferenceModel, spec: DatasetSpec) -> ValidationSettings:
    return ValidationSettings(
        conf_thres=config.conf_thres,
        iou_thres=config.iou_thres,
        max_det=config.max_det,
        single_cls=config.single_cls,
        classes=class_columns(model, spec),
        box_voting=config.box_voting,
    )


def _open_loader(
    ctx: DistributedContext,
    config: ValConfig,
    spec: DatasetSpec,
    canvases: CanvasRule,
    *,
    tiles: Tiles | None,
    index: DatasetIndex | None,
) -> ValidationLoader:
    """Opens the split, unless it is open already as ``index``, and its loader. The canvases have ``config.imgsz``."""
    log_loader_workers(config.workers, ctx, config.task)
    if index is None:
        index = open_val_index(ctx, config, spec, config.task)
    else:
        check_same_data(ctx, config.task, index)
    reader = _open_reader(ctx, config, spec, index, tiles)
    return build_val_loader(ctx, reader, canvases, batch_size=config.batch_size, workers=config.workers)


def _open_reader(
    ctx: DistributedContext, config: ValConfig, spec: DatasetSpec, index: DatasetIndex, tiles: Tiles | None
) -> SampleReader:
    """Opens the samples that the model is scored on: images or, as in training, tiles, scaled to ``config.imgsz``; or
    images at their full size, which the model itself cuts into tiles."""
    if tiles is None:
        return ImageReader(index, imgsz=config.imgsz, reduces=False)
    if not tiles.scaled:
        return ImageReader(index, imgsz=None, reduces=False)
    check_has_images(index, spec, config.task, "cut into tiles")
    tiled = TiledIndex(replace(index, tile=tiles.size), tiles.size, hyp=Hyperparameters(), overlap=tiles.overlap)
    return open_tile_reader(ctx, config, tiled, imgsz=config.imgsz, kind="none")


def _with_tiles(
    ctx: DistributedContext,
    config: ValConfig,
    model: InferenceModel,
    detector: nn.Module,
    tiles: Tiles,
    settings: ValidationSettings,
) -> TiledDetector:
    """Returns a model that takes whole images and runs ``detector`` in their tiles. ``detector``: ``model`` or, with
    test-time augmentation, a wrapper of it."""
    batch = CPU_CHUNK if ctx.device.type == "cpu" else config.batch_size
    return TiledDetector(
        detector,
        partial(select_for_validation, settings=settings),
        tiles=tiles,
        view_input=ViewInput(stride=model.stride, imgsz=config.imgsz, only_hw=model.input_hw, batch=batch),
        selections=settings.selections(model.nms_iou),
    )


def _stitch(model: nn.Module, raw: list[Tensor]) -> dict[str, Detections]:
    """Joins the detections in the views of a `TiledDetector`."""
    return cast(TiledDetector, model).stitch(raw)  # `Evaluator` takes any module


def _with_tta(model: InferenceModel) -> TestTimeAugmentation:
    """Returns the model of a checkpoint with test-time augmentation."""
    if not isinstance(model, CheckpointModel):
        raise TypeError(f"only checkpoints are evaluated with several views, not {type(model).__name__}")
    return TestTimeAugmentation(model.detector)
