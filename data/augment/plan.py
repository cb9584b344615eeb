"""Augmentation parameters, drawn from sample keys alone; no pixel is touched here.

A plan says which source images appear, which part of each, and the one matrix that takes it straight to the output
canvas: placement in the mosaic, random affine, perspective and flips are composed beforehand. The two-step picture
that this equals is the classic one (Bochkovskiy et al. 2020): paste four images around a random centre of a canvas of
twice the size, then cut a randomly transformed window out of it.

Plans of a batch are drawn together, since numpy takes as long for one number as for many. A plan's numbers are the same
bits whatever it is drawn together with.

Frames: see `data.augment.boxes`. All matrices are float64 (3, 3) and act on continuous pixel coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from data.augment.boxes import to_normalised, transform_labels
from data.augment.geometry import Placed, fitted_sizes, frames_to_canvas, mosaic_corners, place_tiles
from utils.config.settings import Hyperparameters
from utils.rng import Stream, keyed_generator, keyed_uniforms
from utils.structures import SampleKey

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


Region = tuple[int, int, int, int]  # x1, y1, x2, y2 in source pixels

MIXUP_BETA = 32.0


class Draw:
    """What the uniform numbers of a picture are for. All are drawn whether they are used or not: a changed probability
    then leaves the other choices alone."""

    MOSAIC = 0
    PARTNERS = slice(1, 4)
    CENTRE = slice(4, 6)
    AFFINE = slice(6, 14)
    COLOUR = slice(14, 17)
    FLIP = slice(17, 19)
    COUNT = 19


# The numbers of a sample: those of its picture, of another that may be mixed in, whether it is, and which it is.
SECOND = Draw.COUNT
MIXUP = 2 * Draw.COUNT
PARTNER = MIXUP + 1
NUMBERS = PARTNER + 1


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


def draw_plans(
    keys: Sequence[SampleKey],
    *,
    source_hw: np.ndarray,
    hyp: Hyperparameters,
    seed: int,
    epochs: int,
    single_image: bool = False,
) -> list[SamplePlan]:
    """The parameters of training samples: each a function of its own key and the other arguments, equal on every rank,
    worker and restart.

    Args:
        keys: the samples; each has a canvas size of its own.
        source_hw: int (N, 2), height and width of every source image as the renderer will be given it.
        hyp: probabilities and ranges.
        seed: of the run.
        epochs: of the whole run; the last ``hyp.close_mosaic`` have neither mosaic nor mixup.
        single_image: never mosaic or mixup (rectangular batches, whose canvas fits one image's aspect).
    """
    if not keys:
        return []
    numbers = keyed_uniforms(seed, Stream.AUGMENT, [(key.epoch, key.position) for key in keys], NUMBERS)
    combine = np.array([not single_image and key.epoch < epochs - hyp.close_mosaic for key in keys])
    mixed = np.flatnonzero(combine & (numbers[:, MIXUP] < hyp.mixup)).tolist()
    own_keys = [*keys, *(keys[n] for n in mixed)]
    images = len(source_hw)
    indices = [key.index for key in keys]
    indices += [choose_partners(numbers[n, PARTNER:].tolist(), keys[n].index, keys[n].block, images)[0] for n in mixed]
    u = np.concatenate([numbers[:, :SECOND], numbers[mixed, SECOND:MIXUP]])
    pictures = _draw_pictures(u, own_keys, indices, combine[[*range(len(keys)), *mixed]], source_hw, hyp)
    plans = [SamplePlan(key.canvas_hw, (picture,), 1.0) for key, picture in zip(keys, pictures)]
    for n, second in zip(mixed, pictures[len(keys) :]):
        rng = keyed_generator(seed, Stream.MIXUP, keys[n].epoch, keys[n].position)
        plans[n] = SamplePlan(keys[n].canvas_hw, (pictures[n], second), float(rng.beta(MIXUP_BETA, MIXUP_BETA)))
    return plans


def choose_partners(u: Sequence[float], index: int, block: Sequence[int], images: int) -> list[int]:
    """Images to be combined with ``index``, one a number of ``u``: any of all, or of its block, without repetition
    while there are enough."""
    if not block:
        return [int(number * images) for number in u]
    left: list[int] = []
    chosen = []
    for number in u:
        left = left or [i for i in block if i != index] or [index]
        chosen.append(left.pop(int(number * len(left))))
    return chosen


def _draw_pictures(
    u: np.ndarray,
    keys: Sequence[SampleKey],
    indices: Sequence[int],
    combine: np.ndarray,
    source_hw: np.ndarray,
    hyp: Hyperparameters,
) -> list[Picture]:
    """A picture for each row of numbers (P, `Draw.COUNT`), with its key, main image, and whether it may be a mosaic."""
    is_mosaic = (u[:, Draw.MOSAIC] < hyp.mosaic) & combine
    partners_u = u[:, Draw.PARTNERS].tolist()
    members = [
        [index, *choose_partners(own, index, key.block, len(source_hw))] if mosaic else [index]
        for own, index, key, mosaic in zip(partners_u, indices, keys, is_mosaic.tolist())
    ]
    colours: Sequence[np.ndarray | None] = [None] * len(u)
    if hyp.hsv_h or hyp.hsv_s or hyp.hsv_v:
        colours = colour_matrices((2 * u[:, Draw.COLOUR] - 1) * (hyp.hsv_h, hyp.hsv_s, hyp.hsv_v))
    canvas_wh = np.array([key.canvas_hw[::-1] for key in keys], np.float64)
    placed = _place(u, members, is_mosaic, source_hw, canvas_wh, hyp)
    tiles = iter(zip(placed.is_seen.tolist(), placed.region.tolist(), placed.matrix))
    pictures = []
    for own, colour in zip(members, colours):
        seen = (Tile(i, tuple(region), matrix) for i, (is_seen, region, matrix) in zip(own, tiles) if is_seen)
        pictures.append(Picture(tuple(seen), colour))
    return pictures


def _place(
    u: np.ndarray,
    members: Sequence[Sequence[int]],
    is_mosaic: np.ndarray,
    source_hw: np.ndarray,
    canvas_wh: np.ndarray,
    hyp: Hyperparameters,
) -> Placed:
    """All tiles of pictures whose images are ``members``, in their order."""
    frame_wh = np.where(is_mosaic[:, None], 2 * canvas_wh, canvas_wh)
    outer = frames_to_canvas(2 * u[:, Draw.AFFINE] - 1, u[:, Draw.FLIP], hyp, frame_wh, canvas_wh)
    counts = [len(own) for own in members]
    picture = np.repeat(np.arange(len(members)), counts)
    slots = np.concatenate([np.arange(count) for count in counts])
    sources = source_hw[np.array([i for own in members for i in own])]
    sizes = fitted_sizes(sources, canvas_wh[picture])
    centres = np.floor((0.5 + u[:, Draw.CENTRE]) * canvas_wh)[picture]
    corners = np.where(
        is_mosaic[picture, None], mosaic_corners(slots, centres, sizes), np.floor((canvas_wh[picture] - sizes) / 2)
    )
    return place_tiles(sources, corners, sizes, frame_wh[picture], outer[picture], canvas_wh[picture])


def plan_labels(
    plans: Sequence[SamplePlan],
    source_hw: np.ndarray,
    labels_of: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
) -> list[np.ndarray]:
    """Float32 (n, 5) of each plan: class, cx, cy, w, h normalised to the canvas.

    Args:
        plans: of any canvas sizes.
        source_hw: int (N, 2) of all source images, for which the plans were drawn.
        labels_of: as `DatasetIndex.labels_of`.
    """
    own = [[tile for picture in plan.pictures for tile in picture.tiles] for plan in plans]
    tiles = [tile for some in own for tile in some]
    if not tiles:
        return [np.zeros((0, 5), np.float32) for _ in plans]
    images = np.array([tile.index for tile in tiles])
    canvas_hw = np.repeat([plan.canvas_hw for plan in plans], [len(some) for some in own], 0)
    moved, tile = transform_labels(
        *labels_of(images),
        source_hw=source_hw[images],
        regions=np.array([tile.region for tile in tiles]),
        matrices=np.array([tile.matrix for tile in tiles]),
        canvas_hw=canvas_hw,
    )
    ends = np.searchsorted(tile, np.cumsum([len(some) for some in own]))
    return np.split(to_normalised(moved, canvas_hw[tile]), ends[:-1])
