"""The images of an export, for its check and for the calibration of int8."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from data.index import DatasetIndex
from data.loading.collate import render_batch
from data.render.letterbox import CanvasRule
from data.samples.dataset import LoadImagesAndLabels
from data.samples.readers import ImageReader, SampleReader, TileReader
from data.samples.tiles import TiledIndex
from engine.export.graphs import ResolvedExport
from utils.batches import Batch, to_float
from utils.config.settings import Hyperparameters


def open_samples(index: DatasetIndex, *, count: int, imgsz: int, tile: int) -> SampleReader:
    """Opens a reader of ``count`` evenly spaced images or, with tiles, of as many images as have about ``count`` tiles.

    Args:
        imgsz: longer side to which images and tiles are scaled, pixels.
        tile: side of tiles, cut as validation in training does, pixels; 0: whole images.
    """
    if tile and len(index):
        tiles = TiledIndex(index, tile, hyp=Hyperparameters())
        count = max(count * len(index) // len(tiles.image), 1)
    index = index.take(np.unique(np.linspace(0, len(index) - 1, min(count, len(index))).round().astype(np.int64)))
    if not tile:
        return ImageReader(index, imgsz=imgsz, antialias=False)
    return TileReader(TiledIndex(index, tile, hyp=Hyperparameters()), imgsz=imgsz, image_cache=_LastImage(index))


class _LastImage:
    """An `ImageCache` that decodes images when they are needed, and keeps the last one for its other tiles. (A file of
    `open_tile_reader` would replace the one with all images of the split.)"""

    def __init__(self, index: DatasetIndex) -> None:
        self._reader = ImageReader(index, imgsz=None)
        self._number = -1
        self._image = np.empty((0, 0, 0), np.uint8)

    def __getitem__(self, index: int) -> np.ndarray:
        if index != self._number:
            self._image = self._reader.read(index, epoch=0)
            self._number = index
        return self._image


def letterboxed(reader: SampleReader, options: ResolvedExport, stride: int, size: int) -> Iterator[Batch]:
    """Yields batches of up to ``size`` images or tiles on the canvases of an export.

    A dynamic model gets rectangles of several sizes, even if its images are padded to squares elsewhere, since its file
    must take any canvas. Tiles are squares.
    """
    samples = LoadImagesAndLabels(reader)
    canvases = CanvasRule(max(options.imgsz_hw), stride, fixed_hw=None if options.dynamic else options.imgsz_hw)
    for request in samples.requests(size, canvases):
        yield render_batch(samples, request)


def calibration_batches(reader: SampleReader, options: ResolvedExport, stride: int) -> Iterator[np.ndarray]:
    """Yields full batches for the file, float32 (B, C, H, W) in [0, 1]."""
    for batch in letterboxed(reader, options, stride, options.batch):
        if len(batch.images) == options.batch:
            yield to_float(batch.images, torch.device("cpu"), torch.float32, channels_last=False).numpy()
