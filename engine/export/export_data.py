"""The images of an export, for its check and for the calibration of int8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from data.index.index import DatasetIndex
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.loading.shared_memory import new_pixels
from data.loading.worker import collate
from data.render.letterbox import CanvasRule
from data.samples.dataset import LoadImagesAndLabels
from data.samples.readers import ImageReader
from data.source.dataset_spec import DatasetSpec
from engine.formats.resolved_export import ResolvedExport
from engine.inference.model import CheckpointModel
from utils.batches import Batch, to_float
from utils.config.settings import ExportConfig
from utils.errors import UserError


@dataclass(frozen=True)
class ExportData:
    """The images for the check and the calibration of an export."""

    spec: DatasetSpec
    val: DatasetIndex | None  # the whole split; None: there is no check
    checked: DatasetIndex | None  # the images of ``val`` that are compared
    calibration: DatasetIndex | None  # training images; None: nothing is quantized

    @property
    def checks_all_images(self) -> bool:
        return self.val is not None and self.checked is not None and len(self.checked) == len(self.val)


def open_export_data(model: CheckpointModel, spec: DatasetSpec, config: ExportConfig) -> ExportData:
    """Reads the images of the check and the calibration, once for all formats. Raises UserError if there are fewer
    training images than a batch has."""
    val = calibration = checked = None
    if config.int8:
        calibration = evenly_spaced(_read_split(model, spec, "train", config), config.calibration_images)
        if len(calibration) < config.batch:
            raise UserError(
                f"--batch {config.batch}: is more than there are images to calibrate --int8 with ({len(calibration)})"
            )
    if config.check:
        val = _read_split(model, spec, "val", config)
        checked = evenly_spaced(val, config.check_images)
    return ExportData(spec, val, checked, calibration)


def _read_split(model: CheckpointModel, spec: DatasetSpec, name: str, config: ExportConfig) -> DatasetIndex:
    settings = IndexSettings(cache_dir=config.cache_dir, single_cls=model.has_merged_classes, progress=False)
    allowed = model.stored("max_bad")
    if type(allowed) in (int, float) and 0 <= allowed <= 1:
        settings = replace(settings, max_bad=float(allowed))  # the fraction that the training was allowed to lose
    return load_index(spec, name, settings)


def evenly_spaced(index: DatasetIndex, count: int) -> DatasetIndex:
    """Selects at most ``count`` images, evenly spread, in their order."""
    chosen = np.linspace(0, len(index) - 1, min(count, len(index))).round().astype(np.int64)
    return index.take(np.unique(chosen))


def calibration_images(index: DatasetIndex, options: ResolvedExport) -> Iterator[np.ndarray]:
    """Yields letterboxed batches float32 (B, C, H, W) in [0, 1], each of ``options.batch`` images."""
    for batch in letterboxed(index, replace(options, dynamic=False), 1, options.batch):
        if len(batch.images) == options.batch:
            yield to_float(batch.images, torch.device("cpu"), torch.float32, channels_last=False).numpy()


def letterboxed(index: DatasetIndex, options: ResolvedExport, stride: int, size: int) -> Iterator[Batch]:
    """Yields batches of ``size`` images on the canvases of an export.

    A dynamic model gets rectangles of several sizes, even if its images are padded to squares elsewhere, since its file
    must take any canvas.
    """
    samples = LoadImagesAndLabels(ImageReader(index, imgsz=max(options.imgsz_hw), reduces=False))
    canvases = CanvasRule(max(options.imgsz_hw), stride, fixed_hw=None if options.dynamic else options.imgsz_hw)
    for request in samples.requests(size, canvases):
        pixels = new_pixels(len(request.keys), request.canvas_hw, index.pixels)
        yield collate(samples.render(request, list(pixels.numpy())), pixels)
