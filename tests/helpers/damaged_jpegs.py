"""JPEGs with a damaged middle, and data sets of them."""

from __future__ import annotations

from pathlib import Path

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


def write_jpegs(root: Path, images: int = 24, *, damaged: int = 0, kind: str = "zeros") -> Path:
    """Writes a data set of JPEGs with one object each, the first of them with a damaged middle. Returns the YAML.

    ``images``: number of training images; ``kind``: see `replace_middle`.
    """
    for split in ("train", "val"):
        for folder in ("images", "labels"):
            (root / folder / split).mkdir(parents=True)
        for i in range(images if split == "train" else 2):
            data = make_jpeg(i)
            if split == "train" and i < damaged:
                data = replace_middle(data, kind)
            (root / "images" / split / f"{i:03}.jpg").write_bytes(data)
            (root / "labels" / split / f"{i:03}.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    path = root / "d.yaml"
    path.write_text("train: images/train\nval: images/val\nnames: [a, b]\n")
    return path
