"""Implements val.py: validation of checkpoints and exported files on a split."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from torch import Tensor, nn

from data.index.index import DatasetIndex
from data.loading.build import build_val_loader
from data.render.letterbox import CanvasRule
from data.source.dataset_spec import DatasetSpec, DataSource
from engine.evaluation import tables
from engine.evaluation.analysis import score_sizes, split_errors
from engine.evaluation.evaluator import Evaluator, build_evaluator
from engine.evaluation.matching import match_detections
from engine.evaluation.result import EvalResult
from engine.inference.model import CheckpointModel, InferenceModel, autocast_type
from engine.inference.model_data import class_columns, open_for_model
from engine.inference.open_model import is_exported, open_model
from engine.report.sheets import write_validation_report
from engine.report.subject import Subject
from engine.run.new_folder import check_run_dir, increment_path
from engine.run.previous_run import is_other_data, listing_written, previous_data, remove_written
from models.detector import IMAGES_IN_CACHE
from models.postprocess.detections import ValidationSettings, select_for_validation
from models.postprocess.tiles import Tiles
from models.postprocess.tiling import TiledDetector, ViewInput
from models.postprocess.tta import TestTimeAugmentation
from models.weights.download import fetch_weights
from utils.config.coco_classes import coco_category_ids
from utils.config.settings import ValConfig
from utils.detections import Detections, DetectionTable
from utils.distributed.agreement import check_same_model, check_same_start
from utils.distributed.context import DistributedContext, broadcast_object, node_leader_first
from utils.errors import UserError
from utils.labels import GroundTruth
from utils.logger import get_logger, progress
from utils.machine.packages import require_package
from utils.program import write_result


def validate(config: ValConfig, ctx: DistributedContext) -> None:
    """Scores ``config.weights``. All processes of the run must call it; the main one prints and writes a report."""
    if ctx.is_main and not config.noplots:
        require_package("matplotlib", "plots", "use --noplots")
    if len(ctx.devices) > 1:
        get_logger().warning("one process scores on one device, %s; torchrun uses all", ctx.device)
    check_same_start(ctx, config)
    model, spec = open_model_and_data(config, ctx)
    with node_leader_first(ctx):  # before the work; the folder is created when there is something to write
        if ctx.is_main:
            check_run_dir(config.project, config.name, config.exist_ok)
    scores = score(config, model, spec, ctx)
    if scores is None:  # not the main process
        return
    canvases = canvases_of(config, model)
    config = replace(config, data=config.data or spec.source, imgsz=canvases.imgsz, rect=not canvases.is_square)
    subject = Subject(
        title=f"Validation of {Path(config.weights).name}",
        config=config,
        hyp=None,
        ctx=ctx,
        imgsz=config.imgsz,
        stride=model.stride,
        indexes={config.task: scores.index},
    )
    folder = _open_folder(config)
    with listing_written(folder):
        _write_report(folder, config, subject, scores)
        if config.save_json:
            truth = with_coco_ids(scores.evaluator.ground_truth, scores.index, spec)
            tables.write_predictions(folder / "predictions.json", scores.detections, truth)
    get_logger().info("results are in %s", folder)
    write_result(folder=str(folder))


def open_model_and_data(config: ValConfig, ctx: DistributedContext) -> tuple[InferenceModel, DatasetSpec]:
    """Opens ``config.weights`` and the data to score them on. Every process of the run must call this.

    Raises UserError for a file that cannot be opened, or whose classes are not those of the data set.
    """
    weights = config.weights
    if is_exported(weights):
        path = Path(weights)
    else:
        path = fetch_weights(weights, ctx=ctx, offline=config.offline)
    if config.tta and is_exported(weights):
        raise UserError(f"{weights}: --tta: only checkpoints are evaluated with several views; leave it out")
    # With several views, an object has several boxes, which only NMS reduces to one.
    model = open_model(path, device=ctx.device, nms=config.nms or config.tta, trust=config.trust)
    if config.nms and model.ignores_nms:
        get_logger().warning("%s: --nms does nothing: the model has one branch", weights)
    if not config.box_voting and config.iou_thres is None and model.nms_iou is None:
        get_logger().warning("%s: --no-box-voting does nothing: its detections need no NMS", weights)
    if model.votes and not config.box_voting:
        raise UserError(f"{weights}: --no-box-voting: box voting is part of the file; export it with --no-box-voting")
    check_size(config, model)
    classes = tuple(config.classes)
    source = DataSource(config.data, (config.task,), classes=classes, stage=config.stage, cache_dir=config.cache_dir)
    spec = open_for_model(model, source, ctx, single_cls=config.single_cls)
    check_same_model(ctx, model, model.state_dict().values())
    return model, spec


def check_size(config: ValConfig, model: InferenceModel) -> None:
    """Raises UserError for an image size that ``model`` does not take."""
    if config.imgsz and model.input_hw and config.imgsz != max(model.input_hw):
        raise UserError(
            f"{config.weights}: --imgsz {config.imgsz}: takes images of {model.imgsz} pixels only; leave it out"
        )


def canvases_of(config: ValConfig, model: InferenceModel) -> CanvasRule:
    """Returns the rule for the canvases of the validation images."""
    imgsz = max(model.input_hw) if model.input_hw else config.imgsz or model.imgsz
    return model.canvases(imgsz, rect=config.rect)


@dataclass(frozen=True)
class SplitScores:
    """The scores of a model on a split, and the detections that were scored."""

    result: EvalResult
    detections: DetectionTable  # whose AP is computed, see `Evaluator`
    shown: DetectionTable  # as detect.py finds them, see `Evaluator`
    evaluator: Evaluator  # which has run
    index: DatasetIndex  # of the split


def score(
    config: ValConfig,
    model: InferenceModel,
    spec: DatasetSpec,
    ctx: DistributedContext,
    *,
    index: DatasetIndex | None = None,
) -> SplitScores | None:
    """Scores a model on the split ``config.task``. Every process of the run must call this; all but rank 0 get None.

    ``index``: of the split, if it is open already.
    """
    canvases = canvases_of(config, model)
    settings = ValidationSettings(
        conf_thres=config.conf_thres,
        iou_thres=config.iou_thres,
        max_det=config.max_det,
        single_cls=config.single_cls,
        classes=class_columns(model, spec),
        box_voting=config.box_voting,
    )
    tiles = Tiles.from_config(config, model.tile or spec.tile)
    if tiles is not None:
        tiles.check(model.stride, model.input_hw)
    # The loader yields scaled tiles, as in training. Of images at their full size, the model itself takes the tiles.
    loader_tile = tiles.size if tiles is not None and tiles.scaled else 0
    sized = replace(config, imgsz=canvases.imgsz)
    loader = build_val_loader(ctx, sized, spec, canvases, tile=loader_tile, index=index)
    scored: nn.Module = _with_tta(model) if config.tta else model
    evaluator = replace(
        build_evaluator(ctx, loader, model.nms_iou, settings),
        amp_dtype=broadcast_object(ctx, autocast_type(model, config.amp)),
        progress=partial(progress, desc=config.task, total=len(loader), unit="batch", enabled=ctx.is_main),
    )
    if tiles is not None and not tiles.scaled:
        scored = _with_tiles(ctx, sized, model, scored, tiles, settings)
        evaluator = replace(evaluator, postprocess=_stitch)
    result = evaluator.run(scored, loader)
    if result is None or evaluator.detections is None or evaluator.shown is None:
        return None
    return SplitScores(result, evaluator.detections, evaluator.shown, evaluator, loader.index)


def _with_tiles(
    ctx: DistributedContext,
    config: ValConfig,
    model: InferenceModel,
    scored: nn.Module,
    tiles: Tiles,
    settings: ValidationSettings,
) -> TiledDetector:
    """Returns ``scored``, which is ``model`` or has several views of it, as a model that takes whole images and detects
    in their tiles."""
    batch = IMAGES_IN_CACHE if ctx.device.type == "cpu" else config.batch_size
    return TiledDetector(
        scored,
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


def _open_folder(config: ValConfig) -> Path:
    """Creates the folder for the results. With ``--exist-ok``, it removes the files of an earlier validation."""
    folder = increment_path(config.project, config.name, config.exist_ok)
    previous = previous_data(folder)
    if is_other_data(previous, config.data):
        get_logger().warning("%s: has results on other data, %s; they are replaced (--exist-ok)", folder, previous)
    remove_written(folder)
    return folder


def with_coco_ids(gt: GroundTruth, index: DatasetIndex, spec: DatasetSpec) -> GroundTruth:
    """Sets COCO's category ids if the labels of ``index`` are of COCO's classes, and not of a COCO JSON, which has its
    own ids."""
    ids = coco_category_ids(index.names, spec.as_labeled().names) if index.image_ids is None else None
    if ids is None:
        return gt
    get_logger().info("predictions.json has COCO's category ids, as the classes are COCO's")
    return replace(gt, category_ids=ids)


def _write_report(folder: Path, config: ValConfig, subject: Subject, scores: SplitScores) -> None:
    """Prints the tables and writes the files of ``folder``."""
    result = scores.result
    truth = scores.evaluator.ground_truth
    names = subject.validated.names
    # Matched anew: the evaluator has released its matches, which would double the memory of the detections.
    matches = match_detections(truth, scores.detections, len(names))
    rows = tables.result_rows(result, truth, names)
    sizes = tables.size_rows(score_sizes(matches), names)
    errors = split_errors(matches)
    for line in (*tables.format_table(rows), *tables.format_summary(result, names), *tables.format_errors(errors)):
        get_logger().info("%s", line)
    tables.write_rows(folder / "classes.csv", tables.COLUMNS, rows)
    tables.write_rows(folder / "sizes.csv", tables.SIZE_COLUMNS, sizes)
    tables.write_results_json(folder / "results.json", result, rows, sizes, errors, asdict(config))
    if not config.noplots:
        write_validation_report(folder, subject, result, scores.evaluator, errors)
