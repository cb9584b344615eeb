"""Source images: what the renderer is given of a file. The decoded image, reduced (never enlarged) so that its longer
side is at most imgsz.

The reduction is part of the definition and not of the cache, so ``--cache`` changes no pixel. It is bilinear, as in the
published evaluations of YOLO models, and the same in training and validation. A JPEG of at least twice the size is
first decoded at a half, a quarter or an eighth of it, which saves most of the decoding and some aliasing.
"""

from __future__ import annotations

import cv2
import numpy as np

from data.images import Complain, read_reduced
from utils.errors import UserError


def reduced_sizes(image_hw: np.ndarray, imgsz: int) -> np.ndarray:
    """Heights and widths int32 (N, 2) of source images, from those of the files. The shorter side rounds up."""
    sizes = image_hw.astype(np.int64)
    longest = sizes.max(axis=1, keepdims=True, initial=1)
    reduced = np.minimum(-(-sizes * imgsz // longest), imgsz)
    return np.where(longest > imgsz, reduced, sizes).astype(np.int32)


def read_source(path: str, image_hw: np.ndarray, source_hw: np.ndarray, complain: Complain | None = None) -> np.ndarray:
    """Decodes and reduces one image: uint8 (h, w, 3) RGB of size ``source_hw``. ``complain``: see `data.images`.

    Raises:
        UserError: the file cannot be decoded, or is no longer of the size ``image_hw`` that was indexed.
    """
    height, width = (int(v) for v in source_hw)
    image, stored_hw = read_reduced(path, (height, width), complain)
    if stored_hw != tuple(image_hw):
        raise UserError(
            f"{path}: is {stored_hw[1]}x{stored_hw[0]} pixels but was {image_hw[1]}x{image_hw[0]} when the data "
            f"set was indexed; it changed during the run: start again"
        )
    if image.shape[:2] == (height, width):
        return image
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
