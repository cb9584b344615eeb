"""Hue, saturation and brightness as one (3, 3) matrix on RGB columns."""

from __future__ import annotations

import math

import numpy as np

_RGB_TO_YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
_YIQ_TO_RGB = np.linalg.inv(_RGB_TO_YIQ)
_LUMA = np.outer(_YIQ_TO_RGB[:, 0], _RGB_TO_YIQ[0])
_CHROMA = np.outer(_YIQ_TO_RGB[:, 1], _RGB_TO_YIQ[1]) + np.outer(_YIQ_TO_RGB[:, 2], _RGB_TO_YIQ[2])
_QUARTER_TURN = np.outer(_YIQ_TO_RGB[:, 2], _RGB_TO_YIQ[1]) - np.outer(_YIQ_TO_RGB[:, 1], _RGB_TO_YIQ[2])


def colour_matrices(jitter: np.ndarray) -> np.ndarray:
    """(P, 3, 3) for rows of hue, saturation and value (P, 3): a hue turn (share of the circle) and a saturation gain in
    YIQ, which keep the luma, then a brightness gain. Zeros give the identity, to rounding."""
    hue, saturation, value = jitter.T[:, :, None, None]
    turns = [2 * math.pi * h for h in hue.ravel().tolist()]
    # math's functions, which give a number the same bits wherever it stands
    cosine, sine = (np.array([f(t) for t in turns])[:, None, None] for f in (math.cos, math.sin))
    return (1 + value) * (_LUMA + (1 + saturation) * (cosine * _CHROMA + sine * _QUARTER_TURN))
