"""`Samples`: the samples of a split, rendered by key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from data.index.index import DatasetIndex
from data.render.letterbox import Letterbox
from data.samples.readers import SampleReader
from data.samples.tiled_index import TiledIndex
from utils.batches import Sample, SampleKey


class Samples(ABC):
    """Renders samples of a split. The same key gives the same sample in any process and any order."""

    def __init__(self, reader: SampleReader) -> None:
        """``reader``: reads whole images or tiles."""
        self.reader = reader

    def __len__(self) -> int:
        return len(self.sample_index)

    @property
    def sample_index(self) -> DatasetIndex:
        """Index of the samples; see `SampleReader`."""
        return self.reader.sample_index

    @property
    def tiles(self) -> TiledIndex | None:
        """The tiles that are the samples; None if the samples are whole images."""
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
