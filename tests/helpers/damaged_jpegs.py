"""JPEGs with a damaged middle."""

from __future__ import annotations

import cv2
import numpy as np


def make_jpeg(seed: int, side: int = 320, quality: int = 90) -> bytes:
    """Returns a JPEG with some thousand bytes of coded data."""
    rng = np.random.default_rng(seed)
    picture = cv2.resize(rng.integers(0, 256, (side // 4, side // 4, 3), dtype=np.uint8), (side, side))
    return cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, quality])[1].tobytes()


def replace_middle(data: bytes, kind: str) -> bytes:
    """Returns the content of a file with its middle third replaced. ``kind``: kind of bytes that replace it."""
    rng = np.random.default_rng(0)
    first = len(data) // 3
    last = 2 * len(data) // 3
    count = last - first
    middle = {
        "zeros": bytes(count),
        "ones": b"\xff" * count,
        "pattern": (b"\x12\x34" * count)[:count],
        "text": (b"the quick brown fox " * count)[:count],
        "random": rng.integers(0, 256, count, np.uint8).tobytes(),
        "other": make_jpeg(77)[first:last],
    }[kind]
    return data[:first] + middle + data[last:]
