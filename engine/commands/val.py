"""Implements val.py: scores a checkpoint or an exported file on a split, with tiles and test-time augmentation."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from torch import nn

from data.index import DatasetIndex
from data.loading.build import (
    build_val_loader,
    check_has_images,
    check_same_data,
    open_tile_reader,
    open_val_index,
    warn_about_workers,
)
from data.loading.loader import ValidationLoader
from data.render.letterbox import CanvasRule
from data.samples.readers import ImageReader, SampleReader
from data.samples.tiles import TiledIndex
from data.spec import DatasetSpec, DataSource
from engine.evaluation import tables
from engine.evaluation.analysis import split_errors
from engine.evaluation.coco_classes import coco_category_ids
from engine.evaluation.evaluator import Evaluator, tile_stitcher
from engine.evaluation.result import Evaluation
from engine.inference.model import CheckpointModel, InferenceModel, autocast_type, open_model, resolve_imgsz
from engine.inference.model_data import class_columns, open_model_data
from engine.inference.predict import unused_detection_settings
from engine.report.advice import Subject
from engine.report.content import FILE_NAME, error_sentences, report_content, verdict
from engine.report.images import write_preview
from models.postprocess.detections import Selected, select_for_validation
from models.postprocess.selection import ValidationSettings
from models.postprocess.tiles import Select, TiledDetector, Tiles
from models.postprocess.tta import TestTimeAugmentation
from utils.config.export_formats import format_of
from utils.config.settings import Hyperparameters, ValConfig
from utils.distributed.agreement import check_same_model, check_same_start
from utils.distributed.context import DistributedContext, broadcast_object, torch_distributed_zero_first
from utils.drawing.page import write_page
from utils.errors import UserError, first_line
from utils.files.new_folder import check_run_dir, increment_path
from utils.files.results_csv import ResultsTable
from utils.labels import GroundTruth
from utils.logger import get_logger, get_summary_logger, progress
from utils.machine.packages import require_package
from utils.process.child import write_result


@dataclass(frozen=True)
class SplitScores:
    """The scores of a model on a split, and the detections that were scored."""

    evaluation: Evaluation
    truth: GroundTruth
    index: DatasetIndex
    canvases: CanvasRule


def validate(config: ValConfig, ctx: DistributedContext) -> None:
    """Scores ``config.weights``. All processes of the run must call it; the main one prints and writes a report."""
    if ctx.is_main and config.plots:
        require_package("matplotlib", "plots", "use --no-plots")
    if len(ctx.devices) > 1:
        get_logger().warning("one process scores on one device, %s; torchrun uses all", ctx.device)
    check_same_start(ctx, config)
    model, spec, config = open_model_and_data(config, ctx)
    with torch_distributed_zero_first(ctx):  # before the work; the folder is created when there is something to write
        if ctx.is_main:
            check_run_dir(config.project, config.name, config.exist_ok)
            tiles = Tiles.from_config(config, model.tile or spec.tile)
            for line in unused_detection_settings(config, model, tiles):
                get_logger().warning("%s", line)
    scores = score(config, model, spec, ctx)
    if scores is None:  # not the main process
        return
    canvases = scores.canvases
    config = replace(config, data=config.data or spec.source, imgsz=canvases.imgsz, rect=not canvases.is_square)
    folder = increment_path(config.project, config.name, config.exist_ok)
    write_scores(folder, config, scores)
    if config.plots:
        subject = Subject(
            title=f"Validation of {Path(config.weights).name}",
            folder=folder,
            config=config,
            stride=model.stride,
            train=None,
            validated=scores.index,
            split=config.task,
            is_held_out=spec.is_held_out(config.task),
        )
        write_report(subject, scores.evaluation, results=model.path.with_name("results.csv"))
    if config.save_json:
        truth = with_coco_ids(scores.truth, scores.index, spec)
        tables.write_predictions(folder / "predictions.json", scores.evaluation.for_ap, truth)
    get_summary_logger().info("results are in %s", folder)
    write_result(folder=str(folder))


def open_model_and_data(config: ValConfig, ctx: DistributedContext) -> tuple[InferenceModel, DatasetSpec, ValConfig]:
    """Opens ``config.weights`` and the data to score them on. Every process of the run must call this.

    Also returns ``config``, adapted to the model: one trained with ``--single-cls`` is scored with it.

    Raises UserError for a file that cannot be opened, or whose classes differ from the data set's, and for flags that
    do not fit it.
    """
    if config.tta and format_of(config.weights) is not None:
        raise UserError(f"{config.weights}: --tta: only checkpoints are evaluated with several views; leave it out")
    model = open_model(
        config.weights,
        device=ctx.device,
        nms=config.nms or config.tta,  # with several views, an object has several boxes, which only NMS reduces to one
        trust=config.trust,
        offline=config.offline,
        ctx=ctx,
    )
    resolve_imgsz(config.imgsz, model)  # refuses a size before the data is read
    if model.has_merged_classes and not config.single_cls:
        get_logger().info("%s: was trained with --single-cls; all classes count as one", config.weights)
        config = replace(config, single_cls=True)
    source = DataSource(
        config.data,
        (config.task,),
        classes=tuple(config.classes),
        stage=config.stage,
        cache_dir=config.cache_dir,
        output=str(Path(config.project, config.name)) if config.plots else "",
    )
    spec = open_model_data(model, source, ctx, single_cls=config.single_cls)
    check_same_model(ctx, model, model.state_dict().values())
    return model, spec, config


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
    settings = ValidationSettings(
        conf_thres=config.conf_thres,
        iou_thres=config.iou_thres,
        max_det=config.max_det,
        single_cls=config.single_cls,
        classes=class_columns(model, spec),
        box_voting=config.box_voting,
    )
    detector: nn.Module = model
    if config.tta:
        detector = TestTimeAugmentation(cast(CheckpointModel, model).detector)  # exported files are refused
    select: Select = partial(select_for_validation, detector, settings=settings)
    selections = settings.selections(model.nms_iou)
    if tiles is not None and not tiles.scaled:
        detector = TiledDetector(
            detector,
            select,
            selections,
            tiles=tiles,
            stride=model.stride,
            imgsz=config.imgsz,
            only_hw=model.input_hw,
            batch=config.batch_size,
        )
        select = detector.stitch
    evaluator = Evaluator(
        ground_truth=loader.index.ground_truth(),
        num_classes=len(loader.index.names),
        postprocess=lambda _, raw: Selected(*select(raw)),
        ctx=ctx,
        amp_dtype=broadcast_object(ctx, autocast_type(model, config.amp)),
        tiles=tile_stitcher(loader, model.nms_iou, settings),
        chosen_confidence=config.chosen_confidence,
        protocol=tables.protocol_text(
            canvases, box_voting=selections[0].box_voting, tile=tiles.size if tiles else 0, tta=config.tta
        ),
        progress=partial(progress, desc=config.task, total=len(loader), unit="batch", enabled=ctx.is_main),
    )
    evaluation = evaluator.run(detector, loader)
    if evaluation is None:
        return None
    return SplitScores(evaluation, evaluator.ground_truth, loader.index, canvases)


def _open_loader(
    ctx: DistributedContext,
    config: ValConfig,
    spec: DatasetSpec,
    canvases: CanvasRule,
    *,
    tiles: Tiles | None,
    index: DatasetIndex | None,
) -> ValidationLoader:
    """Opens the split, unless it is open already as ``index``, and a loader of what the model is scored on: images or,
    as in training, tiles, scaled to ``config.imgsz``; or images at their full size, which the model itself cuts into
    tiles."""
    warn_about_workers(config.workers, ctx, config.task)
    if index is None:
        index = open_val_index(ctx, config, spec, config.task)
    else:
        check_same_data(ctx, config.task, index)
    reader: SampleReader = ImageReader(index, imgsz=None if tiles else config.imgsz, antialias=False)
    if tiles is not None and tiles.scaled:
        check_has_images(index, spec, config.task, "cut into tiles")
        tiled = TiledIndex(replace(index, tile=tiles.size), tiles.size, hyp=Hyperparameters(), overlap=tiles.overlap)
        reader = open_tile_reader(ctx, config, tiled, imgsz=config.imgsz, kind="none")
    return build_val_loader(ctx, reader, canvases, batch_size=config.batch_size, workers=config.workers)


def with_coco_ids(gt: GroundTruth, index: DatasetIndex, spec: DatasetSpec) -> GroundTruth:
    """Sets COCO's category ids if the labels of ``index`` have COCO's classes and are not from a COCO JSON, which has
    its own ids."""
    ids = coco_category_ids(index.names, spec.with_label_classes().names) if index.image_ids is None else None
    if ids is None:
        return gt
    get_logger().info("predictions.json has COCO's category ids, because the classes are COCO's")
    return replace(gt, category_ids=ids)


def write_scores(folder: Path, config: ValConfig, scores: SplitScores) -> None:
    """Prints the scores, and writes them to ``folder``."""
    evaluation = scores.evaluation
    result = evaluation.result
    names = scores.index.names
    rows = tables.result_rows(result, scores.truth, names)
    sizes = tables.size_rows(evaluation.sizes, names)
    log = get_summary_logger()
    log.info("%s on the %s split (%s):", Path(config.weights).name, config.task, result.protocol)
    for line in (*tables.format_table(rows), *tables.format_summary(result, names)):
        log.info("%s", line)
    if config.chosen_confidence is not None:
        log.warning(
            "AP counts only detections above --conf-thres %g: it is not comparable with that of the default, %g",
            config.conf_thres,
            ValConfig.conf_thres,
        )
    errors = split_errors(evaluation.shown)
    for sentence in (*verdict(evaluation, scores.index), *error_sentences(result, errors, names)):
        log.info("- %s", sentence)
    tables.write_rows(folder / "classes.csv", tables.COLUMNS, rows)
    tables.write_rows(folder / "sizes.csv", tables.SIZE_COLUMNS, sizes)
    tables.write_results_json(
        folder / "results.json", result, rows=rows, sizes=sizes, errors=errors, settings=asdict(config)
    )


def write_report(subject: Subject, evaluation: Evaluation, *, results: Path) -> None:
    """Writes the report and predictions.jpg. A failure, as on a full disk, is a warning: the scores are written.

    ``results``: results.csv of the run that the weights are from, if it exists.
    """
    path = subject.folder / FILE_NAME
    try:
        write_page(
            path,
            report_content(subject, evaluation, ResultsTable.read(results).as_columns() if results.is_file() else {}),
        )
        get_logger().info("report: %s", path)
        confidence = evaluation.result.shown_confidence
        write_preview(evaluation.preview, subject.validated.names, confidence, path.with_name("predictions.jpg"))
    except Exception as error:
        get_logger().warning("%s: the report cannot be written (%s)", path, first_line(error))
