"""Scores a checkpoint on a data set: AP as COCO defines it, precision, recall, F1, per class and by size.

python val.py --weights runs/train/exp/best.pt
torchrun --nproc_per_node 2 val.py --weights yolov8n.pt --data coco128.yaml
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from utils.config.parser import parse_config, to_dict
from utils.config.settings import Hyperparameters, ValConfig
from utils.distributed.launch import is_launched
from utils.distributed.spawn import spawn
from utils.entrypoint import run_main
from utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from data.index.dataset_yaml import DatasetSpec
    from engine.evaluation.evaluator import Evaluator, Postprocess
    from models.detector import Detector
    from models.postprocess.tta import ManyViews
    from utils.distributed.context import DistributedContext
    from utils.structures import Detections, EvalResult, GroundTruth


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    config = parse_config(ValConfig, argv, __doc__.split("\n")[0])
    if config.spawn > 1 and not is_launched():
        spawn(run_main, config.spawn, (main, argv))
        return
    from utils.distributed.context import DistributedContext, report_errors_once
    from utils.logger import configure_logging
    from utils.machine.limits import explained, smaller

    ctx = DistributedContext.from_environment(config.device, config.local_rank, config.local_world_size)
    configure_logging(ctx.is_main)
    advice = partial(smaller, config.batch_size, config.imgsz or 640, least_batch=1, device="")
    with ctx.closing(), report_errors_once(ctx), explained(advice):
        validate(config, ctx)


def validate(config: ValConfig, ctx: DistributedContext) -> None:
    """Scores ``config.weights``; all processes of the run call it, the first one prints and writes."""
    import torch

    from data.loading.build import create_dataloader
    from engine.checks import check_same_model, check_same_start
    from engine.evaluation.evaluator import Evaluator
    from engine.process import resolve_amp
    from models.weights.load import load_detector
    from utils.distributed.collectives import broadcast_object, torch_distributed_zero_first
    from utils.download import fetch_weights
    from utils.files.folders import check_run_dir, increment_path
    from utils.logger import get_logger, progress
    from utils.machine.limits import require_package
    from utils.machine.resources import loader_workers

    if ctx.is_main and not config.noplots:
        require_package("matplotlib", "plots", "use --noplots")
    if len(ctx.devices) > 1:
        get_logger().warning("one process scores on one device, %s; torchrun uses all", ctx.device)

    check_same_start(ctx, config)
    model, info = load_detector(fetch_weights(config.weights, ctx=ctx, offline=config.offline))
    spec = _dataset(config, info, ctx)
    if not config.single_cls:
        check_names(model.names, spec, config.weights)
    check_same_model(ctx, model, model.state_dict().values())
    imgsz = config.imgsz or info["imgsz"]
    loader, dataset = create_dataloader(
        spec,
        config.task,
        ctx=ctx,
        imgsz=imgsz,
        batch_size=config.batch_size,
        stride=model.stride,
        hyp=Hyperparameters(),
        augment=False,
        rect=config.rect,
        single_cls=config.single_cls,
        cache_dir=config.cache_dir,
        workers=loader_workers(config.workers, ctx.local_world_size),
        max_bad=config.max_bad,
        verify=config.verify,
        pin_memory=ctx.device.type == "cuda",
    )
    names = dataset.index.names
    gt = dataset.index.ground_truth()
    evaluator = Evaluator(
        ground_truth=gt,
        num_classes=len(names),
        postprocess=make_postprocess(config),
        ctx=ctx,
        device=ctx.device,
        amp_dtype=broadcast_object(ctx, resolve_amp(config.amp, ctx.device)),
        progress=partial(progress, desc=config.task, total=len(loader), enabled=ctx.is_main),
    )
    with torch_distributed_zero_first(ctx):  # before the work; the folder itself is made when there is something for it
        if ctx.is_main:
            check_run_dir(config.project, config.name, config.exist_ok)
    model = for_inference(model, config).to(ctx.device, memory_format=torch.channels_last)
    result = evaluator.run(model, loader)
    if ctx.is_main:
        folder = increment_path(config.project, config.name, config.exist_ok)
        report(config, result, evaluator, gt, names, folder, imgsz)


def for_inference(model: Detector, config: ValConfig) -> Detector | ManyViews:
    """The detector without what only training needs. With ``--tta`` it looks at each picture several times, and what
    it sees twice is left to NMS, also if it could do without."""
    from models.postprocess.tta import ManyViews

    fused = model.fuse(one_to_one=not (config.nms or config.tta))
    return ManyViews(fused) if config.tta else fused


def _dataset(config: ValConfig, info: dict, ctx: DistributedContext) -> DatasetSpec:
    from data.open_dataset import open_dataset
    from utils.files.folders import find_location

    source, root = find_location(info.get("data", {}), config.weights)
    data = config.data or source
    if not data:
        raise UserError(f"{config.weights}: does not say what data it was trained on; name a data set YAML with --data")
    return open_dataset(
        data,
        (config.task,),
        stage=config.stage,
        cache_dir=config.cache_dir,
        ctx=ctx,
        known_root="" if config.data else root,
    )


def check_names(names: Sequence[str], spec: DatasetSpec, weights: str) -> None:
    """The model's classes must be the data set's, in the same order. Raises UserError naming the first difference."""
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


def make_postprocess(config: ValConfig) -> Postprocess:
    """Raw maps to detections, by the thresholds of the command line."""
    from models.postprocess.detections import select_detections, suppression_iou

    def postprocess(model: Detector | ManyViews, raw: list[Tensor]) -> Detections:
        boxes, scores = model.decode(raw)
        if config.single_cls:
            scores = scores.amax(-1, keepdim=True)
        return select_detections(
            boxes,
            scores,
            conf_thres=config.conf_thres,
            iou_thres=suppression_iou(model.head, config.iou_thres),
            max_det=config.max_det,
        )

    return postprocess


def report(
    config: ValConfig,
    result: EvalResult,
    evaluator: Evaluator,
    gt: GroundTruth,
    names: Sequence[str],
    folder: Path,
    imgsz: int,
) -> None:
    """Prints the table and fills the run's folder."""
    from engine.evaluation.report import format_summary, format_table, result_rows, write_class_csv, write_results_json
    from utils.logger import get_logger
    from utils.visualize.detection_writer import write_predictions

    log = get_logger()
    rows = result_rows(result, gt, names)
    log.info("%s\n%s", format_table(rows, verbose=config.verbose), format_summary(result))
    analysis = report_analysis(config, result, evaluator, gt, names, folder)
    settings = to_dict(config) | {"imgsz": imgsz}
    write_results_json(folder / "results.json", result, rows, settings, analysis)
    write_class_csv(folder / "classes.csv", rows)
    if config.save_json:
        write_predictions(folder / "predictions.json", evaluator.detections, gt)
    if not config.noplots:
        draw(result, evaluator, names, folder)
    log.info("results are in %s", folder)


def report_analysis(
    config: ValConfig,
    result: EvalResult,
    evaluator: Evaluator,
    gt: GroundTruth,
    names: Sequence[str],
    folder: Path,
) -> dict:
    """Prints and draws what errors cost, what confidences are worth and, if asked, AP by size; returns it as data."""
    from engine.evaluation.analysis import analyse
    from engine.evaluation.plots import plot_errors, plot_reliability
    from engine.evaluation.report import (
        analysis_content,
        format_calibration,
        format_errors,
        format_sizes,
        write_size_csv,
    )
    from utils.logger import get_logger

    log = get_logger()
    analysis = analyse(gt, evaluator.detections, len(names), threshold=result.best_confidence, per_size=config.per_size)
    if analysis.sizes is not None:
        log.info("%s", format_sizes(analysis.sizes, names, verbose=config.verbose))
        write_size_csv(folder / "sizes.csv", analysis.sizes, names)
    log.info("%s\n%s", format_errors(analysis.errors), format_calibration(analysis.calibration))
    if not config.noplots:
        plot_errors(analysis.errors, folder / "errors.png")
        plot_reliability(analysis.calibration, folder / "calibration.png")
    return analysis_content(analysis, names)


def draw(result: EvalResult, evaluator: Evaluator, names: Sequence[str], folder: Path) -> None:
    """Curves, the confusion matrix, and the first batch with its labels and detections."""
    from utils.visualize.draw import write_image
    from utils.visualize.plots import draw_detections, plot_confusion, plot_metric_curves

    plot_metric_curves(result, names, folder)
    plot_confusion(result.confusion, names, folder / "confusion_matrix.png")
    if evaluator.preview is not None:
        batch, detections = evaluator.preview
        write_image(
            folder / "predictions.jpg", draw_detections(batch.images, detections, batch.targets, batch.paths, names)
        )


if __name__ == "__main__":
    run_main(main)
