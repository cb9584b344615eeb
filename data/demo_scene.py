"""Renders one image of the demo set: clutter, overlapping objects, camera effects, and boxes of the visible parts.

Everything is drawn at `SUPERSAMPLE` times the size and reduced by averaging. An owner map holds the number of the
object that each pixel shows, so a box is the extent of the visible part to half a pixel. Colors are RGB.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cv2
import numpy as np

Contours = list[np.ndarray]  # each float (n, 2); filled by the even-odd rule, so an inner contour is a hole


def _arc(radius: float, start: float = 0.0, stop: float = 2 * np.pi) -> np.ndarray:
    angle = np.linspace(start, stop, 64)
    return radius * np.stack([np.cos(angle), np.sin(angle)], -1)


def _star(rng: np.random.Generator) -> Contours:
    angle = np.arange(10) * np.pi / 5
    radius = np.where(np.arange(10) % 2 == 0, 1.0, rng.uniform(0.38, 0.48))
    return [np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1)]


def _crescent(rng: np.random.Generator) -> Contours:
    """The unit disk minus a disk about (offset, 0) that cuts the rim at the angles +-tip."""
    tip, offset = rng.uniform(0.75, 1.05), rng.uniform(0.35, 0.5)
    dx, dy = np.cos(tip) - offset, np.sin(tip)
    inner_tip = np.arctan2(dy, dx)
    outer = _arc(1.0, tip, 2 * np.pi - tip)
    hollow = _arc(float(np.hypot(dx, dy)), 2 * np.pi - inner_tip, inner_tip) + np.array([offset, 0.0])
    return [np.concatenate([outer, hollow])]


def _cross(rng: np.random.Generator) -> Contours:
    a = rng.uniform(0.24, 0.36)
    quarter = np.array([[1.0, a], [a, a], [a, 1.0]])
    turns = [np.array([[np.cos(q), -np.sin(q)], [np.sin(q), np.cos(q)]]) for q in np.arange(4) * np.pi / 2]
    return [np.concatenate([quarter @ turn.T for turn in turns])]


def _triangle(rng: np.random.Generator) -> Contours:
    angle = np.arange(3) * 2 * np.pi / 3
    corners = np.stack([np.cos(angle), np.sin(angle)], -1)
    return [corners, corners * rng.uniform(0.35, 0.5)]


OUTLINES: dict[str, Callable[[np.random.Generator], Contours]] = {
    "ring": lambda rng: [_arc(1.0), _arc(rng.uniform(0.45, 0.62))],
    "ball": lambda rng: [_arc(1.0)],
    "star": _star,
    "crescent": _crescent,
    "cross": _cross,
    "triangle": _triangle,
    "checker": lambda rng: [0.9 * np.array([[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]])],
}
CLASS_NAMES: tuple[str, ...] = tuple(OUTLINES)


def second_color_mask(name: str, u: np.ndarray, v: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
    """Pixels of a textured class with its second color, bool like ``u``; None for classes of one color.

    Args:
        u, v: unit-frame coordinates of the pixels.
    """
    if name == "ball":
        return (np.floor((u + 1) * rng.uniform(2.0, 2.8) + rng.uniform(0, 1)) % 2).astype(bool)
    if name == "checker":
        cells = int(rng.integers(3, 5)) / 1.8
        return ((np.floor((u + 0.9) * cells) + np.floor((v + 0.9) * cells)) % 2).astype(bool)
    return None


SUPERSAMPLE = 2
SMALLEST, TYPICAL, LARGEST = 10 / 320, 48 / 320, 200 / 320  # object extent as a fraction of the image
MIN_VISIBLE = 0.35  # visible fraction of an object; below this it gets no label
MIN_SIDE = 4.0  # pixels of the final image; narrower visible parts get no label
MAX_COVER = 0.5  # a new object may hide at most this fraction of another object
FRACTION_BITS = 4  # OpenCV's fixed-point polygon coordinates

BACKGROUND = -1


@dataclass(frozen=True)
class _Patch:
    """The pixels of an object in its bounding rectangle, clipped to the canvas."""

    rows: slice
    columns: slice
    mask: np.ndarray  # bool (h, w)
    colors: np.ndarray  # float32 (h, w, 3)
    outline: list[np.ndarray]  # contours in canvas pixels
    full_area: int  # pixels, including parts outside the canvas


def render_scene(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws one image.

    Returns:
        image uint8 (size, size, 3) RGB, and labels float64 (n, 5): class, cx, cy, w, h normalized.
    """
    side = size * SUPERSAMPLE
    canvas = cv2.resize(_background(rng, size), (side, side), interpolation=cv2.INTER_LINEAR)  # smooth: no loss
    _distractors(canvas, rng)
    owner = np.full((side, side), BACKGROUND, np.int16)
    classes: list[int] = []
    full_areas: list[int] = []
    for _ in range(min(2 + int(rng.poisson(3.5)), 10)):
        class_index = int(rng.integers(len(CLASS_NAMES)))
        patch = _draw_object(CLASS_NAMES[class_index], owner, np.array(full_areas), rng)
        if patch is None:
            continue
        _paint(canvas, owner, patch, len(classes), rng)
        classes.append(class_index)
        full_areas.append(patch.full_area)
    _occluders(canvas, owner, rng)
    labels = _visible_boxes(owner, np.array(classes), np.array(full_areas))
    image = cv2.resize(canvas, (size, size), interpolation=cv2.INTER_AREA)
    return _camera(image, rng), labels


def _color(rng: np.random.Generator) -> np.ndarray:
    return rng.uniform(15, 240, 3).astype(np.float32)


def _color_unlike(rng: np.random.Generator, other: np.ndarray, distance: float) -> np.ndarray:
    """The first of eight random colors at least ``distance`` from ``other``, else the farthest of them."""
    candidates = [_color(rng) for _ in range(8)]
    far = [float(np.linalg.norm(c - other)) for c in candidates]
    return next((c for c, d in zip(candidates, far) if d >= distance), candidates[int(np.argmax(far))])


def _background(rng: np.random.Generator, size: int) -> np.ndarray:
    """A gradient between two colors with octaves of smooth color noise: float32 (size, size, 3)."""
    angle = rng.uniform(0, 2 * np.pi)
    ramp = np.linspace(-0.5, 0.5, size, dtype=np.float32)
    across, down = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    blend = np.clip(0.5 + across * ramp[None, :] + down * ramp[:, None], 0, 1)[..., None]
    canvas = _color(rng) * (1 - blend) + _color(rng) * blend
    roughness = rng.uniform(10, 38)
    for octave in range(2, 8):
        cells = 2**octave
        common = rng.standard_normal((cells, cells, 1)) * rng.uniform(0.4, 1.0, 3)
        noise = ((common + 0.4 * rng.standard_normal((cells, cells, 3))) * roughness).astype(np.float32)
        canvas += cv2.resize(noise, (size, size), interpolation=cv2.INTER_LINEAR)
        roughness *= rng.uniform(0.5, 0.9)
    return np.clip(canvas, 0, 255)


def _distractors(canvas: np.ndarray, rng: np.random.Generator) -> None:
    """Draws semi-transparent ellipses, quadrilaterals, lines and open arcs, which resemble objects."""
    side = canvas.shape[0]
    for _ in range(int(rng.integers(4, 14))):
        layer = canvas.copy()
        center = rng.uniform(0, side, 2)
        extent = side * np.exp(rng.uniform(np.log(0.02), np.log(0.3)))
        color = _color(rng).tolist()
        kind = int(rng.integers(4))
        if kind == 0:
            axes = (int(extent / 2), int(extent / 2 * rng.uniform(0.3, 0.8)))
            cv2.ellipse(layer, _pixel(center), axes, rng.uniform(0, 180), 0, 360, color, -1)
        elif kind == 1:
            corners = center + rng.uniform(-0.6, 0.6, (4, 2)) * extent
            cv2.fillConvexPoly(layer, cv2.convexHull(corners.astype(np.int32)), color)
        elif kind == 2:
            end = center + rng.uniform(-2, 2, 2) * extent
            cv2.line(layer, _pixel(center), _pixel(end), color, int(rng.integers(2, 10)))
        else:
            start = rng.uniform(0, 360)
            axes = (int(extent / 2), int(extent / 2))
            cv2.ellipse(
                layer, _pixel(center), axes, 0, start, start + rng.uniform(60, 150), color, int(rng.integers(2, 8))
            )
        cv2.addWeighted(layer, opacity := rng.uniform(0.35, 0.85), canvas, 1 - opacity, 0, dst=canvas)


def _pixel(point: np.ndarray) -> tuple[int, int]:
    return round(float(point[0])), round(float(point[1]))


def _draw_object(name: str, owner: np.ndarray, full_areas: np.ndarray, rng: np.random.Generator) -> _Patch | None:
    """An object of class ``name`` at a position where it hides at most `MAX_COVER` of any other object; None if none of
    six random positions is suitable."""
    side = owner.shape[0]
    radius = side / 2 * np.exp(rng.triangular(np.log(SMALLEST), np.log(TYPICAL), np.log(LARGEST)))
    angle = rng.uniform(0, 2 * np.pi)
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    to_canvas = radius * rotation @ np.diag([1.0, rng.uniform(0.7, 1.0)])
    contours = OUTLINES[name](rng)
    for _ in range(6):
        center = rng.uniform(0.02, 0.98, 2) * side
        outline = [points @ to_canvas.T + center for points in contours]
        rows, columns, mask, full_area = _rasterize(outline, side)
        if mask.sum() < MIN_VISIBLE * full_area:
            continue
        beneath = owner[rows, columns][mask]
        hidden = np.bincount(beneath[beneath >= 0], minlength=len(full_areas))
        if np.all(hidden <= MAX_COVER * full_areas):
            break
    else:
        return None
    grid_y, grid_x = np.mgrid[rows, columns].astype(np.float32)
    to_unit = np.linalg.inv(to_canvas)
    dx, dy = grid_x + 0.5 - center[0], grid_y + 0.5 - center[1]
    u = to_unit[0, 0] * dx + to_unit[0, 1] * dy
    v = to_unit[1, 0] * dx + to_unit[1, 1] * dy
    return _Patch(rows, columns, mask, _surface(name, u, v, rng), outline, full_area)


def _rasterize(outline: list[np.ndarray], side: int) -> tuple[slice, slice, np.ndarray, int]:
    """Rows, columns and mask of the part inside the canvas, and the area of the whole object."""
    points = np.concatenate(outline)
    low = np.floor(points.min(0)).astype(int)
    width, height = np.ceil(points.max(0)).astype(int) - low + 1
    mask = np.zeros((height, width), np.uint8)
    fixed = [np.round((c - low - 0.5) * 2**FRACTION_BITS).astype(np.int32) for c in outline]
    cv2.fillPoly(mask, fixed, 1, shift=FRACTION_BITS)
    (x0, y0), (x1, y1) = np.clip(low, 0, side), np.clip(low + mask.shape[::-1], 0, side)
    inside = mask[y0 - low[1] : y1 - low[1], x0 - low[0] : x1 - low[0]]
    return slice(y0, y1), slice(x0, x1), inside.astype(bool), int(mask.sum())


def _surface(name: str, u: np.ndarray, v: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Colors of an object's pixels: texture and shading along a random direction."""
    first = _color(rng)
    colors = np.broadcast_to(first, (*u.shape, 3)).copy()
    second = second_color_mask(name, u, v, rng)
    if second is not None:
        colors[second] = _color_unlike(rng, first, 130)
    angle, strength = rng.uniform(0, 2 * np.pi), rng.uniform(0, 0.3)
    return colors * (1 + strength * (np.cos(angle) * u + np.sin(angle) * v))[..., None]


def _paint(canvas: np.ndarray, owner: np.ndarray, patch: _Patch, number: int, rng: np.random.Generator) -> None:
    """Draws a patch on the canvas, with sufficient contrast to its background, and its number on the owner map."""
    region = canvas[patch.rows, patch.columns]
    behind = region[patch.mask].mean(0)
    mean = patch.colors[patch.mask].mean(0)
    colors = patch.colors
    contrasting = _color_unlike(rng, behind, 80)  # always drawn, so that later draws do not depend on pixel values
    if np.linalg.norm(mean - behind) < 60:
        colors = colors + (contrasting - mean)
    grain = rng.standard_normal(patch.mask.shape).astype(np.float32)[..., None] * rng.uniform(0, 12)
    colors = np.clip(colors + grain, 0, 255)
    if rng.random() < 0.5:  # a darker or lighter rim inside the mask, so that the box is still its extent
        rim = np.zeros(patch.mask.shape, np.uint8)
        shift = np.array([patch.columns.start, patch.rows.start])
        width = max(1, int(0.05 * np.sqrt(patch.full_area)))
        cv2.polylines(rim, [np.round(c - shift).astype(np.int32) for c in patch.outline], True, 1, width)
        colors = np.where(rim[..., None].astype(bool), np.clip(colors * rng.choice([0.45, 1.6]), 0, 255), colors)
    region[patch.mask] = colors[patch.mask]
    owner[patch.rows, patch.columns][patch.mask] = number


def _occluders(canvas: np.ndarray, owner: np.ndarray, rng: np.random.Generator) -> None:
    """Draws up to two bars in front of everything."""
    side = canvas.shape[0]
    for _ in range(int(rng.choice(3, p=[0.55, 0.3, 0.15]))):
        ends = rng.uniform(0, side, (2, 2))
        width = int(side * rng.uniform(0.005, 0.02)) + 1
        cv2.line(canvas, _pixel(ends[0]), _pixel(ends[1]), _color(rng).tolist(), width)
        cv2.line(owner, _pixel(ends[0]), _pixel(ends[1]), BACKGROUND, width)


def _visible_boxes(owner: np.ndarray, classes: np.ndarray, full_areas: np.ndarray) -> np.ndarray:
    """Labels (n, 5) of the objects that are sufficiently visible."""
    side = owner.shape[0]
    labels = []
    for number, (class_index, full_area) in enumerate(zip(classes, full_areas)):
        visible = owner == number
        if visible.sum() < MIN_VISIBLE * full_area:
            continue
        columns, rows = np.flatnonzero(visible.any(0)), np.flatnonzero(visible.any(1))
        x0, y0, x1, y1 = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
        if min(x1 - x0, y1 - y0) < MIN_SIDE * SUPERSAMPLE:
            continue
        labels.append([class_index, (x0 + x1) / 2 / side, (y0 + y1) / 2 / side, (x1 - x0) / side, (y1 - y0) / side])
    return np.array(labels, np.float64).reshape(-1, 5)


def _camera(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Applies blur, exposure and sensor noise."""
    if rng.random() < 0.3:
        image = cv2.GaussianBlur(image, (0, 0), rng.uniform(0.4, 1.1))
    image = (image - 128) * rng.uniform(0.7, 1.15) + 128 + rng.uniform(-25, 25)
    image = image + rng.standard_normal(image.shape, np.float32) * rng.uniform(0, 9)
    return np.clip(np.round(image), 0, 255).astype(np.uint8)
