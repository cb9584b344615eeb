"""Sheets of images with their labels and detections, and the files of a validation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.evaluation.analysis import ErrorSplit
from engine.evaluation.result import PREVIEW_IMAGES, Evaluation
from engine.report.page import ReportPage
from engine.report.subject import ScoredValidation, Subject
from utils.batches import Batch
from utils.boxes import cxcywh_to_xyxy
from utils.detections import Detections
from utils.drawing.draw import class_colors, draw_boxes, tile_images, write_image
from utils.drawing.text import write_text
from utils.pixels import as_rgb8

PICTURED_IMAGES = 16  # images of a batch on a sheet
CAPTION_COLOR = np.array([40, 40, 40])


def write_validation_report(folder: Path, subject: Subject, evaluation: Evaluation, errors: ErrorSplit) -> None:
    """Writes the report and predictions.jpg of a validation."""
    page = ReportPage(folder, subject)
    validation = ScoredValidation.of(evaluation, errors=errors)
    page.set_validation(validation)
    page.write({})
    page.log_path()
    write_preview(validation, subject.validated.index.names, folder / "predictions.jpg")


def write_preview(validation: ScoredValidation, names: Sequence[str], out: Path) -> np.ndarray | None:
    """Writes a picture of the first batch with its labels and the detections that detect.py shows at the threshold of
    the validation, and returns the picture; None if there is no batch."""
    if validation.preview is None:
        return None
    batch, detections = validation.preview
    sheet = draw_batch(batch, names, detections, threshold=validation.result.shown_confidence)
    if sheet is not None:
        write_image(out, sheet)
    return sheet


def draw_batch(
    batch: Batch, names: Sequence[str], detections: Detections | None = None, *, threshold: float = 0.0
) -> np.ndarray | None:
    """Draws a sheet of the first images of a batch with their labels, uint8 (H, W, 3) RGB; None for an empty batch.

    ``detections``: in canvas pixels; those that score above ``threshold`` are drawn in a second picture of each image.
    """
    limit = PICTURED_IMAGES if detections is None else PREVIEW_IMAGES
    images = as_rgb8(batch.images[:limit].numpy(force=True).transpose(0, 2, 3, 1))
    if not len(images):
        return None
    pictures = []
    rows = batch.targets.on_host
    for i, (image, path) in enumerate(zip(images, batch.paths)):
        height, width = image.shape[:2]
        labels = rows[rows[:, 0] == i, 1:]
        classes = labels[:, 0].astype(int)
        boxes = cxcywh_to_xyxy(labels[:, 1:] * np.array([width, height, width, height]))
        labeled = draw_boxes(image, boxes, [names[c] for c in classes], class_colors(classes))
        _caption(labeled, Path(path).name if detections is None else f"labels: {Path(path).name}")
        pictures.append(labeled)
        if detections is not None:
            pictures.append(_with_detections(image, names, detections, i, threshold))
    columns = math.ceil(math.sqrt(len(pictures))) if detections is None else min(len(pictures), 4)
    return tile_images(pictures, columns)


def _with_detections(
    image: np.ndarray, names: Sequence[str], detections: Detections, number: int, threshold: float
) -> np.ndarray:
    """Draws the detections of image ``number`` of a batch that score above ``threshold``."""
    count = int(detections.counts[number])
    scores = detections.scores[number, :count].numpy(force=True)
    boxes = detections.boxes_xyxy[number, :count].numpy(force=True)
    classes = detections.classes[number, :count].numpy(force=True)
    keep = scores > threshold
    labels = [f"{names[c]} {score:.2f}" for c, score in zip(classes[keep], scores[keep])]
    picture = draw_boxes(image, boxes[keep], labels, class_colors(classes[keep]))
    _caption(picture, f"detections above {threshold:.3f}")
    return picture


def _caption(image: np.ndarray, caption: str) -> None:
    write_text(image, caption, (0, image.shape[0]), 11, CAPTION_COLOR)
