"""Samples to a batch, and the images that are rendered on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from data.dataset import LoadImagesAndLabels
from data.loading.shared_memory import BatchSlots, SlottedBatch
from data.sampler import BatchRequest
from utils.shared_tensors import new_pixels
from utils.structures import Batch, Sample, SampleKey, bucketed


def collate(samples: Sequence[Sample], canvas_hw: tuple[int, int], pixels: Tensor | None = None) -> Batch:
    """A batch of samples of one canvas size; of none, one with zero images of that size.

    Images are stored (B, H, W, 3) and seen as (B, 3, H, W): the channels_last layout, without a copy.

    Args:
        pixels: from `new_pixels`; samples that were rendered into their place in it are not copied.
    """
    pixels = new_pixels(len(samples), canvas_hw) if pixels is None else pixels
    for sample, place in zip(samples, pixels.numpy()):
        if not np.may_share_memory(sample.image, place):
            place[:] = sample.image
    counts = [len(s.labels) for s in samples]
    targets = np.zeros((sum(counts), 6), np.float32)
    if samples:
        targets[:, 0] = np.repeat(np.arange(len(samples)), counts)
        targets[:, 1:] = np.concatenate([s.labels for s in samples])
    return Batch(
        images=pixels.permute(0, 3, 1, 2),
        targets=torch.from_numpy(targets),
        max_targets=bucketed(max(counts, default=0)),
        indices=torch.tensor([s.index for s in samples], dtype=torch.int64),
        original_hw=torch.tensor([s.original_hw for s in samples], dtype=torch.int32).reshape(-1, 2),
        letterbox=torch.tensor([(*s.gain_xy, *s.pad_xy) for s in samples], dtype=torch.float64).reshape(-1, 4),
        paths=tuple(s.path for s in samples),
        counts=tuple(counts),
    )


def tile_quad(samples: Sequence[Sample]) -> Sample:
    """Four samples of one size in a 2 x 2 grid, as one sample that carries the first one's identity."""
    images = [s.image for s in samples]
    image = np.concatenate([np.concatenate(images[:2], 1), np.concatenate(images[2:], 1)], 0)
    shifted = []
    for slot, sample in enumerate(samples):
        rows = sample.labels.copy()
        rows[:, 1:] /= 2
        rows[:, 1:3] += (0.5 * (slot % 2), 0.5 * (slot // 2))
        shifted.append(rows)
    first = samples[0]
    return Sample(image, np.concatenate(shifted), first.index, first.path, first.original_hw, (1.0, 1.0), (0.0, 0.0))


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
