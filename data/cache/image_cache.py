"""Defines what readers of samples need of a cache on the host."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class ImageCache(Protocol):
    """Decoded source images by number, regardless of storage."""

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns an image, (h, w, C), read-only. Raises UserError for damage."""
