"""JPEGs with damage that decoders repair."""

from __future__ import annotations

import cv2
import numpy as np


def photo(seed: int, side: int = 320, quality: int = 90) -> bytes:
    """An image with some thousand bytes of coded data."""
    rng = np.random.default_rng(seed)
    picture = cv2.resize(rng.integers(0, 256, (side // 4, side // 4, 3), dtype=np.uint8), (side, side))
    return cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, quality])[1].tobytes()


def with_middle(data: bytes, kind: str) -> bytes:
    """The file with its middle third replaced."""
    rng = np.random.default_rng(0)
    first, last = len(data) // 3, 2 * len(data) // 3
    count = last - first
    middle = {
        "zeros": bytes(count),
        "ones": b"\xff" * count,
        "pattern": (b"\x12\x34" * count)[:count],
        "text": (b"the quick brown fox " * count)[:count],
        "random": rng.integers(0, 256, count, np.uint8).tobytes(),
        "other": photo(77)[first:last],
    }[kind]
    return data[:first] + middle + data[last:]
