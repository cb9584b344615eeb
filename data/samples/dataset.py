"""`LoadImagesAndLabels`: the letterboxed samples of a split."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data.render.letterbox import CanvasRule, Letterbox, fit_letterbox, letterbox
from data.samples.batch_request import BatchRequest
from data.samples.samples import Samples
from utils.batches import Sample, SampleKey


class LoadImagesAndLabels(Samples):
    """Loads the images of a split (or tiles of them) with their labels, letterboxed, as validation samples.

    The longer side is scaled, up or down, to the reader's ``imgsz``; if that is None, samples keep their size.
    `data.samples.augmented.AugmentedImages` renders training samples.
    """

    def requests(
        self, batch_size: int, canvases: CanvasRule, *, rank: int = 0, world_size: int = 1
    ) -> list[BatchRequest]:
        """Returns a rank's validation batches; each sample occurs once over all ranks."""
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
