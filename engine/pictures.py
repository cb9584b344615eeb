"""What a run draws: labels and training batches at the start, curves and predictions as it goes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from engine.evaluator import evaluating, is_channels_last, to_float
from engine.trackers import Tracker
from utils.boxes import scale_boxes, xywh_to_xyxy, xyxy_to_cxcywh
from utils.plots import draw_batch, draw_detections, plot_confusion, plot_curves, plot_labels, plot_metric_curves
from utils.structures import Batch, Detections, EvalResult, GroundTruth

log = logging.getLogger("lockstep")


def write_png(path: Path, rgb: np.ndarray) -> None:
    """Writes uint8 (H, W, 3) RGB; the path may hold any characters."""
    import cv2

    done, encoded = cv2.imencode(path.suffix, cv2.cvtColor(rgb, cv2.COLOR_RGB2BGR))
    if not done:
        raise ValueError(f"{path}: cannot be encoded")
    path.write_bytes(encoded.tobytes())


class RunPictures:
    """Draws into ``run_dir`` and hands the same pictures to the tracker."""

    def __init__(self, run_dir: Path, names: Sequence[str], tracker: Tracker) -> None:
        self.run_dir, self.names, self.tracker = run_dir, names, tracker

    def labels(self, truth: GroundTruth) -> None:
        """labels.png: how often each class occurs, where and how large."""
        sizes = np.repeat(truth.image_hw, np.diff(truth.offsets), axis=0).astype(np.float64)
        boxes = xyxy_to_cxcywh(xywh_to_xyxy(truth.boxes_xywh_px))
        plot_labels(
            truth.classes, scale_boxes(boxes, 1 / sizes[:, 1], 1 / sizes[:, 0]), self.names, self.run_dir / "labels.png"
        )

    def training_batch(self, number: int, batch: Batch) -> None:
        """train_batch<number>.jpg: augmented pictures with their targets, as the model sees them."""
        sheet = draw_batch(batch.images, batch.targets, batch.paths, self.names)
        if sheet is not None:
            write_png(self.run_dir / f"train_batch{number}.jpg", sheet)
            self.tracker.image(f"train/batch{number}", sheet, 0)

    def scores(self, epoch: int, result: EvalResult) -> None:
        """Curves, confusion matrix and PR curves of one validation."""
        plot_metric_curves(result, self.names, self.run_dir)
        plot_confusion(result.confusion, self.names, self.run_dir / "confusion_matrix.png")
        self.tracker.pr_curves(result, self.names, epoch)

    def results(self) -> None:
        """results.png: every column of results.csv over the epochs."""
        table = self.run_dir / "results.csv"
        if table.exists():
            plot_curves(table, self.run_dir / "results.png")

    @torch.no_grad()
    def predictions(
        self,
        epoch: int,
        model: nn.Module,
        batch: Batch,
        device: torch.device,
        postprocess: Callable[[nn.Module, list[Tensor]], Detections],
    ) -> None:
        """val_predictions.jpg: validation images with labels left and detections right."""
        with evaluating(model):
            images = to_float(batch.images, device, torch.float32, is_channels_last(model))
            detections = Detections(*(t.cpu() for t in postprocess(model, [level.float() for level in model(images)])))
        sheet = draw_detections(batch.images, detections, batch.targets, batch.paths, self.names)
        if sheet is not None:
            write_png(self.run_dir / "val_predictions.jpg", sheet)
            self.tracker.image("val/predictions", sheet, epoch)
