"""Validation of a checkpoint on a split: the work of val.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data.index.dataset_yaml import DatasetSpec
from data.loading.build import build_val_loader
from data.open_dataset import open_dataset
from engine.evaluation import report
from engine.evaluation.analysis import analyze
from engine.evaluation.evaluator import Evaluator
from engine.process import check_same_model, check_same_start, resolve_amp
from engine.reporting.report_page import ReportPage, Subject, Validation
from models.postprocess.detections import detections_to_score
from models.postprocess.tta import TestTimeAugmentation
from models.weights.load import load_detector
from utils.config.settings import ValConfig
from utils.distributed.collectives import broadcast_object, torch_distributed_zero_first
from utils.distributed.context import DistributedContext
from utils.download import fetch_weights
from utils.errors import UserError
from utils.files.folders import check_run_dir, find_location, increment_path
from utils.logger import get_logger, progress
from utils.machine.limits import require_package
from utils.structures import EvalResult
from utils.visualize.detection_writer import write_predictions
from utils.visualize.draw import write_image
from utils.visualize.plots import draw_detections, plot_confusion, plot_metric_curves


def validate(config: ValConfig, ctx: DistributedContext) -> None:
    """Scores ``config.weights``. All processes of the run call it; the main one prints and writes."""
    if ctx.is_main and not config.noplots:
        require_package("matplotlib", "plots", "use --noplots")
    if len(ctx.devices) > 1:
        get_logger().warning("one process scores on one device, %s; torchrun uses all", ctx.device)
    check_same_start(ctx, config)
    model, info = load_detector(fetch_weights(config.weights, ctx=ctx, offline=config.offline))
    spec = _open_data(config, info, ctx)
    if not config.single_cls:
        check_names(model.names, spec, config.weights)
    check_same_model(ctx, model, model.state_dict().values())
    imgsz = config.imgsz or info["imgsz"]
    loader = build_val_loader(ctx, replace(config, imgsz=imgsz), spec, stride=model.stride)
    names = loader.index.names
    evaluator = Evaluator(
        ground_truth=loader.index.ground_truth(),
        num_classes=len(names),
        postprocess=partial(
            detections_to_score,
            conf_thres=config.conf_thres,
            iou_thres=config.iou_thres,
            max_det=config.max_det,
            single_cls=config.single_cls,
        ),
        ctx=ctx,
        amp_dtype=broadcast_object(ctx, resolve_amp(config.amp, ctx.device)),
        progress=partial(progress, desc=config.task, total=len(loader), enabled=ctx.is_main),
    )
    with torch_distributed_zero_first(ctx):  # before the work; the folder is made when there is something to write
        if ctx.is_main:
            check_run_dir(config.project, config.name, config.exist_ok)
    fused = model.fuse(one_to_one=not (config.nms or config.tta))  # the views' boxes of an object are left to NMS
    scored = TestTimeAugmentation(fused) if config.tta else fused
    result = evaluator.run(scored.to(ctx.device, memory_format=torch.channels_last), loader)
    if ctx.is_main:
        subject = Subject.of_checkpoint(replace(config, imgsz=imgsz), ctx, loader.index, model.stride)
        _report(config, result, evaluator, names, subject)


def _open_data(config: ValConfig, info: dict[str, Any], ctx: DistributedContext) -> DatasetSpec:
    """The data set of ``--data``, else the one that the checkpoint was trained on."""
    source, root = find_location(info.get("data", {}), config.weights)
    data = config.data or source
    if not data:
        raise UserError(f"{config.weights}: does not name the data it was trained on; name a data set YAML with --data")
    return open_dataset(
        data,
        (config.task,),
        stage=config.stage,
        cache_dir=config.cache_dir,
        ctx=ctx,
        known_root="" if config.data else root,
    )


def check_names(names: Sequence[str], spec: DatasetSpec, weights: str) -> None:
    """Raises UserError unless the model's classes are the data set's, in the same order."""
    if tuple(names) == spec.names:
        return
    if len(names) != len(spec.names):
        what = f"{len(names)} classes against {len(spec.names)}"
    else:
        index = next(i for i, (a, b) in enumerate(zip(names, spec.names)) if a != b)
        what = f"class {index} is '{names[index]}' against '{spec.names[index]}'"
    raise UserError(
        f"{weights} and {spec.source} do not have the same classes ({what}); "
        "score on the data it was trained for, or with --single-cls"
    )


def _report(
    config: ValConfig, result: EvalResult, evaluator: Evaluator, names: Sequence[str], subject: Subject
) -> None:
    """Prints the tables and writes the run's folder."""
    log, gt = get_logger(), evaluator.ground_truth
    folder = increment_path(config.project, config.name, config.exist_ok)
    rows = report.result_rows(result, gt, names)
    log.info("%s\n%s", report.format_table(report.COLUMNS, rows, verbose=config.verbose), report.format_summary(result))
    analysis = analyze(gt, evaluator.detections, len(names), threshold=result.best_confidence, per_size=config.per_size)
    if analysis.sizes is not None:
        by_size = list(report.size_rows(analysis.sizes, names))
        log.info("%s", report.format_table(report.SIZE_COLUMNS, by_size, verbose=config.verbose))
        report.write_csv(folder / "sizes.csv", report.SIZE_COLUMNS, by_size)
    log.info("%s\n%s", report.format_errors(analysis.errors), report.format_calibration(analysis.calibration))
    settings = asdict(config) | {"imgsz": subject.imgsz}
    report.write_results_json(folder / "results.json", result, rows, settings, report.analysis_content(analysis, names))
    report.write_csv(folder / "classes.csv", report.COLUMNS, rows)
    if config.save_json:
        write_predictions(folder / "predictions.json", evaluator.detections, gt)
    if not config.noplots:
        report.plot_errors(analysis.errors, folder / "errors.png")
        report.plot_reliability(analysis.calibration, folder / "calibration.png")
        plot_metric_curves(result, names, folder)
        plot_confusion(result.confusion, names, folder / "confusion_matrix.png")
        _draw_preview(evaluator, names, folder / "predictions.jpg")
        ReportPage(folder, subject).write({}, Validation(result, evaluator.detections, analysis=analysis))
    log.info("results are in %s", folder)


def _draw_preview(evaluator: Evaluator, names: Sequence[str], out: Path) -> None:
    """The first batch with its labels and detections."""
    if evaluator.preview is not None:
        batch, detections = evaluator.preview
        write_image(out, draw_detections(batch.images, detections, batch.targets, batch.paths, names))
