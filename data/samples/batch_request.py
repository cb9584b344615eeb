"""`BatchRequest`: the message by which a loader orders a batch from a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from utils.batches import SampleKey


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The samples that make up a batch."""

    keys: tuple[SampleKey, ...]
    canvas_hw: tuple[int, int]
    slot: int | None = None  # slot of `data.loading.shared_memory` to render into
    epochs: int | None = None  # length of the whole run, if it has changed since the data set was made

    @property
    def images(self) -> list[range]:
        """Positions in ``keys`` of the samples of each image: one, or four on canvases smaller than the batch's."""
        images: list[range] = []
        start = 0
        while start < len(self.keys):
            samples = 1 if self.keys[start].canvas_hw == self.canvas_hw else 4
            images.append(range(start, start + samples))
            start += samples
        return images


def epoch_of(keys: Sequence[SampleKey]) -> int:
    """Returns the epoch that all samples of a batch share; 0 without samples."""
    return keys[0].epoch if keys else 0
