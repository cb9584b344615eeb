"""`BatchRequest`: what a loader asks a worker for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from utils.structures import SampleKey


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The samples of a batch."""

    keys: tuple[SampleKey, ...]
    canvas_hw: tuple[int, int]
    slot: int | None = None  # of `data.loading.shared_memory`, to render into
    epochs: int | None = None  # of the whole run; None: as the data set was made for

    @property
    def images(self) -> list[range]:
        """The samples of each image, by number: one, or four whose canvases are smaller than the batch's."""
        images, start = [], 0
        while start < len(self.keys):
            images.append(range(start, start + (1 if self.keys[start].canvas_hw == self.canvas_hw else 4)))
            start = images[-1].stop
        return images


def epoch_of(keys: Sequence[SampleKey]) -> int:
    """The epoch of the samples of a batch, which all have the same; 0 for none."""
    return keys[0].epoch if keys else 0
