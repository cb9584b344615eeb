"""The samples of a split, rendered by key: `Samples`, and the letterboxed ones, `LoadImagesAndLabels`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from data.index.index import DatasetIndex
from data.render.letterbox import CanvasRule, Letterbox, fit_letterbox, letterbox
from data.samples.batch_request import BatchRequest
from data.samples.readers import SampleReader
from data.samples.tiled_index import TiledIndex
from utils.batches import Sample, SampleKey


class Samples(ABC):
    """Renders samples of a split. The same key gives the same sample in any process and any order."""

    def __init__(self, reader: SampleReader) -> None:
        """``reader``: of whole images or of tiles."""
        self.reader = reader

    def __len__(self) -> int:
        return len(self.sample_index)

    @property
    def sample_index(self) -> DatasetIndex:
        """Index of the samples; see `SampleReader`."""
        return self.reader.sample_index

    @property
    def tiles(self) -> TiledIndex | None:
        """The tiles that serve as samples; None if whole images do."""
        return self.reader.tiles

    def __getitem__(self, key: SampleKey) -> Sample:
        """Renders the sample of ``key``. Raises UserError for a file that cannot be decoded."""
        return self.render([key])[0]

    @abstractmethod
    def render(
        self,
        keys: Sequence[SampleKey],
        outs: Sequence[np.ndarray | None] | None = None,
        *,
        run_epochs: int | None = None,
    ) -> list[Sample]:
        """Renders the samples of ``keys``, all of one epoch, each independently of the others.

        Args:
            outs: an array (H, W, C) per sample to render into, which saves a copy. Its content is undefined if the
                sample returns another array.
            run_epochs: length of the whole run, if it has changed since this data set was made; used by augmentation.
        """

    def pack(self, key: SampleKey, image: np.ndarray, labels: np.ndarray, fit: Letterbox | None = None) -> Sample:
        """Packs a rendered image and its labels into a `Sample`. ``fit``: None if the image is augmented."""
        original_hw, (left, top) = self.reader.place_of(key.index)
        gain_xy = (1.0, 1.0) if fit is None else (fit.gain_x, fit.gain_y)
        pad_x, pad_y = (0.0, 0.0) if fit is None else (float(fit.pad_x), float(fit.pad_y))
        return Sample(
            image=image,
            labels=labels,
            index=key.index,
            path=self.sample_index.path(key.index),
            original_hw=original_hw,
            gain_xy=gain_xy,
            pad_xy=(pad_x - gain_xy[0] * left, pad_y - gain_xy[1] * top),
        )


class LoadImagesAndLabels(Samples):
    """Renders letterboxed samples.

    The longer side is scaled, up or down, to the reader's ``imgsz``; without it samples keep their size.
    `data.samples.augmented` renders training samples.
    """

    def requests(
        self, batch_size: int, canvases: CanvasRule, *, rank: int = 0, world_size: int = 1
    ) -> list[BatchRequest]:
        """Returns a rank's batches for a validation, in which each sample comes once over all ranks."""
        groups = self.reader.validation_batches(batch_size, canvases)
        return [request for group in groups[rank::world_size] for request in group]

    def render(
        self,
        keys: Sequence[SampleKey],
        outs: Sequence[np.ndarray | None] | None = None,
        *,
        run_epochs: int | None = None,
    ) -> list[Sample]:
        """See `Samples`."""
        return [self._letterboxed(key, out) for key, out in zip(keys, outs or [None] * len(keys))]

    def _letterboxed(self, key: SampleKey, out: np.ndarray | None) -> Sample:
        i = key.index
        image_hw = self.sample_index.image_hw[i]
        fit = fit_letterbox(image_hw, key.canvas_hw, self.reader.imgsz or int(image_hw.max()))
        image = letterbox(self.reader.read(i, key.epoch), key.canvas_hw, fit, out)
        labels = _letterboxed_labels(self.sample_index.labels(i), key.canvas_hw, fit)
        return self.pack(key, image, labels, fit)


def _letterboxed_labels(labels: np.ndarray, canvas_hw: tuple[int, int], fit: Letterbox) -> np.ndarray:
    """Returns the labels of an image, float32 (n, 5) of class, cx, cy, w, h, normalized to the canvas."""
    canvas_h, canvas_w = canvas_hw
    rows = labels.astype(np.float32, copy=True)
    rows[:, 1:] *= np.array([fit.width, fit.height] * 2, np.float32)  # pixels of the resized image
    rows[:, 1:3] += (fit.pad_x, fit.pad_y)  # pixels of the canvas
    rows[:, 1:] /= np.array([canvas_w, canvas_h] * 2, np.float32)
    return rows
