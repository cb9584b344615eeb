"""Random targets and predictions for assigners, and the plain rule for which cells a target may have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from models.assigners.task_aligned import Assignment, CandidatePairs, TaskAlignedAssigner, list_pairs
from models.box_coding import cell_centers
from utils.boxes import cxcywh_to_xyxy, xyxy_to_cxcywh

STRIDES = (8, 16, 32)
CANVAS = 128
SHAPES = tuple((CANVAS // s, CANVAS // s) for s in STRIDES)


@dataclass(frozen=True)
class Scene:
    """Predictions of all cells, and targets in slots; boxes are x1, y1, x2, y2 in canvas pixels.

    Attributes:
        logits: float32 (B, N, C).
        predicted: boxes, float32 (B, N, 4).
        labels: int64 (B, K).
        boxes: float32 (B, K, 4), zeros in empty slots.
        mask: slots that hold a target, bool (B, K).
    """

    logits: torch.Tensor
    predicted: torch.Tensor
    labels: torch.Tensor
    boxes: torch.Tensor
    mask: torch.Tensor

    @property
    def num_cells(self) -> int:
        return self.predicted.shape[1]


def cell_strides() -> torch.Tensor:
    """Returns the stride of each cell, float32 (N, 1)."""
    return cell_centers(SHAPES, STRIDES, torch.device("cpu"))[1]


def cell_centers_px() -> torch.Tensor:
    """Returns the centers of all cells in canvas pixels, float32 (N, 2)."""
    centers, strides = cell_centers(SHAPES, STRIDES, torch.device("cpu"))
    return centers * strides


def random_scene(batch: int, slots: int, classes: int, seed: int) -> Scene:
    """Draws targets (some tiny, some overlapping, some slots empty) and predictions around the cells."""
    rng = np.random.default_rng(seed)
    center = rng.uniform(10, 118, (batch, slots, 2))
    size = np.exp(rng.uniform(np.log(2), np.log(90), (batch, slots, 2)))
    boxes = cxcywh_to_xyxy(torch.from_numpy(np.concatenate((center, size), -1)).float()).clamp(0, CANVAS)
    mask = torch.from_numpy(np.arange(slots) < rng.integers(0, slots + 1, (batch, 1)))
    mask[0] = True
    boxes[~mask] = 0
    labels = torch.from_numpy(rng.integers(0, classes, (batch, slots)))
    centers = cell_centers_px()
    reach = torch.from_numpy(np.exp(rng.uniform(np.log(2), np.log(40), (batch, len(centers), 4)))).float()
    predicted = torch.cat((centers - reach[..., :2], centers + reach[..., 2:]), -1)
    logits = torch.from_numpy(rng.normal(-2, 2, (batch, len(centers), classes))).float()
    return Scene(logits, predicted, labels, boxes, mask)


def list_pairs_of(scene: Scene) -> CandidatePairs:
    """Returns the candidate pairs of a scene's targets."""
    image = scene.mask.nonzero()[:, :1].float()
    boxes = xyxy_to_cxcywh(scene.boxes[scene.mask] / CANVAS)  # exact: a power of two
    targets = torch.cat((image, torch.zeros_like(image), boxes), 1).numpy()
    return list_pairs(targets, *scene.mask.shape, SHAPES, STRIDES, torch.device("cpu"))


def assign(assigner: TaskAlignedAssigner, scene: Scene) -> Assignment:
    return assigner(scene.logits, scene.predicted, scene.labels, scene.boxes, list_pairs_of(scene))


def is_inside(point: Sequence[float], box: Sequence[float], stride: float) -> bool:
    """Returns whether a point is inside a box, whose sides count as ``stride`` at least."""
    return all(
        abs(point[i] - (box[i] + box[i + 2]) / 2) <= max((box[i + 2] - box[i]) / 2, stride / 2 + 1e-3) for i in (0, 1)
    )


def sigmoid(x: float) -> float:
    """Returns 1 / (1 + e^-x)."""
    return 1 / (1 + math.exp(-x))


def owners_in_rounds(wishes: dict[int, list[tuple[Any, float]]]) -> dict[int, Any]:
    """Returns {target: place} of a one-to-one match: in four rounds, each target without a place requests its best free
    one, and the target with the best overlap gets it, of equal ones the first.

    ``wishes``: the places of each target and its overlaps there, the best first.
    """
    owner: dict[int, Any] = {}
    for _ in range(4):
        claims: dict[Any, tuple[float, int]] = {}
        for k in wishes.keys() - owner.keys():
            free = [(place, overlap) for place, overlap in wishes[k] if place not in owner.values()]
            if free:
                place, overlap = free[0]
                claims[place] = max(claims.get(place, (-1.0, 0)), (overlap, -k))
        owner |= {-k: place for place, (_, k) in claims.items()}
    return owner
