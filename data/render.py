"""Plans to pixels and labels with OpenCV: each source image is resampled once, straight into the output canvas.

OpenCV's warps count pixel centres as integers, plans count pixel edges; `_centred` is the half-pixel between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import cv2
import numpy as np

from data.augment import Picture, SamplePlan, Tile, is_axis_aligned
from data.box_transform import project_points, to_normalised, transform_labels

GREY = 114
_POLYGON_BITS = 4  # sub-pixel bits of OpenCV's polygon filler


def render_plan(
    plan: SamplePlan,
    load: Callable[[int], np.ndarray],
    labels_of: Callable[[int], np.ndarray],
    place: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """One training picture.

    Args:
        plan: from `data.augment.draw_plan`, drawn for the very source sizes that ``load`` returns.
        load: image index to source image, uint8 (h, w, 3) RGB.
        labels_of: image index to float32 (n, 5) of class, cx, cy, w, h normalised to the image.
        place: uint8 (H, W, 3) that the last pass over the pixels may write to; then it is what is returned.

    Returns:
        uint8 (H, W, 3) and float32 (n, 5) normalised to the canvas.
    """
    own = place if len(plan.pictures) == 1 else None
    rendered = [_render_picture(picture, plan.canvas_hw, load, labels_of, own) for picture in plan.pictures]
    labels = np.concatenate([rows for _, rows in rendered])
    image = rendered[0][0]
    if len(rendered) == 2:
        image = cv2.addWeighted(image, plan.mix, rendered[1][0], 1 - plan.mix, 0, dst=place)
    return image, to_normalised(labels, plan.canvas_hw)


def _render_picture(
    picture: Picture,
    canvas_hw: tuple[int, int],
    load: Callable[[int], np.ndarray],
    labels_of: Callable[[int], np.ndarray],
    place: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    canvas = np.full((*canvas_hw, 3), GREY, np.uint8)
    sizes = []
    for tile in picture.tiles:
        source = load(tile.index)
        sizes.append(source.shape[:2])
        draw_tile(tile, source, canvas)
    if picture.colour is not None:
        canvas = cv2.transform(canvas, picture.colour, dst=place)
    return canvas, _labels_of_tiles(picture.tiles, sizes, canvas_hw, labels_of)


def plan_labels(plan: SamplePlan, source_hw: np.ndarray, labels_of: Callable[[int], np.ndarray]) -> np.ndarray:
    """The labels that `render_plan` returns, without pixels. ``source_hw``: int (N, 2) of all source images."""
    tiles = [tile for picture in plan.pictures for tile in picture.tiles]
    sizes = [source_hw[tile.index] for tile in tiles]
    return to_normalised(_labels_of_tiles(tiles, sizes, plan.canvas_hw, labels_of), plan.canvas_hw)


def _labels_of_tiles(
    tiles: Sequence[Tile],
    sizes: Sequence[tuple[int, int]],
    canvas_hw: tuple[int, int],
    labels_of: Callable[[int], np.ndarray],
) -> np.ndarray:
    return transform_labels(
        [labels_of(tile.index) for tile in tiles],
        source_hw=sizes,
        regions=[tile.region for tile in tiles],
        matrices=[tile.matrix for tile in tiles],
        canvas_hw=canvas_hw,
    )


def draw_tile(tile: Tile, source: np.ndarray, canvas: np.ndarray) -> None:
    """Paints one tile onto ``canvas`` uint8 (H, W, 3), in place; pixels outside the tile are left as they are."""
    x1, y1, x2, y2 = tile.region
    crop = source[y1:y2, x1:x2]
    if is_axis_aligned(tile.matrix):
        _resize_into(crop, tile, canvas)
    else:
        _warp_into(crop, tile, canvas)


def _resize_into(crop: np.ndarray, tile: Tile, canvas: np.ndarray) -> None:
    x1, y1, x2, y2 = tile.region
    corners = project_points(tile.matrix, np.array([[x1, y1], [x2, y2]], np.float64))
    (start_x, start_y), (end_x, end_y) = np.rint(corners).astype(int).tolist()
    mirrored = (end_x < start_x, end_y < start_y)
    left, right, top, bottom = *sorted((start_x, end_x)), *sorted((start_y, end_y))
    if any(mirrored):
        crop = cv2.flip(crop, {(True, False): 1, (False, True): 0, (True, True): -1}[mirrored])
    height, width = canvas.shape[:2]
    if top >= 0 and left >= 0 and bottom <= height and right <= width:
        resize(crop, right - left, bottom - top, canvas[top:bottom, left:right])
        return
    piece = resize(crop, right - left, bottom - top)
    canvas[max(top, 0) : bottom, max(left, 0) : right] = piece[
        max(-top, 0) : height - top, max(-left, 0) : width - left
    ]


def resize(image: np.ndarray, width: int, height: int, target: np.ndarray | None = None) -> np.ndarray:
    """Bilinear, or by area where both sides shrink to half or less, which bilinear would alias.

    ``target``, uint8 (height, width, 3) and perhaps a part of a larger picture, takes the result if it is given.
    """
    if image.shape[:2] == (height, width):
        if target is None:
            return image
        target[:] = image
        return target
    by_area = image.shape[0] >= 2 * height and image.shape[1] >= 2 * width
    method = cv2.INTER_AREA if by_area else cv2.INTER_LINEAR
    return cv2.resize(image, (width, height), dst=target, interpolation=method)


def _warp_into(crop: np.ndarray, tile: Tile, canvas: np.ndarray) -> None:
    height, width = crop.shape[:2]
    matrix = tile.matrix @ _shift(*tile.region[:2])
    outline = project_points(matrix, np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float64))
    left, top = np.floor(outline.min(0)).clip(0).astype(int).tolist()
    right, bottom = np.ceil(outline.max(0)).clip(None, (canvas.shape[1], canvas.shape[0])).astype(int).tolist()
    if right <= left or bottom <= top:
        return
    crop, matrix = _shrunk(crop, matrix)
    matrix = _centred(_shift(-left, -top) @ matrix)
    size = (right - left, bottom - top)
    options = {"flags": cv2.INTER_LINEAR, "borderMode": cv2.BORDER_REPLICATE}
    if matrix[2, 0] == matrix[2, 1] == 0:
        piece = cv2.warpAffine(crop, matrix[:2] / matrix[2, 2], size, **options)
    else:
        piece = cv2.warpPerspective(crop, matrix, size, **options)
    mask = np.zeros((size[1], size[0]), np.uint8)
    polygon = np.rint((outline - (left, top) - 0.5) * 2**_POLYGON_BITS).astype(np.int32)
    cv2.fillConvexPoly(mask, polygon, 255, shift=_POLYGON_BITS)
    cv2.copyTo(piece, mask, canvas[top:bottom, left:right])


def _shrunk(crop: np.ndarray, matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The crop reduced by a whole factor where the warp would shrink it to half or less, and its matrix."""
    height, width = crop.shape[:2]
    centre = np.array([[width / 2, height / 2], [width / 2 + 1, height / 2], [width / 2, height / 2 + 1]])
    origin, along_x, along_y = project_points(matrix, centre)
    scale = math.sqrt(abs(float(np.linalg.det(np.stack([along_x - origin, along_y - origin])))))
    factor = int(1 / max(scale, 1e-3))
    if factor < 2:
        return crop, matrix
    small_w, small_h = max(width // factor, 1), max(height // factor, 1)
    small = cv2.resize(crop, (small_w, small_h), interpolation=cv2.INTER_AREA)
    return small, matrix @ np.diag([width / small_w, height / small_h, 1.0])


def _shift(x: float, y: float) -> np.ndarray:
    return np.array([[1.0, 0.0, x], [0.0, 1.0, y], [0.0, 0.0, 1.0]])


def _centred(matrix: np.ndarray) -> np.ndarray:
    return _shift(-0.5, -0.5) @ matrix @ _shift(0.5, 0.5)


class Letterbox(NamedTuple):
    """How an image is fitted into a canvas: canvas pixels = original pixels * gain + pad, for each axis.

    The gains differ a little, since either side of the resized image is a whole number of pixels.
    """

    width: int  # of the resized image, pixels
    height: int
    pad_x: int
    pad_y: int
    gain_x: float
    gain_y: float


def fit_letterbox(image_hw: tuple[int, int], canvas_hw: tuple[int, int], longest: int | None = None) -> Letterbox:
    """The largest centred fit of an image into a canvas, its longer side at most ``longest`` pixels.

    Sizes round up and an odd pixel of padding goes right and below, as in the published evaluations of YOLO models.
    """
    height, width = (int(v) for v in image_hw)
    limits = [(canvas_hw[0], height), (canvas_hw[1], width)]
    if longest is not None:
        limits.append((longest, max(height, width)))
    numerator, denominator = min(limits, key=lambda limit: limit[0] / limit[1])
    new_h = min(-(-height * numerator // denominator), canvas_hw[0])
    new_w = min(-(-width * numerator // denominator), canvas_hw[1])
    pad_x, pad_y = (round((total - used) / 2 - 0.1) for total, used in ((canvas_hw[1], new_w), (canvas_hw[0], new_h)))
    return Letterbox(new_w, new_h, pad_x, pad_y, new_w / width, new_h / height)


def letterbox(image: np.ndarray, canvas_hw: tuple[int, int], fit: Letterbox) -> np.ndarray:
    """Resizes bilinearly and pads with grey: uint8 (H, W, 3)."""
    if image.shape[:2] != (fit.height, fit.width):
        image = cv2.resize(image, (fit.width, fit.height), interpolation=cv2.INTER_LINEAR)
    canvas = np.full((*canvas_hw, 3), GREY, np.uint8)
    canvas[fit.pad_y : fit.pad_y + fit.height, fit.pad_x : fit.pad_x + fit.width] = image
    return canvas
