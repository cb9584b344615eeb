"""Augmentation parameters, drawn from a sample key alone; no pixel is touched here.

A plan says which source images appear, which part of each, and the one matrix that takes it straight to the output
canvas: placement in the mosaic, random affine, perspective and flips are composed beforehand. The two-step picture
that this equals is the classic one (Bochkovskiy et al. 2020): paste four images around a random centre of a canvas of
twice the size, then cut a randomly transformed window out of it.

Frames: see `data.box_transform`. All matrices are float64 (3, 3) and act on continuous pixel coordinates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from data.box_transform import project_points
from utils.config import Hyperparameters
from utils.rng import Stream, keyed_generator
from utils.structures import SampleKey

Region = tuple[int, int, int, int]  # x1, y1, x2, y2 in source pixels

MIN_SCALE = 0.05
# The horizon of a perspective draw stays at least this far away, in half-canvases, so that nothing folds over.
HORIZON = 1 / 0.6
MIXUP_BETA = 32.0
_RGB_TO_YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
_YIQ_TO_RGB = np.linalg.inv(_RGB_TO_YIQ)


@dataclass(frozen=True, slots=True)
class Tile:
    """One source image's place on the canvas."""

    index: int  # image in the data set
    region: Region  # the part that is rendered
    matrix: np.ndarray  # (3, 3) source to canvas


@dataclass(frozen=True, slots=True)
class Picture:
    """Tiles in painting order over a grey canvas, then colour."""

    tiles: tuple[Tile, ...]
    colour: np.ndarray | None  # (3, 3) on RGB columns; None leaves pixels untouched


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """One picture, or two to be mixed."""

    canvas_hw: tuple[int, int]
    pictures: tuple[Picture, ...]
    mix: float  # share of the first picture


def draw_plan(
    key: SampleKey,
    *,
    source_hw: np.ndarray,
    hyp: Hyperparameters,
    seed: int,
    epochs: int,
    single_image: bool = False,
) -> SamplePlan:
    """The parameters of one training sample: a function of its arguments, equal on every rank, worker and restart.

    Args:
        key: the sample.
        source_hw: int (N, 2), height and width of every source image as the renderer will be given it.
        hyp: probabilities and ranges.
        seed: of the run.
        epochs: of the whole run; the last ``hyp.close_mosaic`` have neither mosaic nor mixup.
        single_image: never mosaic or mixup (rectangular batches, whose canvas fits one image's aspect).
    """
    rng = keyed_generator(seed, Stream.AUGMENT, key.epoch, key.position)
    combine = not single_image and key.epoch < epochs - hyp.close_mosaic
    first = _draw_picture(rng, key.index, key, source_hw, hyp, combine)
    if not (combine and rng.random() < hyp.mixup):
        return SamplePlan(key.canvas_hw, (first,), 1.0)
    share = float(rng.beta(MIXUP_BETA, MIXUP_BETA))
    (partner,) = _draw_partners(rng, key.index, key.block, len(source_hw), 1)
    second = _draw_picture(rng, partner, key, source_hw, hyp, combine)
    return SamplePlan(key.canvas_hw, (first, second), share)


def _draw_picture(
    rng: np.random.Generator,
    index: int,
    key: SampleKey,
    source_hw: np.ndarray,
    hyp: Hyperparameters,
    combine: bool,
) -> Picture:
    # Every number is drawn whether it is used or not: a changed probability then leaves the other choices alone.
    is_mosaic = bool(rng.random() < hyp.mosaic) and combine
    partners = _draw_partners(rng, index, key.block, len(source_hw), 3)
    centre_u = rng.uniform(0.5, 1.5, size=2)
    affine_u = rng.uniform(-1, 1, size=8)
    colour_u = rng.uniform(-1, 1, size=3)
    flip_u = rng.random(2)

    canvas_hw = height, width = key.canvas_hw
    if is_mosaic:
        frame_hw = (2 * height, 2 * width)
        centre = (int(centre_u[0] * width), int(centre_u[1] * height))
        members = [index, *partners]
        placements = [_mosaic_placement(slot, centre, source_hw[m], canvas_hw) for slot, m in enumerate(members)]
    else:
        frame_hw = canvas_hw
        members = [index]
        placements = [_centred_placement(source_hw[index], canvas_hw)]
    outer = _flip_matrix(flip_u, hyp, canvas_hw) @ _affine_matrix(affine_u, hyp, frame_hw, canvas_hw)
    tiles = [
        _make_tile(member, tuple(source_hw[member]), place, frame_hw, outer, canvas_hw)
        for member, place in zip(members, placements)
    ]
    return Picture(
        tuple(t for t in tiles if t is not None), colour_matrix(*(colour_u * (hyp.hsv_h, hyp.hsv_s, hyp.hsv_v)))
    )


def _draw_partners(rng: np.random.Generator, index: int, block: tuple[int, ...], images: int, count: int) -> list[int]:
    """Images to be combined with ``index``: any of all, or without repetition, while there are enough, of its block."""
    if not block:
        return rng.integers(images, size=count).tolist()
    others = [i for i in block if i != index] or [index]
    return [others[p % len(others)] for p in rng.permutation(max(len(others), count))[:count].tolist()]


def _fitted_size(source_hw: np.ndarray, canvas_hw: tuple[int, int]) -> tuple[int, int]:
    """Width and height of the source scaled to just fit the canvas."""
    source_h, source_w = int(source_hw[0]), int(source_hw[1])
    gain = min(canvas_hw[0] / source_h, canvas_hw[1] / source_w)
    return max(round(source_w * gain), 1), max(round(source_h * gain), 1)


def _mosaic_placement(slot: int, centre: tuple[int, int], source_hw: np.ndarray, canvas_hw: tuple[int, int]):
    """(x, y, width, height) on the double canvas; slots run left to right, top to bottom, and meet at the centre."""
    width, height = _fitted_size(source_hw, canvas_hw)
    x = centre[0] - width if slot % 2 == 0 else centre[0]
    y = centre[1] - height if slot < 2 else centre[1]
    return x, y, width, height


def _centred_placement(source_hw: np.ndarray, canvas_hw: tuple[int, int]):
    width, height = _fitted_size(source_hw, canvas_hw)
    return (canvas_hw[1] - width) // 2, (canvas_hw[0] - height) // 2, width, height


def _translation(x: float, y: float) -> np.ndarray:
    return np.array([[1.0, 0.0, x], [0.0, 1.0, y], [0.0, 0.0, 1.0]])


def _affine_matrix(
    u: np.ndarray, hyp: Hyperparameters, frame_hw: tuple[int, int], canvas_hw: tuple[int, int]
) -> np.ndarray:
    """From the frame (the mosaic's double canvas, or the canvas itself) to the canvas.

    Perspective, rotation and scale, then shear act about the frame's centre, which lands near the canvas' centre.
    ``u`` holds eight numbers in [-1, 1]: angle, scale, two shears, two translations, two perspective coefficients.
    """
    perspective = np.eye(3)
    tilt = u[6:8] * hyp.perspective
    reach = abs(tilt[0]) * frame_hw[1] / 2 + abs(tilt[1]) * frame_hw[0] / 2
    perspective[2, :2] = tilt / max(1.0, reach * HORIZON)
    angle, scale = math.radians(u[0] * hyp.degrees), max(1 + u[1] * hyp.scale, MIN_SCALE)
    turn = np.eye(3)
    turn[:2, :2] = scale * np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    shear = np.eye(3)
    shear[0, 1], shear[1, 0] = (math.tan(math.radians(v * hyp.shear)) for v in u[2:4])
    to_canvas = _translation((0.5 + u[4] * hyp.translate) * canvas_hw[1], (0.5 + u[5] * hyp.translate) * canvas_hw[0])
    return to_canvas @ shear @ turn @ perspective @ _translation(-frame_hw[1] / 2, -frame_hw[0] / 2)


def _flip_matrix(u: np.ndarray, hyp: Hyperparameters, canvas_hw: tuple[int, int]) -> np.ndarray:
    matrix = np.eye(3)
    if u[0] < hyp.fliplr:
        matrix[0, 0], matrix[0, 2] = -1.0, canvas_hw[1]
    if u[1] < hyp.flipud:
        matrix[1, 1], matrix[1, 2] = -1.0, canvas_hw[0]
    return matrix


def _make_tile(
    index: int,
    source_hw: tuple[int, int],
    placement: tuple[int, int, int, int],
    frame_hw: tuple[int, int],
    outer: np.ndarray,
    canvas_hw: tuple[int, int],
) -> Tile | None:
    """The tile of a source placed on the frame and seen through ``outer``; None when it misses the canvas."""
    source_h, source_w = (int(v) for v in source_hw)
    x, y, width, height = placement
    place = np.array([[width / source_w, 0.0, x], [0.0, height / source_h, y], [0.0, 0.0, 1.0]])
    # What the frame's edge cuts off, to whole source pixels.
    x1, x2 = _inside(x, width, frame_hw[1], source_w)
    y1, y2 = _inside(y, height, frame_hw[0], source_h)
    matrix = outer @ place
    if is_axis_aligned(matrix):
        return _snapped(index, (x1, y1, x2, y2), matrix, canvas_hw)
    corners = project_points(matrix, np.array([[x1, y1], [x2, y1], [x2, y2], [x1, y2]], np.float64))
    low, high = corners.min(0), corners.max(0)
    if low[0] >= canvas_hw[1] or low[1] >= canvas_hw[0] or high[0] <= 0 or high[1] <= 0:
        return None
    return Tile(index, (x1, y1, x2, y2), matrix)


def _inside(start: int, length: int, limit: int, source_length: int) -> tuple[int, int]:
    """The interval of the source (at least one pixel) whose placed copy lies within [0, limit]."""
    per_pixel = source_length / length
    low = min(round((max(start, 0) - start) * per_pixel), source_length - 1)
    high = round((min(start + length, limit) - start) * per_pixel)
    return low, max(high, low + 1)


def is_axis_aligned(matrix: np.ndarray) -> bool:
    """Whether a matrix only scales, mirrors and moves, so that a resize can render it."""
    return matrix[0, 1] == matrix[1, 0] == matrix[2, 0] == matrix[2, 1] == 0


def _snapped(index: int, region: Region, matrix: np.ndarray, canvas_hw: tuple[int, int]) -> Tile | None:
    """The tile with its edges moved (by half a pixel at most) onto canvas pixels.

    A crop of whole source pixels then fills a rectangle of whole canvas pixels, which a resize renders several times
    faster than a warp. Labels use the moved matrix, so they stay exactly on the objects.
    """
    snapped, edges = np.eye(3), []
    for axis, limit in ((0, canvas_hw[1]), (1, canvas_hw[0])):
        gain, offset = matrix[axis, axis], matrix[axis, 2]
        seen = sorted((-offset / gain, (limit - offset) / gain))
        low = max(region[axis], math.floor(seen[0]))
        high = min(region[axis + 2], math.ceil(seen[1]))
        if high <= low:
            return None
        start, end = round(gain * low + offset), round(gain * high + offset)
        if start == end:
            return None
        snapped[axis, axis] = (end - start) / (high - low)
        snapped[axis, 2] = start - snapped[axis, axis] * low
        edges.append((low, high))
    (x1, x2), (y1, y2) = edges
    return Tile(index, (x1, y1, x2, y2), snapped)


def colour_matrix(hue: float, saturation: float, value: float) -> np.ndarray | None:
    """(3, 3) on RGB columns: a hue turn (share of the circle) and saturation gain in YIQ, which keep the luma, then a
    brightness gain. None when all three are 0."""
    if hue == saturation == value == 0:
        return None
    turn = 2 * math.pi * hue
    chroma = (1 + saturation) * np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    twist = np.eye(3)
    twist[1:, 1:] = chroma
    return (1 + value) * _YIQ_TO_RGB @ twist @ _RGB_TO_YIQ
