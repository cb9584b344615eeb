"""What a run draws: labels, training batches and the graph at the start, curves and predictions as it goes."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch

from engine.checkpoint.run import Run
from engine.trainer import Trainer
from utils.boxes import scale_boxes, xywh_to_xyxy, xyxy_to_cxcywh
from utils.distributed.context import DistributedContext
from utils.structures import EvalResult, GroundTruth
from utils.visualize.draw import write_image
from utils.visualize.plots import (
    draw_batch,
    draw_detections,
    plot_confusion,
    plot_curves,
    plot_labels,
    plot_metric_curves,
)

PICTURED_BATCHES = 3
TIME_SHARE = 0.03  # of the run, at most, goes into pictures by epoch


def illustrate(ctx: DistributedContext, run: Run, trainer: Trainer) -> RunPictures | None:
    """On rank 0, what draws the run; data and graph are drawn at once."""
    if not ctx.is_main or run.config.noplots:
        return None
    pictures = RunPictures(run.folder, trainer)
    if run.content is None:
        pictures.before(run.config.imgsz)
    return pictures


class RunPictures:
    """Draws into ``folder`` and hands the same pictures to the trainer's tracker."""

    def __init__(self, folder: Path, trainer: Trainer) -> None:
        self.folder, self.trainer, self.tracker = folder, trainer, trainer.tracker
        self.names = trainer.ema.module.names
        self._undrawn: tuple[int, EvalResult | None] | None = None
        self._drawn_at, self._cost_s = time.monotonic(), 0.0

    def before(self, imgsz: int) -> None:
        """labels.png, train_batch0.jpg to train_batch2.jpg (augmented, as the model sees them), and the graph."""
        loader = self.trainer.train_loader
        self._labels(loader.index.ground_truth())
        for number in range(min(PICTURED_BATCHES, len(loader))):
            batch = loader.render(0, number)
            sheet = draw_batch(batch.images, batch.targets, batch.paths, self.names)
            if sheet is not None:
                write_image(self.folder / f"train_batch{number}.jpg", sheet)
                self.tracker.image(f"train/batch{number}", sheet, 0)
        device = next(self.trainer.ema.module.parameters()).device
        self.tracker.graph(self.trainer.ema.module, torch.zeros(1, 3, imgsz, imgsz, device=device))

    def after_epoch(self, epoch: int, result: EvalResult | None) -> None:
        """Draws the epoch, unless that would take more than `TIME_SHARE` of the run; then it waits for a later one."""
        self._undrawn = (epoch, result)
        if time.monotonic() - self._drawn_at >= self._cost_s / TIME_SHARE:
            self.finish()

    def finish(self) -> None:
        """Draws the last epoch if that has not been done."""
        if self._undrawn is None:
            return
        started = time.monotonic()
        self._draw(*self._undrawn)
        self._undrawn, self._drawn_at = None, time.monotonic()
        self._cost_s = self._drawn_at - started

    def _draw(self, epoch: int, result: EvalResult | None) -> None:
        """results.png; after a validation also its curves, confusion matrix and val_predictions.jpg."""
        table = self.folder / "results.csv"
        if table.exists():
            plot_curves(table, self.folder / "results.png")
        if result is None:
            return
        plot_metric_curves(result, self.names, self.folder)
        plot_confusion(result.confusion, self.names, self.folder / "confusion_matrix.png")
        self.tracker.pr_curves(result, self.names, epoch)
        if self.trainer.evaluator.preview is not None:
            batch, detections = self.trainer.evaluator.preview
            sheet = draw_detections(batch.images, detections, batch.targets, batch.paths, self.names)
            if sheet is not None:
                write_image(self.folder / "val_predictions.jpg", sheet)
                self.tracker.image("val/predictions", sheet, epoch)

    def _labels(self, truth: GroundTruth) -> None:
        sizes = np.repeat(truth.image_hw, np.diff(truth.offsets), axis=0).astype(np.float64)
        boxes = xyxy_to_cxcywh(xywh_to_xyxy(truth.boxes_xywh_px))
        boxes_norm = scale_boxes(boxes, 1 / sizes[:, 1], 1 / sizes[:, 0])
        plot_labels(truth.classes, boxes_norm, self.names, self.folder / "labels.png")
