"""Implements val.py: validation of checkpoints and exported files on a split."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from data.index.index import DatasetIndex
from data.loading.build import build_val_loader
from data.render.letterbox import CanvasRule
from data.source.dataset_spec import DatasetSpec, DataSource
from engine.evaluation import tables
from engine.evaluation.analysis import score_sizes, split_errors
from engine.evaluation.evaluator import Evaluator, stitchers_of
from engine.evaluation.matching import match_detections
from engine.hooks.plots import Subject, write_plots
from engine.inference.model import InferenceModel, autocast_type
from engine.inference.model_data import class_columns, open_for_model
from engine.inference.open_model import is_exported, open_model
from models.detector import IMAGES_IN_CACHE
from models.postprocess.detections import ValidationSettings, select_for_validation
from models.postprocess.tiles import Tiles
from models.postprocess.tiling import TiledDetector, ViewInput
from models.postprocess.tta import TestTimeAugmentation
from models.weights.download import fetch_weights
from utils.config.coco_classes import coco_category_ids
from utils.config.settings import ValConfig
from utils.distributed.agreement import check_same_model, check_same_start
from utils.distributed.context import DistributedContext, broadcast_object, torch_distributed_zero_first
from utils.errors import UserError
from utils.files.folders import check_run_dir, increment_path
from utils.files.previous_run import is_other_data, listing_written, previous_data, remove_written
from utils.logger import get_logger, progress
from utils.machine.packages import require_package
from utils.program import write_result
from utils.structures import EvalResult, GroundTruth


def validate(config: ValConfig, ctx: DistributedContext) -> None:
    """Scores ``config.weights``. All processes of the run call it; the main one prints and writes a report."""
    if ctx.is_main and not config.noplots:
        require_package("matplotlib", "plots", "use --noplots")
    if len(ctx.devices) > 1:
        get_logger().warning("one process scores on one device, %s; torchrun uses all", ctx.device)
    check_same_start(ctx, config)
    model, spec = open_model_and_data(config, ctx)
    with torch_distributed_zero_first(ctx):  # before the work; the folder is made when there is something to write
        if ctx.is_main:
            check_run_dir(config.project, config.name, config.exist_ok)
    result, evaluator, index = score(config, model, spec, ctx)
    if result is not None:
        canvases = canvases_of(config, model)
        config = replace(config, data=config.data or spec.source, imgsz=canvases.imgsz, rect=not canvases.is_square)
        folder = _open_folder(config)
        with listing_written(folder):
            _report(folder, config, ctx, result, evaluator, index, model.stride)
            if config.save_json:
                gt = with_coco_ids(evaluator.ground_truth, index, spec)
                tables.write_predictions(folder / "predictions.json", evaluator.detections, gt)
        get_logger().info("results are in %s", folder)
        write_result(folder=str(folder))


def open_model_and_data(config: ValConfig, ctx: DistributedContext) -> tuple[InferenceModel, DatasetSpec]:
    """``config.weights`` and the data to score them on. Every process of the run must call this.

    Raises UserError for a file that cannot be opened, or whose classes are not those of the data set.
    """
    weights = config.weights
    if is_exported(weights):
        path = Path(weights)
    else:
        path = fetch_weights(weights, ctx=ctx, offline=config.offline)
    if config.tta and is_exported(weights):
        raise UserError(f"{weights}: --tta: only checkpoints are evaluated with several views; leave it out")
    # The views' boxes of an object are left to NMS.
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
    """The canvases of the validation images."""
    imgsz = max(model.input_hw) if model.input_hw else config.imgsz or model.imgsz
    return model.canvases(imgsz, rect=config.rect)


def score(
    config: ValConfig,
    model: InferenceModel,
    spec: DatasetSpec,
    ctx: DistributedContext,
    *,
    index: DatasetIndex | None = None,
) -> tuple[EvalResult | None, Evaluator, DatasetIndex]:
    """The scores on rank 0, None elsewhere; the evaluator, with the detections; and the data. ``index``: of the split
    ``config.task``, if it is open already."""
    canvases = canvases_of(config, model)
    if tiles := Tiles.from_config(config, model.tile or spec.tile):
        tiles.check(model.stride, model.input_hw)
    in_loader = tiles is not None and tiles.scaled  # as in training
    loader = build_val_loader(
        ctx, replace(config, imgsz=canvases.imgsz), spec, canvases, tile=tiles.size if in_loader else 0, index=index
    )
    settings = ValidationSettings(
        conf_thres=config.conf_thres,
        iou_thres=config.iou_thres,
        max_det=config.max_det,
        single_cls=config.single_cls,
        classes=class_columns(model, spec),
        box_voting=config.box_voting,
    )
    select = partial(select_for_validation, settings=settings)
    scored, postprocess = model, select
    if config.tta:
        scored = TestTimeAugmentation(model.detector)
    if tiles and not in_loader:
        scored = TiledDetector(
            scored,
            select,
            tiles=tiles,
            view_input=ViewInput(
                stride=model.stride,
                imgsz=canvases.imgsz,
                only_hw=model.input_hw,
                batch=IMAGES_IN_CACHE if ctx.device.type == "cpu" else config.batch_size,
            ),
            selections=settings.selections(model.nms_iou),
        )
        postprocess = TiledDetector.stitch
    evaluator = Evaluator(
        ground_truth=loader.index.ground_truth(),
        num_classes=len(loader.index.names),
        postprocess=postprocess,
        stitch=stitchers_of(loader, model.nms_iou, settings),
        ctx=ctx,
        amp_dtype=broadcast_object(ctx, autocast_type(model, config.amp)),
        progress=partial(progress, desc=config.task, total=len(loader), unit="batch", enabled=ctx.is_main),
    )
    return evaluator.run(scored, loader), evaluator, loader.index


def _open_folder(config: ValConfig) -> Path:
    """The folder for the results. With ``--exist-ok``, what an earlier validation has written there is removed."""
    folder = increment_path(config.project, config.name, config.exist_ok)
    previous = previous_data(folder)
    if is_other_data(previous, config.data):
        get_logger().warning("%s: has results on other data, %s; they are replaced (--exist-ok)", folder, previous)
    remove_written(folder)
    return folder


def with_coco_ids(gt: GroundTruth, index: DatasetIndex, spec: DatasetSpec) -> GroundTruth:
    """``gt`` with COCO's category ids if the labels of ``index`` are of COCO's classes, and not of a COCO JSON, which
    has ids of its own."""
    ids = coco_category_ids(index.names, spec.as_labeled().names) if index.image_ids is None else None
    if ids is None:
        return gt
    get_logger().info("predictions.json has COCO's category ids, as the classes are COCO's")
    return replace(gt, category_ids=ids)


def _report(
    folder: Path,
    config: ValConfig,
    ctx: DistributedContext,
    result: EvalResult,
    evaluator: Evaluator,
    index: DatasetIndex,
    stride: int,
) -> None:
    """Prints the tables and writes the files of ``folder``."""
    log, gt, names = get_logger(), evaluator.ground_truth, index.names
    matches = match_detections(gt, evaluator.detections, len(names))
    rows, sizes = tables.result_rows(result, gt, names), tables.size_rows(score_sizes(matches), names)
    errors = split_errors(matches)
    for line in (*tables.format_table(rows), *tables.format_summary(result, names), *tables.format_errors(errors)):
        log.info("%s", line)
    tables.write_rows(folder / "classes.csv", tables.COLUMNS, rows)
    tables.write_rows(folder / "sizes.csv", tables.SIZE_COLUMNS, sizes)
    tables.write_results_json(folder / "results.json", result, rows, sizes, errors, asdict(config))
    if not config.noplots:
        title = f"Validation of {Path(config.weights).name}"
        subject = Subject(title, config, None, ctx, config.imgsz, stride, {config.task: index})
        write_plots(folder, subject, result, evaluator, errors)
