"""`BatchRequest`: the message with which a loader requests a batch from a worker."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from utils.batches import SampleKey


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The samples that make up a batch."""

    keys: tuple[SampleKey, ...]
    canvas_hw: tuple[int, int]
    slot: int | None = None  # slot of `data.loading.shared_memory` to render into
    run_epochs: int = 1  # epochs of the whole run; close_mosaic and close_scale count from its end
    samples_per_image: tuple[int, ...] = ()  # number of consecutive samples that form each image; empty: one each

    @property
    def images(self) -> list[range]:
        """Positions in ``keys`` of the samples of each image."""
        counts = self.samples_per_image or (1,) * len(self.keys)
        bounds = itertools.accumulate(counts, initial=0)
        return [range(start, end) for start, end in itertools.pairwise(bounds)]

    @property
    def epoch(self) -> int:
        """Epoch that all samples share; 0 without samples."""
        return self.keys[0].epoch if self.keys else 0
