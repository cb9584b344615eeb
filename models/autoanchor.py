"""Checks that anchors fit a data set, and fits new ones if they do not.

A box matches an anchor when neither side differs by a factor of ``anchor_t`` or more (see losses/anchor.py).
Boxes and anchors are (width, height) at the training size: pixels here, multiples of the level's stride in the model.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from utils.rng import Stream, keyed_generator

_ENOUGH_RECALL = 0.98
_MIN_SIDE_PX = 2.0  # thinner boxes are not used for fitting: most are slivers left by cropping
_MAX_FIT_BOXES = 10_000
_LLOYD_ROUNDS = 30
_GENERATIONS = 1000


def closeness(boxes_wh: np.ndarray, anchors_wh: np.ndarray) -> np.ndarray:
    """The worse side ratio of each box to its best anchor, in (0, 1]: (M, 2), (n, 2) -> (M,)."""
    ratio = boxes_wh[:, None] / anchors_wh
    return np.minimum(ratio, 1 / ratio).min(-1).max(-1)


def recall_and_fitness(boxes_wh: np.ndarray, anchors_wh: np.ndarray, anchor_t: float) -> tuple[float, float]:
    """The fraction of boxes that match an anchor, and the mean closeness; boxes that match none count as 0."""
    close = closeness(boxes_wh, anchors_wh)
    matches = close > 1 / anchor_t
    return float(matches.mean()), float((close * matches).mean())


def _cluster(boxes_wh: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """k-means, with k-means++ seeds, of the logarithms of the sides, so that ratios become distances: (count, 2). The
    distance is the larger one of the two sides, as in `closeness`."""
    points = np.log(boxes_wh)
    centers = points[rng.integers(len(points))][None]
    while len(centers) < count:
        nearest = np.abs(points[:, None] - centers).max(-1).min(-1) ** 2
        total = nearest.sum()
        pick = rng.choice(len(points), p=nearest / total) if total > 0 else rng.integers(len(points))
        centers = np.concatenate((centers, points[pick][None]))
    for _ in range(_LLOYD_ROUNDS):
        owner = np.abs(points[:, None] - centers).max(-1).argmin(-1)
        members = np.bincount(owner, minlength=count)[:, None]
        sums = np.stack([np.bincount(owner, weights=points[:, i], minlength=count) for i in range(2)], -1)
        moved = np.where(members > 0, sums / np.maximum(members, 1), centers)
        if np.array_equal(moved, centers):
            break
        centers = moved
    return np.exp(centers)


def _evolve(boxes_wh: np.ndarray, anchors_wh: np.ndarray, anchor_t: float, rng: np.random.Generator) -> np.ndarray:
    """Hill climbing on the fitness: scales some sides at random and keeps the result if it is not worse."""
    _, best = recall_and_fitness(boxes_wh, anchors_wh, anchor_t)
    for _ in range(_GENERATIONS):
        changed = rng.random(anchors_wh.shape) < 0.3
        scale = np.exp(rng.normal(0.0, 0.1, anchors_wh.shape) * changed)
        child = np.maximum(anchors_wh * scale, _MIN_SIDE_PX)
        _, score = recall_and_fitness(boxes_wh, child, anchor_t)
        if score >= best:
            anchors_wh, best = child, score
    return anchors_wh


def fit_anchors(boxes_wh: np.ndarray, count: int, *, anchor_t: float, seed: int = 0) -> np.ndarray:
    """``count`` anchors for boxes (M, 2), M >= 1, in the same unit: float64 (count, 2), smallest area first."""
    rng = keyed_generator(seed, Stream.ANCHORS)
    if len(boxes_wh) > _MAX_FIT_BOXES:
        boxes_wh = boxes_wh[rng.choice(len(boxes_wh), _MAX_FIT_BOXES, replace=False)]
    anchors = _evolve(boxes_wh, _cluster(boxes_wh, count, rng), anchor_t, rng)
    return anchors[anchors.prod(-1).argsort(kind="stable")]


def check_anchors(
    boxes_wh_px_at_imgsz: np.ndarray, model: nn.Module, *, anchor_t: float, refit: bool, seed: int = 0
) -> str:
    """Measures the best possible recall of an anchor head for the sides of the training boxes (M, 2), in pixels at the
    training size. If it is below 0.98 and ``refit``, fits new anchors, which are used if they are better in recall and
    fitness: in ``model.head.anchors``, smaller ones on finer levels.
    Returns a line for the log."""
    buffer = model.head.anchors
    levels, per_level, _ = buffer.shape
    strides = np.asarray(model.strides, dtype=np.float64)[:, None, None]
    current = buffer.detach().double().cpu().numpy() * strides
    boxes = np.asarray(boxes_wh_px_at_imgsz, dtype=np.float64).reshape(-1, 2)
    boxes = boxes[(boxes > 0).all(-1)]
    if len(boxes) == 0:
        return "anchors: no boxes to check against, kept"

    flat = current.reshape(-1, 2)
    recall, fitness = recall_and_fitness(boxes, flat, anchor_t)
    found = f"anchors: {recall:.1%} of boxes can be matched"
    if recall >= _ENOUGH_RECALL:
        return f"{found}, kept"
    if not refit:
        return f"{found}; refitting is off, kept"
    usable = boxes[(boxes >= _MIN_SIDE_PX).all(-1)]
    if len(usable) < len(flat):
        return f"{found}; too few boxes ({len(usable)}) to refit {len(flat)} anchors, kept"
    fitted = fit_anchors(usable, len(flat), anchor_t=anchor_t, seed=seed)
    new_recall, new_fitness = recall_and_fitness(boxes, fitted, anchor_t)
    if new_recall < recall or new_fitness <= fitness:
        return f"{found}; found no better ones, kept"
    by_level = np.empty_like(current)
    by_level[np.argsort(model.strides, kind="stable")] = fitted.reshape(levels, per_level, 2)
    with torch.no_grad():
        buffer.copy_(torch.from_numpy(by_level / strides))
    return f"{found}; refitted, now {new_recall:.1%}"
