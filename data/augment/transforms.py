"""Augmentations of single images, one class each, and the matrices that they draw.

A `GeometricTransform` draws a matrix, and the renderer applies the product of all of them. A `PixelOperation` draws
parameters and changes rendered pixels. `data.augment.plan` lists the classes of both kinds. The lists do not include
Mosaic and MixUp, which choose and join images beforehand (mosaic.py), or the user's albumentations, which change
rendered pixels afterwards (`data.render.user_transforms`).

Arithmetic is elementwise, and trigonometry uses `math`: matrix products of linear algebra libraries and NumPy's
trigonometry may round differently in longer arrays.

Coordinates are continuous: pixel i covers [i, i + 1). "source" means those of the source image, "canvas" those of the
rendered image, and "frame" those of what images are pasted on: the canvas or, for a mosaic, a picture of twice its
size. All matrices are homogeneous, float64 (3, 3).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import cv2
import numpy as np

from utils.config.settings import Hyperparameters

MIN_SCALE = 0.05
# Minimum distance of a perspective transform's horizon, in half-frames, which keeps the image from folding over.
HORIZON = 1 / 0.6

_RGB_TO_YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
_YIQ_TO_RGB = np.linalg.inv(_RGB_TO_YIQ)
_LUMA = np.outer(_YIQ_TO_RGB[:, 0], _RGB_TO_YIQ[0])
_CHROMA = np.outer(_YIQ_TO_RGB[:, 1], _RGB_TO_YIQ[1]) + np.outer(_YIQ_TO_RGB[:, 2], _RGB_TO_YIQ[2])
_QUARTER_TURN = np.outer(_YIQ_TO_RGB[:, 2], _RGB_TO_YIQ[1]) - np.outer(_YIQ_TO_RGB[:, 1], _RGB_TO_YIQ[2])


class SharedColumns:
    """Columns of the random stream that the built-in augmentations share.

    The numbers of a sample's first layer come first, then as many for a second layer, then the mixing numbers. All are
    always drawn, so that changing one probability affects no other choice.
    """

    MOSAIC = slice(0, 6)
    PERSPECTIVE = slice(6, 14)
    COLOR = slice(14, 17)
    FLIP = slice(17, 19)
    FIRST_LAYER = slice(0, 19)
    SECOND_LAYER = slice(19, 38)
    MIXUP = slice(38, 40)
    COUNT = 40


class Augmentation:
    """Base class of all augmentations.

    Built-in augmentations use fixed `columns` of a shared random stream. Any other augmentation draws from its own
    stream, seeded by its name, so adding one does not change the numbers of the others.
    """

    name: ClassVar[str]
    num_uniforms: ClassVar[int]  # random numbers per layer
    columns: ClassVar[slice | None] = None  # columns in the shared stream; None for a stream of its own

    def __init__(self, hyp: Hyperparameters) -> None:
        self.hyp = hyp


class GeometricTransform(Augmentation, ABC):
    """Base class of augmentations that move pixels."""

    @abstractmethod
    def matrices(self, uniforms: np.ndarray, frame_wh: np.ndarray, canvas_wh: np.ndarray) -> np.ndarray:
        """Returns matrices (L, 3, 3) from frames of sizes ``frame_wh`` (L, 2) to canvases ``canvas_wh`` (L, 2).

        After the first transform, frames are canvases. ``uniforms``: (L, `num_uniforms`) in [0, 1).
        """

    def anneal(self, uniforms: np.ndarray, scale_range: np.ndarray) -> np.ndarray:
        """Narrows the random numbers of the scale in the last epochs of a run (``close_scale``).

        ``scale_range``: float64 (L,), fraction of the scale's range to draw from, 1 before these epochs. Transforms
        that do not scale ignore it.
        """
        return uniforms


class PixelOperation(Augmentation, ABC):
    """Base class of augmentations that change pixel values."""

    color_settings: ClassVar[tuple[str, ...]] = ()  # hyper-parameters of an operation that needs RGB images

    @property
    @abstractmethod
    def is_active(self) -> bool:
        """Whether the hyper-parameters enable the operation."""

    @abstractmethod
    def parameters(self, uniforms: np.ndarray, canvas_hw: np.ndarray) -> np.ndarray:
        """Returns (L, k) for ``uniforms`` (L, `num_uniforms`) in [0, 1) and canvas sizes ``canvas_hw`` int (L, 2)."""

    @staticmethod
    @abstractmethod
    def apply(image: np.ndarray, parameters: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Applies one layer's ``parameters`` (k,) to ``image`` (H, W, channels), uint8 or uint16; three are RGB.

        Returns ``image``, changed in place, or ``out``, of the same shape, filled with the result.
        """


class RandomPerspective(GeometricTransform):
    """Applies ``perspective``, ``degrees`` and ``scale``, then ``shear``, about the frame's center.

    The center moves to the canvas' center, and by up to ``translate`` from there.
    """

    name = "perspective"
    num_uniforms = 8
    columns = SharedColumns.PERSPECTIVE
    _ANGLE = 0  # columns of the random numbers; pairs are x and y
    _SCALE = 1
    _SHEAR = slice(2, 4)
    _TRANSLATE = slice(4, 6)
    _TILT = slice(6, 8)

    def anneal(self, uniforms: np.ndarray, scale_range: np.ndarray) -> np.ndarray:
        """Narrows the range of the scale before the run ends.

        Gray borders, which only shrunk images have, reveal the scale to the model, which would then predict boxes too
        small on letterboxed images and too large on others (compare Touvron et al. 2019, "Fixing the train-test
        resolution discrepancy").
        """
        narrowed = uniforms.copy()
        scale = uniforms[:, self._SCALE]  # 0.5, the middle of its range, keeps the size
        narrowed[:, self._SCALE] = np.where(scale_range < 1, 0.5 + (scale - 0.5) * scale_range, scale)
        return narrowed

    def matrices(self, uniforms: np.ndarray, frame_wh: np.ndarray, canvas_wh: np.ndarray) -> np.ndarray:
        hyp = self.hyp
        jitter = 2 * uniforms - 1
        center_x, center_y = (frame_wh / 2).T
        tilt_x, tilt_y = (jitter[:, self._TILT] * hyp.perspective).T
        nearest = np.maximum((np.abs(tilt_x) * center_x + np.abs(tilt_y) * center_y) * HORIZON, 1.0)
        tilt_x = tilt_x / nearest
        tilt_y = tilt_y / nearest
        angle = np.radians(jitter[:, self._ANGLE] * hyp.degrees).tolist()
        slope = np.radians(jitter[:, self._SHEAR] * hyp.shear).tolist()
        cosine = np.array([math.cos(a) for a in angle])
        sine = np.array([math.sin(a) for a in angle])
        shear_x, shear_y = np.array([(math.tan(a), math.tan(b)) for a, b in slope]).T
        translation = jitter[:, self._TRANSLATE]
        scale = np.maximum(1 + jitter[:, self._SCALE] * hyp.scale, MIN_SCALE)
        matrix = np.empty((len(jitter), 3, 3))
        matrix[:, 2, 0] = tilt_x
        matrix[:, 2, 1] = tilt_y
        matrix[:, 2, 2] = 1 - (tilt_x * center_x + tilt_y * center_y)
        linear_rows = (
            (scale * (cosine - shear_x * sine), scale * (sine + shear_x * cosine)),
            (scale * (shear_y * cosine - sine), scale * (shear_y * sine + cosine)),
        )
        for axis, (along_x, along_y) in enumerate(linear_rows):
            target = (0.5 + translation[:, axis] * hyp.translate) * canvas_wh[:, axis]
            offset = -(along_x * center_x + along_y * center_y)
            matrix[:, axis] = np.stack([along_x, along_y, offset], 1) + target[:, None] * matrix[:, 2]
        return matrix


class RandomFlip(GeometricTransform):
    """Mirrors layers with the probabilities ``fliplr`` and ``flipud``."""

    name = "flip"
    num_uniforms = 2
    columns = SharedColumns.FLIP

    def matrices(self, uniforms: np.ndarray, frame_wh: np.ndarray, canvas_wh: np.ndarray) -> np.ndarray:
        matrix = np.tile(np.eye(3), (len(uniforms), 1, 1))
        for axis, probability in enumerate((self.hyp.fliplr, self.hyp.flipud)):
            is_flipped = uniforms[:, axis] < probability
            matrix[is_flipped, axis, axis] = -1.0
            matrix[is_flipped, axis, 2] = canvas_wh[is_flipped, axis]
        return matrix


class ColorJitter(PixelOperation):
    """Changes colors of RGB images by ``hsv_h``, ``hsv_s`` and ``hsv_v``. Parameters: a (3, 3) matrix, row by row."""

    name = "color"
    num_uniforms = 3
    columns = SharedColumns.COLOR
    color_settings = ("hsv_h", "hsv_s", "hsv_v")

    @property
    def is_active(self) -> bool:
        return bool(self.hyp.hsv_h or self.hyp.hsv_s or self.hyp.hsv_v)

    def parameters(self, uniforms: np.ndarray, canvas_hw: np.ndarray) -> np.ndarray:
        return color_matrices((2 * uniforms - 1) * (self.hyp.hsv_h, self.hyp.hsv_s, self.hyp.hsv_v)).reshape(-1, 9)

    @staticmethod
    def apply(image: np.ndarray, parameters: np.ndarray, out: np.ndarray) -> np.ndarray:
        cv2.transform(image, parameters.reshape(3, 3), dst=out)
        return out


def color_matrices(jitter: np.ndarray) -> np.ndarray:
    """Returns color matrices (L, 3, 3) for rows of hue, saturation and value (L, 3).

    A matrix rotates the hue (fraction of the circle) and scales the saturation in YIQ, which keeps the luma, then
    scales the brightness. Zeros give the identity, up to rounding.
    """
    hue, saturation, value = jitter.T[:, :, None, None]
    angles = [2 * math.pi * turn for turn in hue.ravel().tolist()]
    cosine = np.array([math.cos(angle) for angle in angles])[:, None, None]
    sine = np.array([math.sin(angle) for angle in angles])[:, None, None]
    return (1 + value) * (_LUMA + (1 + saturation) * (cosine * _CHROMA + sine * _QUARTER_TURN))


def project_points(matrix: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Maps points (..., 2) with a homogeneous matrix (3, 3)."""
    mapped = points @ matrix[:, :2].T + matrix[:, 2]
    return mapped[..., :2] / mapped[..., 2:]


def are_axis_aligned(matrices: np.ndarray) -> np.ndarray:
    """Returns whether each (3, 3) matrix only scales, mirrors and moves, so that a resize can render it: bool (n,)."""
    return np.logical_not(matrices[:, (0, 1, 2, 2), (1, 0, 0, 1)].any(1))


def project_boxes(matrices: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Projects boxes, each with a (3, 3) matrix and two corners (x, y); returns their axis-aligned hulls (n, 4)."""
    if are_axis_aligned(matrices).all():
        scale = matrices[:, (0, 1), (0, 1)]
        shift = matrices[:, :2, 2]
        ends = np.stack([low * scale + shift, high * scale + shift]) / matrices[:, 2, 2, None]
        return np.concatenate([ends.min(0), ends.max(0)], 1)
    corner_x = np.stack([low[:, 0], high[:, 0], high[:, 0], low[:, 0]])  # (4, n)
    corner_y = np.stack([low[:, 1], low[:, 1], high[:, 1], high[:, 1]])
    mapped = [matrices[:, row, 0] * corner_x + matrices[:, row, 1] * corner_y + matrices[:, row, 2] for row in range(3)]
    x = mapped[0] / mapped[2]
    y = mapped[1] / mapped[2]
    return np.stack([x.min(0), y.min(0), x.max(0), y.max(0)], 1)
