"""`PackedPixels`: the visible source pixels of a planned batch, sent from the worker to the device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from data.loading.shared_memory import new_pixels
from data.render.pyramid import Patches, level_image
from utils.pixels import RGB8, PixelFormat


class PackedPixels:
    """Source pixels that travel with the table.

    After `locate`, ``pixels`` (P, C) holds the visible area of each patch's image, one after another.
    """

    def __init__(self, load: Callable[[int], np.ndarray], pixel_format: PixelFormat = RGB8) -> None:
        self._load = load
        self._format = pixel_format
        # One pixel, as the renderer reads some pixel even without patches.
        self.pixels = torch.zeros((1, pixel_format.channels), dtype=pixel_format.torch_dtype)

    def locate(self, patches: Patches) -> np.ndarray:
        """Packs the pixels of ``patches``; returns their addresses, see `PixelSource.locate`."""
        sizes = patches.box[:, 2:] - patches.box[:, :2]
        starts = np.concatenate([[0], np.cumsum(sizes.prod(1))]).astype(np.int64)
        self.pixels = new_pixels(1, (int(starts[-1]), 1), self._format).flatten(0, 2)
        flat = self.pixels.numpy()
        for number, (index, level) in enumerate(zip(patches.index.tolist(), patches.level.tolist())):
            x1, y1, x2, y2 = patches.box[number].tolist()
            out = flat[starts[number] : starts[number + 1]].reshape(y2 - y1, x2 - x1, -1)
            out[:] = level_image(self._load(index), level)[y1:y2, x1:x2]
        origin = starts[:-1] - patches.box[:, 1] * sizes[:, 0] - patches.box[:, 0]
        return np.stack([origin, sizes[:, 0]], 1)
