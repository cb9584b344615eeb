"""Implements val.py: validation of checkpoints and exported files on a split."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from data.dataset.spec import DatasetSpec, DataSource
from data.index.index import DatasetIndex
from data.labels.coco_classes import coco_category_ids
from engine.commands.scoring import SplitScores, score
from engine.commands.written_files import listing_written, remove_written
from engine.evaluation import tables
from engine.evaluation.analysis import score_sizes, split_errors
from engine.evaluation.matching import match_detections
from engine.inference.model import InferenceModel
from engine.inference.model_data import open_model_data
from engine.inference.open_model import is_exported, open_model
from engine.inference.settings import check_box_voting, resolve_imgsz, warn_of_unused_flags
from engine.report.page import machine_facts, write_validation_report
from engine.report.summary import Subject
from engine.run.new_folder import check_run_dir, increment_path
from engine.run.previous_data import is_other_data, previous_data
from models.weights.download import fetch_weights
from utils.config.settings import ValConfig
from utils.distributed.agreement import check_same_model, check_same_start
from utils.distributed.context import DistributedContext, torch_distributed_zero_first
from utils.errors import UserError
from utils.labels import GroundTruth
from utils.logger import get_logger
from utils.machine.packages import require_package
from utils.process.result_file import write_result


def validate(config: ValConfig, ctx: DistributedContext) -> None:
    """Scores ``config.weights``. All processes of the run must call it; the main one prints and writes a report."""
    if ctx.is_main and not config.noplots:
        require_package("matplotlib", "plots", "use --noplots")
    if len(ctx.devices) > 1:
        get_logger().warning("one process scores on one device, %s; torchrun uses all", ctx.device)
    check_same_start(ctx, config)
    model, spec, config = open_model_and_data(config, ctx)
    with torch_distributed_zero_first(ctx):  # before the work; the folder is created when there is something to write
        if ctx.is_main:
            check_run_dir(config.project, config.name, config.exist_ok)
    scores = score(config, model, spec, ctx)
    if scores is None:  # not the main process
        return
    canvases = scores.canvases
    config = replace(config, data=config.data or spec.source, imgsz=canvases.imgsz, rect=not canvases.is_square)
    subject = Subject(
        title=f"Validation of {Path(config.weights).name}",
        config=config,
        hyp=None,
        machine=machine_facts(ctx),
        imgsz=config.imgsz,
        stride=model.stride,
        train=None,
        validated=scores.index,
        split=config.task,
    )
    folder = _open_folder(config)
    with listing_written(folder):
        _write_report(folder, config, subject, scores)
        if config.save_json:
            truth = with_coco_ids(scores.truth, scores.index, spec)
            tables.write_predictions(folder / "predictions.json", scores.evaluation.scored, truth)
    get_logger().info("results are in %s", folder)
    write_result(folder=str(folder))


def open_model_and_data(config: ValConfig, ctx: DistributedContext) -> tuple[InferenceModel, DatasetSpec, ValConfig]:
    """Opens ``config.weights`` and the data to score them on. Every process of the run must call this.

    Also returns ``config``, adapted to the model: one trained with ``--single-cls`` is scored with it.

    Raises UserError for a file that cannot be opened, or whose classes differ from the data set's.
    """
    model = _open_model(config, ctx)
    if model.has_merged_classes and not config.single_cls:
        get_logger().info("%s: was trained with --single-cls; all classes count as one", config.weights)
        config = replace(config, single_cls=True)
    classes = tuple(config.classes)
    source = DataSource(
        config.data,
        (config.task,),
        classes=classes,
        stage=config.stage,
        cache_dir=config.cache_dir,
        output="" if config.noplots else str(Path(config.project, config.name)),
    )
    spec = open_model_data(model, source, ctx, single_cls=config.single_cls)
    check_same_model(ctx, model, model.state_dict().values())
    return model, spec, config


def _open_model(config: ValConfig, ctx: DistributedContext) -> InferenceModel:
    """Opens ``config.weights``. Raises UserError for flags that do not fit them; warns of those that do nothing."""
    weights = config.weights
    if is_exported(weights):
        path = Path(weights)
        if config.tta:
            raise UserError(f"{weights}: --tta: only checkpoints are evaluated with several views; leave it out")
    else:
        path = fetch_weights(weights, ctx=ctx, offline=config.offline)
    # With several views, an object has several boxes, which only NMS reduces to one.
    model = open_model(path, device=ctx.device, nms=config.nms or config.tta, trust=config.trust)
    iou = model.nms_iou if config.iou_thres is None else config.iou_thres
    warn_of_unused_flags(model, nms=config.nms, box_voting=config.box_voting, iou=iou)
    check_box_voting(model, box_voting=config.box_voting)
    resolve_imgsz(config.imgsz, model)  # refuses a size before the data is read
    return model


def _open_folder(config: ValConfig) -> Path:
    """Creates the folder for the results. With ``--exist-ok``, it removes the files of an earlier validation."""
    folder = increment_path(config.project, config.name, config.exist_ok)
    previous = previous_data(folder)
    if is_other_data(previous, config.data):
        get_logger().warning("%s: has results on other data, %s; they are replaced (--exist-ok)", folder, previous)
    remove_written(folder)
    return folder


def with_coco_ids(gt: GroundTruth, index: DatasetIndex, spec: DatasetSpec) -> GroundTruth:
    """Sets COCO's category ids if the labels of ``index`` have COCO's classes and are not from a COCO JSON, which has
    its own ids."""
    ids = coco_category_ids(index.names, spec.as_labeled().names) if index.image_ids is None else None
    if ids is None:
        return gt
    get_logger().info("predictions.json has COCO's category ids, because the classes are COCO's")
    return replace(gt, category_ids=ids)


def _write_report(folder: Path, config: ValConfig, subject: Subject, scores: SplitScores) -> None:
    """Prints the tables and writes the files of ``folder``."""
    result = scores.evaluation.result
    truth = scores.truth
    names = subject.validated.names
    # Matched again: the evaluator has released its matches, which would double the memory of the detections.
    matches = match_detections(truth, scores.evaluation.scored, len(names))
    rows = tables.result_rows(result, truth, names)
    sizes = tables.size_rows(score_sizes(matches), names)
    errors = split_errors(matches)
    for line in (*tables.format_table(rows), *tables.format_summary(result, names), *tables.format_errors(errors)):
        get_logger().info("%s", line)
    tables.write_rows(folder / "classes.csv", tables.COLUMNS, rows)
    tables.write_rows(folder / "sizes.csv", tables.SIZE_COLUMNS, sizes)
    tables.write_results_json(
        folder / "results.json", result, rows=rows, sizes=sizes, errors=errors, settings=asdict(config)
    )
    if not config.noplots:
        write_validation_report(folder, subject, scores.evaluation)
