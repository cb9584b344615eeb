"""Batches drawn on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from data.batch_slots import BatchSlots, SlottedBatch
from data.collate import collate, new_pixels, tile_quad
from data.dataset import LoadImagesAndLabels
from data.samplers import BatchRequest
from utils.structures import Batch, Sample, SampleKey


class RenderedBatches:
    """What workers run: a request to a batch."""

    def __init__(self, dataset: LoadImagesAndLabels, slots: BatchSlots | None = None) -> None:
        """``slots``: those that requests name; only in workers."""
        self.dataset = dataset
        self.slots = slots

    def __call__(self, request: BatchRequest) -> Batch | SlottedBatch:
        if request.slot is None:
            return self._drawn(request, new_pixels(len(request.pictures), request.canvas_hw))
        shape = (len(request.pictures), *request.canvas_hw, 3)
        batch = self._drawn(request, torch.from_numpy(self.slots.pixels(request.slot, shape)))
        return SlottedBatch(batch, self.slots, request.slot)

    def _drawn(self, request: BatchRequest, pixels: torch.Tensor) -> Batch:
        places = pixels.numpy()
        if all(len(keys) == 1 for keys in request.pictures):
            samples = self.dataset.samples([keys[0] for keys in request.pictures], places)
        else:
            samples = [self._quad(keys, place) for keys, place in zip(request.pictures, places)]
        return collate(samples, request.canvas_hw, pixels)

    def _quad(self, keys: Sequence[SampleKey], place: np.ndarray) -> Sample:
        return tile_quad(self.dataset.samples(keys)) if len(keys) > 1 else self.dataset.samples(keys, [place])[0]
