"""Augmentations, one class each, and the streams of their random numbers.

A `GeometricTransform` draws a matrix, and the renderers apply the product of all of them. A `PixelOperation` draws
parameters, and has an OpenCV and a torch form. `data.augment.plan` lists the classes of both kinds. In no
list are Mosaic and MixUp, which choose and join images before them (mosaic.py), and the user's albumentations, which
change rendered pixels after them (`data.render.user_transforms`).

Arithmetic is elementwise, and trigonometry uses `math`: matrix products of linear algebra libraries and NumPy's
trigonometry may round differently in longer arrays.

Frames: "source" means continuous pixel coordinates of the source image, where pixel i covers [i, i + 1); "canvas" means
the same for the rendered image.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import cv2
import numpy as np
from torch import Tensor

from utils.batches import SampleKey
from utils.boxes import area_xyxy, clip_xyxy
from utils.config.settings import Hyperparameters
from utils.rng import Stream, keyed_uniforms, named_stream

# Boxes are dropped below these limits, or above this aspect.
MIN_VISIBLE_SIDE_PX = 2.0
MIN_VISIBLE_FRACTION = 0.1
MAX_ASPECT = 100.0

MIN_SCALE = 0.05
# Minimum distance of a perspective transform's horizon, in half-canvases, which keeps the image from folding over.
HORIZON = 1 / 0.6

_RGB_TO_YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
_YIQ_TO_RGB = np.linalg.inv(_RGB_TO_YIQ)
_LUMA = np.outer(_YIQ_TO_RGB[:, 0], _RGB_TO_YIQ[0])
_CHROMA = np.outer(_YIQ_TO_RGB[:, 1], _RGB_TO_YIQ[1]) + np.outer(_YIQ_TO_RGB[:, 2], _RGB_TO_YIQ[2])
_QUARTER_TURN = np.outer(_YIQ_TO_RGB[:, 2], _RGB_TO_YIQ[1]) - np.outer(_YIQ_TO_RGB[:, 1], _RGB_TO_YIQ[2])


class SharedColumns:
    """Columns of the random stream that the built-in augmentations share.

    The numbers of a sample's first layer come first, then as many of a second layer to mix in, then those of the
    mixing. All are always drawn, so that a change of one probability affects no other choice.
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

    Built-in ones own `columns` of a shared random stream. The name of any other determines a stream of its own, so a
    new augmentation does not change the numbers of the others.
    """

    name: ClassVar[str]
    num_uniforms: ClassVar[int]  # random numbers per layer
    columns: ClassVar[slice | None] = None  # columns in the shared stream; None for a stream of its own

    def __init__(self, hyp: Hyperparameters) -> None:
        self.hyp = hyp


class GeometricTransform(Augmentation, ABC):
    """Base class of augmentations that move pixels."""

    @abstractmethod
    def matrices(self, uniforms: np.ndarray, from_wh: np.ndarray, canvas_wh: np.ndarray) -> np.ndarray:
        """Returns matrices (L, 3, 3) from frames of sizes ``from_wh`` (L, 2) to canvases ``canvas_wh`` (L, 2).

        The sizes differ for the first transform only. ``uniforms``: (L, `num_uniforms`) in [0, 1).
        """

    def anneal(self, uniforms: np.ndarray, scale_range: np.ndarray) -> np.ndarray:
        """Narrows the random numbers of the scale in the last epochs of a run (``close_scale``).

        ``scale_range``: float64 (L,), fraction of the scale's range to draw from, 1 before these epochs. Only
        transforms that scale depend on it.
        """
        return uniforms


class PixelOperation(Augmentation, ABC):
    """Base class of augmentations that change pixel values."""

    @property
    @abstractmethod
    def is_active(self) -> bool:
        """Whether the hyper-parameters enable the operation."""

    @abstractmethod
    def parameters(self, uniforms: np.ndarray, canvas_hw: np.ndarray) -> np.ndarray:
        """Returns (L, k) for ``uniforms`` (L, `num_uniforms`) in [0, 1) and canvas sizes ``canvas_hw`` int (L, 2)."""

    @staticmethod
    @abstractmethod
    def apply_opencv(image: np.ndarray, parameters: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Applies one layer's ``parameters`` (k,) to ``image`` uint8 (H, W, 3).

        Returns ``image``, changed in place, or ``out``, of the same shape, filled with the result.
        """

    @staticmethod
    @abstractmethod
    def apply_torch(images: Tensor, parameters: Tensor) -> Tensor:
        """Applies ``parameters`` float32 (L, k) to ``images`` float32 (L, H, W, 3) with values from 0 to 255.

        The result may exceed that range. Must be elementwise, so that an image does not depend on its batch.
        """


class RandomStreams:
    """The random numbers for the layers of a batch, which depend only on the seed and the samples' keys.

    The first layer of each key comes first, then the second layers of the samples that are mixed.
    """

    def __init__(self, seed: int, keys: Sequence[SampleKey]) -> None:
        self.seed = seed
        self._positions = [(key.epoch, key.position) for key in keys]
        self._shared = keyed_uniforms(seed, Stream.AUGMENT, self._positions, SharedColumns.COUNT)

    @property
    def mixing_uniforms(self) -> np.ndarray:
        """(n, 2) in [0, 1) for each key, which decide whether it has a second layer, and choose its image."""
        return self._shared[:, SharedColumns.MIXUP]

    def layer_uniforms(self, augmentation: Augmentation, mixed: list[int]) -> np.ndarray:
        """Returns the numbers of an augmentation, (L, `Augmentation.num_uniforms`) in [0, 1).

        ``mixed``: positions of the keys whose samples have a second layer.
        """
        columns = augmentation.columns
        count = augmentation.num_uniforms
        if columns is not None:
            first_layers = self._shared[:, SharedColumns.FIRST_LAYER]
            second_layers = self._shared[mixed, SharedColumns.SECOND_LAYER]
            return np.concatenate([first_layers[:, columns], second_layers[:, columns]])
        rows = keyed_uniforms(self.seed, named_stream(augmentation.name), self._positions, 2 * count)
        return np.concatenate([rows[:, :count], rows[mixed, count:]])


class RandomPerspective(GeometricTransform):
    """Applies ``perspective``, ``degrees`` and ``scale``, then ``shear``, about the frame's center.

    The center moves to the canvas' center, and by up to ``translate`` from there.
    """

    name = "perspective"
    num_uniforms = 8
    columns = SharedColumns.PERSPECTIVE
    _ANGLE = 0  # columns of its numbers; pairs are x and y
    _SCALE = 1
    _SHEAR = slice(2, 4)
    _TRANSLATE = slice(4, 6)
    _TILT = slice(6, 8)

    def anneal(self, uniforms: np.ndarray, scale_range: np.ndarray) -> np.ndarray:
        """Narrows the range of the scale before the run ends.

        Gray borders, which only shrunk images have, tell the model the scale: boxes would be too small on letterboxed
        images and too large on others (compare Touvron et al. 2019, "Fixing the train-test resolution discrepancy").
        """
        narrowed = uniforms.copy()
        scale = uniforms[:, self._SCALE]  # 0.5, the middle of its range, keeps the size
        narrowed[:, self._SCALE] = np.where(scale_range < 1, 0.5 + (scale - 0.5) * scale_range, scale)
        return narrowed

    def matrices(self, uniforms: np.ndarray, from_wh: np.ndarray, canvas_wh: np.ndarray) -> np.ndarray:
        hyp = self.hyp
        jitter = 2 * uniforms - 1
        center_x, center_y = (from_wh / 2).T
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

    def matrices(self, uniforms: np.ndarray, from_wh: np.ndarray, canvas_wh: np.ndarray) -> np.ndarray:
        matrix = np.tile(np.eye(3), (len(uniforms), 1, 1))
        for axis, probability in enumerate((self.hyp.fliplr, self.hyp.flipud)):
            is_flipped = uniforms[:, axis] < probability
            matrix[is_flipped, axis, axis] = -1.0
            matrix[is_flipped, axis, 2] = canvas_wh[is_flipped, axis]
        return matrix


class ColorJitter(PixelOperation):
    """Changes colors by ``hsv_h``, ``hsv_s`` and ``hsv_v``. Parameters: a (3, 3) matrix, row by row."""

    name = "color"
    num_uniforms = 3
    columns = SharedColumns.COLOR

    @property
    def is_active(self) -> bool:
        return bool(self.hyp.hsv_h or self.hyp.hsv_s or self.hyp.hsv_v)

    def parameters(self, uniforms: np.ndarray, canvas_hw: np.ndarray) -> np.ndarray:
        return color_matrices((2 * uniforms - 1) * (self.hyp.hsv_h, self.hyp.hsv_s, self.hyp.hsv_v)).reshape(-1, 9)

    @staticmethod
    def apply_opencv(image: np.ndarray, parameters: np.ndarray, out: np.ndarray) -> np.ndarray:
        cv2.transform(image, parameters.reshape(3, 3), dst=out)
        return out

    @staticmethod
    def apply_torch(images: Tensor, parameters: Tensor) -> Tensor:
        columns = parameters.view(-1, 3, 3).transpose(1, 2)[:, :, None, None, :]  # (L, 3 from, 1, 1, 3 to)
        return images[..., 0:1] * columns[:, 0] + images[..., 1:2] * columns[:, 1] + images[..., 2:3] * columns[:, 2]


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


def is_worth_keeping(visible_xyxy: np.ndarray, full_area: np.ndarray) -> np.ndarray:
    """Returns which boxes are large enough, not too thin, and show enough of their full area: bool (n,)."""
    width = visible_xyxy[:, 2] - visible_xyxy[:, 0]
    height = visible_xyxy[:, 3] - visible_xyxy[:, 1]
    big_enough = (width >= MIN_VISIBLE_SIDE_PX) & (height >= MIN_VISIBLE_SIDE_PX)
    not_too_thin = np.maximum(width, height) <= MAX_ASPECT * np.minimum(width, height)
    seen_enough = area_xyxy(visible_xyxy) >= MIN_VISIBLE_FRACTION * full_area
    return big_enough & not_too_thin & seen_enough


def transform_labels(
    labels: np.ndarray,
    patch: np.ndarray,
    *,
    source_hw: np.ndarray,
    regions: np.ndarray,
    matrices: np.ndarray,
    canvas_hw: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Maps the labels of M patches to the canvas, as the hulls of their corners, clipped to it.

    The result for a label does not depend on the others.

    Args:
        labels: float (n, 5) of class, cx, cy, w, h normalized to the source image.
        patch: int (n,), patch of each label.
        source_hw: (M, 2), sizes of the patches' source images, pixels.
        regions: (M, 4), rendered region of each patch, x1, y1, x2, y2 in source pixels.
        matrices: (M, 3, 3), from source to canvas.
        canvas_hw: (M, 2), sizes of their canvases, pixels, or (2,), one size for all.

    Returns:
        float64 (m, 5) of class, x1, y1, x2, y2 in canvas pixels, for the labels that are kept, in their order; and
        the patch of each, (m,).
    """
    rows = labels.astype(np.float64)
    source_wh = np.asarray(source_hw, np.float64)[patch, ::-1]
    region = np.asarray(regions, np.float64)[patch]
    matrix = np.asarray(matrices)[patch]
    center = rows[:, 1:3] * source_wh
    half = rows[:, 3:5] * (source_wh / 2)
    low = center - half
    high = center + half
    region_low = low.clip(region[:, :2], region[:, 2:])
    region_high = high.clip(region[:, :2], region[:, 2:])
    height, width = np.broadcast_to(canvas_hw, (len(matrices), 2))[patch].T
    visible = clip_xyxy(project_boxes(matrix, region_low, region_high), width, height)
    keep = is_worth_keeping(visible, area_xyxy(project_boxes(matrix, low, high)))
    keep |= (rows[:, 0] < 0) & (area_xyxy(visible) > 0)  # keeps any visible piece of an ignore region
    return np.concatenate([rows[:, :1], visible], 1)[keep], patch[keep]


def to_normalized(labels_xyxy: np.ndarray, canvas_hw: np.ndarray | tuple[int, int]) -> np.ndarray:
    """Converts class, x1, y1, x2, y2 (n, 5) in canvas pixels to class, cx, cy, w, h normalized, float32 (n, 5).

    ``canvas_hw``: (2,), or (n, 2) for each row.
    """
    canvas_wh = np.asarray(canvas_hw)[..., ::-1]
    rows = np.empty((len(labels_xyxy), 5), np.float32)
    rows[:, 0] = labels_xyxy[:, 0]
    rows[:, 1:3] = (labels_xyxy[:, 1:3] + labels_xyxy[:, 3:5]) / 2 / canvas_wh
    rows[:, 3:5] = (labels_xyxy[:, 3:5] - labels_xyxy[:, 1:3]) / canvas_wh
    return rows
