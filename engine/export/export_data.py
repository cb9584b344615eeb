"""The images of an export, for its check and for the calibration of int8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from data.dataset.spec import DatasetSpec
from data.index.index import DatasetIndex, IndexSettings
from data.index.load import load_index
from data.loading.worker import collate, new_pixels
from data.render.letterbox import CanvasRule
from data.samples.dataset import LoadImagesAndLabels
from data.samples.readers import ImageReader, SampleReader, TileReader
from data.samples.tiles import TiledIndex
from engine.formats.resolved_export import ResolvedExport
from engine.inference.model import CheckpointModel
from utils.batches import Batch, BatchRequest, to_float
from utils.config.settings import ExportConfig, Hyperparameters
from utils.errors import UserError


@dataclass(frozen=True)
class ExportData:
    """The images for the check and the calibration of an export; tiles of them if the model was trained on tiles."""

    spec: DatasetSpec
    val: DatasetIndex | None  # the whole split; None: there is no check
    checked: SampleReader | None  # the images of ``val`` that are compared
    calibration: SampleReader | None  # training images; None: nothing is quantized
    calibration_count: int  # number of these images or tiles to calibrate with

    @property
    def checks_all_images(self) -> bool:
        return self.val is not None and self.checked is not None and len(self.checked.image_index) == len(self.val)


def open_export_data(
    model: CheckpointModel, spec: DatasetSpec, config: ExportConfig, options: ResolvedExport
) -> ExportData:
    """Reads the images of the check and the calibration, once for all formats. ``options``: result of
    `resolve_options`. Raises UserError if there are fewer training images than a batch has."""
    imgsz = max(options.imgsz_hw)
    val = calibration = checked = None
    if config.int8:
        train = evenly_spaced(_read_split(model, spec, "train", config), config.calibration_images)
        calibration = open_samples(train, imgsz=imgsz, tile=model.tile)
        found = min(len(calibration.sample_index), config.calibration_images)
        if found < config.batch:
            raise UserError(f"--batch {config.batch}: is more than there are images to calibrate --int8 with ({found})")
    if config.check:
        val = _read_split(model, spec, "val", config)
        checked = open_samples(select_checked(val, config.check_images, model.tile), imgsz=imgsz, tile=model.tile)
    return ExportData(spec, val, checked, calibration, config.calibration_images)


def _read_split(model: CheckpointModel, spec: DatasetSpec, name: str, config: ExportConfig) -> DatasetIndex:
    settings = IndexSettings(cache_dir=config.cache_dir, single_cls=model.has_merged_classes, progress=False)
    allowed = model.stored("max_bad")
    if type(allowed) in (int, float) and 0 <= allowed <= 1:
        settings = replace(settings, max_bad=float(allowed))  # the fraction that the training was allowed to lose
    return load_index(spec, name, settings)


def open_samples(index: DatasetIndex, *, imgsz: int, tile: int) -> SampleReader:
    """Opens the reader of images, or of their tiles.

    Args:
        imgsz: longer side to which images and tiles are scaled, pixels.
        tile: side of tiles, pixels; 0: whole images.
    """
    if not tile:
        return ImageReader(index, imgsz=imgsz, antialias=False)
    return TileReader(_cut(index, tile), imgsz=imgsz, image_cache=_LastImage(index))


def _cut(index: DatasetIndex, tile: int) -> TiledIndex:
    """Cuts images into tiles as validation in training does."""
    return TiledIndex(index, tile, hyp=Hyperparameters())


class _LastImage:
    """An `ImageCache` that decodes images when they are needed, and keeps the last one for its other tiles.

    A file of `open_tile_cache` would replace the one with all images of the split.
    """

    def __init__(self, index: DatasetIndex) -> None:
        self._reader = ImageReader(index, imgsz=None)
        self._number = -1
        self._image = np.empty((0, 0, 0), np.uint8)

    def __getitem__(self, index: int) -> np.ndarray:
        if index != self._number:
            self._image = self._reader.read(index, epoch=0)
            self._number = index
        return self._image


def select_checked(val: DatasetIndex, count: int, tile: int) -> DatasetIndex:
    """Selects ``count`` images for the check or, with tiles of side ``tile``, as many images as have about ``count``
    tiles, at least one."""
    if tile and len(val):
        count = max(count * len(val) // len(_cut(val, tile).image), 1)
    return evenly_spaced(val, count)


def evenly_spaced(index: DatasetIndex, count: int) -> DatasetIndex:
    """Selects up to ``count`` evenly spaced images, in order."""
    return index.take(_spaced_numbers(len(index), count))


def _spaced_numbers(total: int, count: int) -> np.ndarray:
    """Returns up to ``count`` evenly spaced numbers below ``total``, ascending: int64 (n,)."""
    return np.unique(np.linspace(0, total - 1, min(count, total)).round().astype(np.int64))


def calibration_images(reader: SampleReader, count: int, options: ResolvedExport) -> Iterator[np.ndarray]:
    """Yields letterboxed batches float32 (B, C, H, W) in [0, 1], each of ``options.batch`` images or tiles, of up to
    ``count`` that are evenly spaced."""
    samples = LoadImagesAndLabels(reader)
    requests = _requests(samples, replace(options, dynamic=False), stride=1, size=1)
    images: list[np.ndarray] = []
    for number in _spaced_numbers(len(requests), count).tolist():
        pixels = _render(samples, requests[number]).images
        images.append(to_float(pixels, torch.device("cpu"), torch.float32, channels_last=False).numpy())
        if len(images) == options.batch:
            yield np.concatenate(images)
            images.clear()


def letterboxed(reader: SampleReader, options: ResolvedExport, stride: int, size: int) -> Iterator[Batch]:
    """Yields batches of up to ``size`` images or tiles on the canvases of an export.

    A dynamic model gets rectangles of several sizes, even if its images are padded to squares elsewhere, since its file
    must take any canvas. Tiles are squares.
    """
    samples = LoadImagesAndLabels(reader)
    for request in _requests(samples, options, stride, size):
        yield _render(samples, request)


def _requests(samples: LoadImagesAndLabels, options: ResolvedExport, stride: int, size: int) -> list[BatchRequest]:
    canvases = CanvasRule(max(options.imgsz_hw), stride, fixed_hw=None if options.dynamic else options.imgsz_hw)
    return samples.requests(size, canvases)


def _render(samples: LoadImagesAndLabels, request: BatchRequest) -> Batch:
    pixels = new_pixels(len(request.keys), request.canvas_hw, samples.sample_index.pixels)
    return collate(samples.render(request, list(pixels.numpy())), pixels)
