"""Checks whether anchors fit a data set, and fits new ones if they do not.

A box matches an anchor if neither side differs by a factor of ``anchor_t`` or more (see losses/anchor.py). Boxes and
anchors are (width, height) at the training size: pixels here, multiples of the level's stride in the model.

Legend: M boxes, n anchors, L levels, A anchors per level.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.heads.base import DetectionHead
from utils.rng import Stream, keyed_generator

_TARGET_RECALL = 0.98  # anchors that reach it are kept
_MIN_SIDE_PX = 2.0  # thinner boxes are not used for fitting: most are slivers left by cropping
_MAX_FIT_BOXES = 10_000
_KMEANS_ROUNDS = 30
_CLIMB_STEPS = 1000


def closeness(boxes_wh: np.ndarray, anchors_wh: np.ndarray) -> np.ndarray:
    """Computes the worse side ratio of each box to its best anchor, in (0, 1]: (M, 2), (n, 2) -> (M,)."""
    ratio = boxes_wh[:, None] / anchors_wh
    return np.minimum(ratio, 1 / ratio).min(-1).max(-1)


def recall_and_fitness(boxes_wh: np.ndarray, anchors_wh: np.ndarray, anchor_t: float) -> tuple[float, float]:
    """Computes the fraction of boxes that match an anchor, and the mean closeness; boxes that match none count as 0."""
    close = closeness(boxes_wh, anchors_wh)
    matches = close > 1 / anchor_t
    return float(matches.mean()), float((close * matches).mean())


def _cluster(boxes_wh: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Finds ``count`` cluster centers by k-means with k-means++ seeds: (count, 2).

    It clusters the logarithms of sides, so that ratios become distances. As in `closeness`, only the side that differs
    more counts.
    """
    points = np.log(boxes_wh)
    centers = points[rng.integers(len(points))][None]
    while len(centers) < count:
        squared = np.abs(points[:, None] - centers).max(-1).min(-1) ** 2
        total = squared.sum()
        seed = rng.choice(len(points), p=squared / total) if total > 0 else rng.integers(len(points))
        centers = np.concatenate((centers, points[seed][None]))
    for _ in range(_KMEANS_ROUNDS):
        nearest = np.abs(points[:, None] - centers).max(-1).argmin(-1)
        members = np.bincount(nearest, minlength=count)[:, None]
        sums = np.stack([np.bincount(nearest, weights=points[:, i], minlength=count) for i in range(2)], -1)
        moved = np.where(members > 0, sums / np.maximum(members, 1), centers)
        if np.array_equal(moved, centers):
            break
        centers = moved
    return np.exp(centers)


def _climb(boxes_wh: np.ndarray, anchors_wh: np.ndarray, anchor_t: float, rng: np.random.Generator) -> np.ndarray:
    """Improves the fitness by hill climbing: scales some sides at random and keeps the result if it is not worse."""
    best = anchors_wh
    _, best_fitness = recall_and_fitness(boxes_wh, best, anchor_t)
    for _ in range(_CLIMB_STEPS):
        is_scaled = rng.random(best.shape) < 0.3
        scale = np.exp(rng.normal(0.0, 0.1, best.shape) * is_scaled)
        candidate = np.maximum(best * scale, _MIN_SIDE_PX)
        _, fitness = recall_and_fitness(boxes_wh, candidate, anchor_t)
        if fitness >= best_fitness:
            best = candidate
            best_fitness = fitness
    return best


def fit_anchors(boxes_wh: np.ndarray, count: int, *, anchor_t: float, seed: int = 0) -> np.ndarray:
    """Fits ``count`` anchors to boxes (M, 2), M >= 1, in the same unit: float64 (count, 2), smallest area first."""
    rng = keyed_generator(seed, Stream.ANCHORS)
    if len(boxes_wh) > _MAX_FIT_BOXES:
        boxes_wh = boxes_wh[rng.choice(len(boxes_wh), _MAX_FIT_BOXES, replace=False)]
    anchors = _climb(boxes_wh, _cluster(boxes_wh, count, rng), anchor_t, rng)
    return anchors[anchors.prod(-1).argsort(kind="stable")]


def fitted_anchors(
    boxes_wh_px_at_imgsz: np.ndarray, head: DetectionHead, *, anchor_t: float, reason_to_keep: str = "", seed: int = 0
) -> tuple[str, Tensor | None]:
    """Measures the best possible recall of an anchor head, and fits new anchors if it is below 0.98, unless there is
    a ``reason_to_keep`` them.

    Args:
        boxes_wh_px_at_imgsz: sides of the training boxes (M, 2), pixels at the training size.
        head: predicts boxes relative to anchors.
        anchor_t: a box matches if neither side differs by this factor or more.
        reason_to_keep: why the anchors may not be changed, for the log; empty if they may.
        seed: seed of the fit's random numbers.

    Returns a line for the log, and new anchors for ``head.anchors`` (L, A, 2), smaller ones on finer levels, if recall
    and fitness improve; else None. Raises ValueError for a head without anchors.
    """
    if head.anchors is None:
        raise ValueError("the head has no anchors")
    boxes = np.asarray(boxes_wh_px_at_imgsz, dtype=np.float64).reshape(-1, 2)
    boxes = boxes[(boxes > 0).all(-1)]
    if len(boxes) == 0:
        return "anchors: no boxes to check against; the anchors are kept", None
    anchors = _anchors_px(head, head.anchors)
    recall, _ = recall_and_fitness(boxes, anchors, anchor_t)
    measured = f"anchors: {recall:.1%} of boxes can be matched"
    if recall >= _TARGET_RECALL:
        return f"{measured}; they are kept", None
    if reason_to_keep:
        return f"{measured}; {reason_to_keep}, so they are kept", None
    fit = _fit_better(boxes, anchors, anchor_t=anchor_t, seed=seed)
    fitted = None if fit.anchors is None else _by_level(head, head.anchors, fit.anchors)
    return f"{measured}; {fit.summary}", fitted


class _Fit(NamedTuple):
    """The result of a fit."""

    summary: str  # line for the log
    anchors: np.ndarray | None = None  # (n, 2); None: none better than the current ones


def _fit_better(boxes_wh: np.ndarray, anchors_wh: np.ndarray, *, anchor_t: float, seed: int) -> _Fit:
    """Fits as many anchors as ``anchors_wh`` (n, 2) has to boxes (M, 2)."""
    count = len(anchors_wh)
    usable = boxes_wh[(boxes_wh >= _MIN_SIDE_PX).all(-1)]
    if len(usable) < count:
        return _Fit(f"too few boxes ({len(usable)}) to refit {count} anchors, which are kept")
    fitted = fit_anchors(usable, count, anchor_t=anchor_t, seed=seed)
    recall, fitness = recall_and_fitness(boxes_wh, anchors_wh, anchor_t)
    new_recall, new_fitness = recall_and_fitness(boxes_wh, fitted, anchor_t)
    if new_recall < recall or new_fitness <= fitness:
        return _Fit("found no better ones, so they are kept")
    return _Fit(f"refitted, now {new_recall:.1%}", fitted)


def _anchors_px(head: DetectionHead, buffer: Tensor) -> np.ndarray:
    """Returns the anchors in ``buffer`` (L, A, 2), of a head with L levels, in pixels: float64 (L * A, 2)."""
    return (buffer.detach().double().cpu().numpy() * _strides(head)).reshape(-1, 2)


def _by_level(head: DetectionHead, buffer: Tensor, anchors_px: np.ndarray) -> Tensor:
    """Returns anchors (L * A, 2), the smallest first, in the form of ``buffer`` (L, A, 2), on the CPU: smaller ones on
    finer levels, in multiples of the stride."""
    by_level = np.empty(buffer.shape)
    by_level[np.argsort(head.strides, kind="stable")] = anchors_px.reshape(by_level.shape)
    return torch.from_numpy(by_level / _strides(head)).to(buffer.dtype)


def _strides(head: DetectionHead) -> np.ndarray:
    """Returns the strides of the levels: float64 (L, 1, 1)."""
    return np.asarray(head.strides, dtype=np.float64)[:, None, None]
