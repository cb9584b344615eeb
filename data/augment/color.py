"""Random colour: hue, saturation and brightness, as one matrix on RGB columns."""

from __future__ import annotations

import math

import cv2
import numpy as np
from torch import Tensor

from data.augment.augmentation import PixelOperation

_RGB_TO_YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
_YIQ_TO_RGB = np.linalg.inv(_RGB_TO_YIQ)
_LUMA = np.outer(_YIQ_TO_RGB[:, 0], _RGB_TO_YIQ[0])
_CHROMA = np.outer(_YIQ_TO_RGB[:, 1], _RGB_TO_YIQ[1]) + np.outer(_YIQ_TO_RGB[:, 2], _RGB_TO_YIQ[2])
_QUARTER_TURN = np.outer(_YIQ_TO_RGB[:, 2], _RGB_TO_YIQ[1]) - np.outer(_YIQ_TO_RGB[:, 1], _RGB_TO_YIQ[2])


def color_matrices(jitter: np.ndarray) -> np.ndarray:
    """(P, 3, 3) for rows of hue, saturation and value (P, 3): a hue turn (part of the circle) and a saturation gain in
    YIQ, which keep the luma, then a brightness gain. Zeros give the identity, to rounding."""
    hue, saturation, value = jitter.T[:, :, None, None]
    turns = [2 * math.pi * h for h in hue.ravel().tolist()]
    # math's functions, which give a number the same bits at any position in a row
    cosine, sine = (np.array([f(t) for t in turns])[:, None, None] for f in (math.cos, math.sin))
    return (1 + value) * (_LUMA + (1 + saturation) * (cosine * _CHROMA + sine * _QUARTER_TURN))


class ColorJitter(PixelOperation):
    """``hsv_h``, ``hsv_s`` and ``hsv_v``. Parameters: a matrix, by rows."""

    name = "color"
    numbers = 3
    columns = slice(14, 17)

    @property
    def is_active(self) -> bool:
        return bool(self.hyp.hsv_h or self.hyp.hsv_s or self.hyp.hsv_v)

    def parameters(self, u: np.ndarray, canvas_hw: np.ndarray) -> np.ndarray:
        return color_matrices((2 * u - 1) * (self.hyp.hsv_h, self.hyp.hsv_s, self.hyp.hsv_v)).reshape(-1, 9)

    @staticmethod
    def apply_opencv(image: np.ndarray, parameters: np.ndarray, out: np.ndarray) -> np.ndarray:
        cv2.transform(image, parameters.reshape(3, 3), dst=out)
        return out

    @staticmethod
    def apply_torch(images: Tensor, parameters: Tensor) -> Tensor:
        columns = parameters.view(-1, 3, 3).transpose(1, 2)[:, :, None, None, :]  # (L, 3 from, 1, 1, 3 to)
        return images[..., 0:1] * columns[:, 0] + images[..., 1:2] * columns[:, 1] + images[..., 2:3] * columns[:, 2]
