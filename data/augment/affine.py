"""Random perspective, rotation, scale, shear, translation and flips: each a matrix.

Only sums, products and roundings of single numbers, and trigonometry from `math`: the products of small matrices that
linear algebra libraries make may round differently in a longer row.
"""

from __future__ import annotations

import math

import numpy as np

from data.augment.augmentation import GeometricTransform

MIN_SCALE = 0.05
# The horizon of a perspective draw stays at least this far away, in half-canvases, so that nothing folds over.
HORIZON = 1 / 0.6


class RandomPerspective(GeometricTransform):
    """``perspective``, ``degrees`` and ``scale``, then ``shear``, about the frame's centre, which lands near the
    canvas' centre, ``translate`` away."""

    name = "perspective"
    numbers = 8  # angle, scale, two shears, two translations, two perspective coefficients
    columns = slice(6, 14)

    def matrices(self, u: np.ndarray, from_wh: np.ndarray, canvas_wh: np.ndarray) -> np.ndarray:
        hyp, u = self.hyp, 2 * u - 1
        centre_x, centre_y = (from_wh / 2).T
        tilt_x, tilt_y = (u[:, 6:8] * hyp.perspective).T
        nearest = np.maximum((np.abs(tilt_x) * centre_x + np.abs(tilt_y) * centre_y) * HORIZON, 1.0)
        tilt_x, tilt_y = tilt_x / nearest, tilt_y / nearest
        angle = np.radians(u[:, 0] * hyp.degrees).tolist()
        slope = np.radians(u[:, 2:4] * hyp.shear).tolist()
        cosine, sine = (np.array([f(a) for a in angle]) for f in (math.cos, math.sin))
        shear_x, shear_y = np.array([(math.tan(a), math.tan(b)) for a, b in slope]).T
        scale = np.maximum(1 + u[:, 1] * hyp.scale, MIN_SCALE)
        matrix = np.empty((len(u), 3, 3))
        matrix[:, 2, 0], matrix[:, 2, 1] = tilt_x, tilt_y
        matrix[:, 2, 2] = 1 - (tilt_x * centre_x + tilt_y * centre_y)
        of_axes = (
            (scale * (cosine - shear_x * sine), scale * (sine + shear_x * cosine)),
            (scale * (shear_y * cosine - sine), scale * (shear_y * sine + cosine)),
        )
        for axis, (along_x, along_y) in enumerate(of_axes):
            target = (0.5 + u[:, 4 + axis] * hyp.translate) * canvas_wh[:, axis]
            offset = -(along_x * centre_x + along_y * centre_y)
            matrix[:, axis] = np.stack([along_x, along_y, offset], 1) + target[:, None] * matrix[:, 2]
        return matrix


class RandomFlip(GeometricTransform):
    """``fliplr`` and ``flipud``."""

    name = "flip"
    numbers = 2
    columns = slice(17, 19)

    def matrices(self, u: np.ndarray, from_wh: np.ndarray, canvas_wh: np.ndarray) -> np.ndarray:
        matrix = np.tile(np.eye(3), (len(u), 1, 1))
        for axis, probability in enumerate((self.hyp.fliplr, self.hyp.flipud)):
            is_flipped = u[:, axis] < probability
            matrix[is_flipped, axis, axis] = -1.0
            matrix[is_flipped, axis, 2] = canvas_wh[is_flipped, axis]
        return matrix


def composed(after: np.ndarray, before: np.ndarray) -> np.ndarray:
    """The products (P, 3, 3) of two rows of matrices."""
    left, right = after[:, :, :, None], before[:, None, :, :]
    return left[:, :, 0] * right[:, :, 0] + left[:, :, 1] * right[:, :, 1] + left[:, :, 2] * right[:, :, 2]
