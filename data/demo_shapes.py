"""The object classes of the demo set as outlines and textures in a unit frame ([-1, 1] both ways, before rotation).

What tells one class from another is its outline or its texture, never its colour, size or pose.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Contours = list[np.ndarray]  # each float (n, 2); filled by the even-odd rule, so an inner contour is a hole


def _arc(radius: float, start: float = 0.0, stop: float = 2 * np.pi) -> np.ndarray:
    angle = np.linspace(start, stop, 64)
    return radius * np.stack([np.cos(angle), np.sin(angle)], -1)


def _ring(rng: np.random.Generator) -> Contours:
    return [_arc(1.0), _arc(rng.uniform(0.45, 0.62))]


def _ball(rng: np.random.Generator) -> Contours:
    return [_arc(1.0)]


def _star(rng: np.random.Generator) -> Contours:
    angle = np.arange(10) * np.pi / 5
    radius = np.where(np.arange(10) % 2 == 0, 1.0, rng.uniform(0.38, 0.48))
    return [np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1)]


def _crescent(rng: np.random.Generator) -> Contours:
    """The unit disc less a disc about (offset, 0) that cuts the rim at the angles +-tip."""
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


def _checker(rng: np.random.Generator) -> Contours:
    return [0.9 * np.array([[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]])]


OUTLINES: dict[str, Callable[[np.random.Generator], Contours]] = {
    "ring": _ring,
    "ball": _ball,
    "star": _star,
    "crescent": _crescent,
    "cross": _cross,
    "triangle": _triangle,
    "checker": _checker,
}
CLASS_NAMES: tuple[str, ...] = tuple(OUTLINES)


def second_colour_mask(name: str, u: np.ndarray, v: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
    """Where a textured class shows its second colour: bool like ``u``; None for classes of one colour.

    Args:
        u, v: unit-frame coordinates of the pixels.
    """
    if name == "ball":
        return (np.floor((u + 1) * rng.uniform(2.0, 2.8) + rng.uniform(0, 1)) % 2).astype(bool)
    if name == "checker":
        cells = int(rng.integers(3, 5)) / 1.8
        return ((np.floor((u + 0.9) * cells) + np.floor((v + 0.9) * cells)) % 2).astype(bool)
    return None
