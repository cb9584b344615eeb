"""Base class of the losses, and functions that several of them share: ignore regions, class weights, padded targets.

A loss returns sums over a shard of the batch and one normalizer (`LossOutput`). No loss waits for the device or has a
shape that depends on values. Images contribute independently, so the sums of shards add up to the whole batch's.

The forward pass scatters only maxima, minima and integer counts, whose result does not depend on the order. The
backward pass adds by index: in the anchor-free loss only one term of each sum is nonzero; in the anchor loss there may
be several (two targets in one cell), whose order CUDA fixes only under torch.use_deterministic_algorithms.

Legend: B images, I images with ignore regions, N cells over all levels, K target slots, C classes, R regions, S any
shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from models.losses.distillation import Teacher
from models.losses.ignored_cells import IgnoredCells, ignored_cells
from utils.batches import Targets
from utils.boxes import cxcywh_to_xyxy, scale_boxes
from utils.config.settings import Hyperparameters

NO_OBJECT = -1e4  # a logit whose softplus is 0 in every floating-point type


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Settings that the losses of all heads share."""

    strides: tuple[int, ...]
    num_classes: int
    hyp: Hyperparameters
    label_smoothing: float = 0.0
    one_to_one: bool = False  # whether each target is assigned to a single cell
    class_weights: Tensor | None = None  # float32 (C,), factors of the classes' cross-entropies, see `class_weights`
    distilled_classes: tuple[int, ...] = ()  # classes with targets from a teacher, see `models.losses.distillation`
    unlabeled_only: bool = False  # whether the teacher gives targets only where an image does not label a class


class LossOutput(NamedTuple):
    """Loss of one shard of the global batch, not yet normalized.

    The engine sums ``total`` and ``normalizer`` over all shards (ranks, micro-batches) and divides once, so gradients
    do not depend on how a batch is cut into shards. All three tensors live on the device; the step reads none of them.
    """

    total: Tensor  # () sum of all terms, gains applied, differentiable
    normalizer: Tensor  # () float32, no gradient; 0 in a shard without targets; the engine clamps the sum to >= 1
    parts: Tensor  # (P,) the terms of ``total``, detached, in the order of the criterion's ``names``


class Criterion(nn.Module):
    """The loss of a head."""

    names: tuple[str, ...]  # of ``LossOutput.parts``
    class_weights: Tensor | None  # buffer, float32 (C,), see `class_weights`; None: all classes count alike

    def __init__(self) -> None:
        super().__init__()
        self.teacher: Teacher | None = None

    def forward(
        self, raw: Sequence[Tensor], targets: Targets, teacher_maps: Sequence[Tensor] | None = None
    ) -> LossOutput:
        """Computes the loss of a shard of the batch.

        Args:
            raw: the head's maps, one per level.
            targets: objects in the same images.
            teacher_maps: the teacher's maps of the same images; only a loss with a teacher reads them.
        """
        raise NotImplementedError

    def teacher_maps(self, images: Tensor) -> list[Tensor] | None:
        """Runs the teacher on ``images`` (B, channels, H, W) and returns its maps; None without a teacher."""
        return None if self.teacher is None else self.teacher(images)

    def compile_terms(self, *, has_regions: bool = False) -> None:
        """Compiles the part of training, not of validation, that runs on the device, for all sizes at once.

        Does nothing by default. ``has_regions``: whether batches may have ignore regions.
        """

    def set_no_mosaic(self, no_mosaic: bool) -> None:
        """Begins (True) or ends the last epochs, which have no mosaic: a loss may then refine its boxes."""


class BranchLoss(Criterion):
    """Base of the losses of a head, or of one of its two branches."""

    gains: tuple[float, ...]  # factors of the terms ``names``

    def __init__(self, settings: LossSettings) -> None:
        super().__init__()
        self.settings = settings
        self.register_buffer("class_weights", settings.class_weights, persistent=False)

    def ignored_cells(self, raw: Sequence[Tensor], targets: Targets) -> IgnoredCells | None:
        """Finds the cells in ignore regions; None if there are no regions."""
        if targets.ignore is None:
            return None
        return ignored_cells(targets.ignore, raw, self.settings.strides, self.settings.num_classes)

    def weighted(self, terms: Sequence[Tensor], normalizer: Tensor) -> LossOutput:
        """Returns the loss that is the sum of ``terms``, () each, times their gains."""
        parts = [gain * term for gain, term in zip(self.gains, terms, strict=True)]
        return LossOutput(add_up(parts), normalizer, torch.stack(parts).detach())


class DualAssignmentLoss(Criterion):
    """Loss of a head with two branches (see models/heads/base.py): the one-to-many branch's loss plus ``gain`` times
    the one-to-one branch's (YOLOv10, Wang et al. 2024).

    The paper divides each branch's sum by that branch's own target scores; here both are divided by the one-to-many
    branch's. ``gain`` stands for the ratio of the two, which was measured as about 2 on a fresh model and 6 on a
    trained one. No parameter receives gradients of both losses, so the gain acts only as a learning rate of the
    one-to-one layers.
    """

    def __init__(self, many: BranchLoss, one: BranchLoss, *, gain: float = 4.0) -> None:
        super().__init__()
        self.many = many
        self.one = one
        self.gain = gain
        self.names = (*many.names, *(f"{name}_one" for name in one.names))
        self.register_buffer("class_weights", many.class_weights, persistent=False)  # both branches have the same

    def compile_terms(self, *, has_regions: bool = False) -> None:
        self.many.compile_terms(has_regions=has_regions)
        self.one.compile_terms(has_regions=has_regions)

    def set_no_mosaic(self, no_mosaic: bool) -> None:
        self.many.set_no_mosaic(no_mosaic)
        self.one.set_no_mosaic(no_mosaic)

    def forward(
        self, raw: Sequence[Tensor], targets: Targets, teacher_maps: Sequence[Tensor] | None = None
    ) -> LossOutput:
        """Args: ``raw`` and ``teacher_maps`` hold the maps of the one-to-many branch, then those of the one-to-one
        branch."""
        levels = len(raw) // 2
        teacher_many = teacher_maps[:levels] if teacher_maps else None
        teacher_one = teacher_maps[levels:] if teacher_maps else None
        many = self.many(raw[:levels], targets, teacher_many)
        one = self.one(raw[levels:], targets, teacher_one)
        parts = torch.cat((many.parts, self.gain * one.parts))
        return LossOutput(many.total + self.gain * one.total, many.normalizer, parts)


class AssignedCells(NamedTuple):
    """Cells assigned to targets, and their targets, for P slots of an image. Unused slots have weight 0."""

    cells: Tensor  # int64 (B, P)
    weight: Tensor  # float32 (B, P), target score
    boxes: Tensor  # float32 (B, P, 4) xyxy canvas pixels
    class_targets: Tensor  # float32 (B, P, C)


def with_empty_regions(ignore: np.ndarray | None, images: int, min_images: int) -> np.ndarray:
    """Adds regions without cells to ``ignore``, (R, 6) as in `Targets`, so that at least ``min_images`` of the
    ``images`` have a region (or all of them, if they are fewer)."""
    ignore = np.zeros((0, 6), np.float32) if ignore is None else ignore
    present = np.unique(ignore[:, 0])
    absent = np.setdiff1d(np.arange(images), present)[: max(min_images - len(present), 0)]
    empty = np.zeros((len(absent), 6), np.float32)
    empty[:, 0] = absent
    empty[:, 1:] = -1, -1, -1, 0, 0  # all classes, a point outside the canvas
    joined = np.concatenate([ignore, empty])
    return joined[joined[:, 0].argsort(kind="stable")]


def class_weights(counts: np.ndarray, power: float) -> Tensor:
    """Computes factors of the classes' cross-entropies, proportional to 1 / frequency ** power (1: Cui et al. 2019;
    1/2: Mahajan et al. 2018).

    A weight multiplies every term of its class, background included, so that scores stay unbiased. Each cell has a term
    of every class, so the mean weight is 1. A class without boxes has weight 1 and does not count in the mean.

    Args: counts int (C,), boxes of each class. Returns float32 (C,).
    """
    weights = np.ones(len(counts))
    has_boxes = counts > 0
    inverse = (counts[has_boxes] / counts.sum()) ** -float(power)
    weights[has_boxes] = inverse * len(inverse) / inverse.sum()
    return torch.from_numpy(weights.astype(np.float32))


def canvas_targets(level: Tensor, stride: int, targets: Tensor, max_targets: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pads targets, (M, 6) as in `Targets`, to K = ``max_targets`` slots per image.

    ``level``: any raw map (B, D, h, w), with ``stride`` pixels per cell; it gives the canvas size. Returns labels int64
    (B, K), boxes (B, K, 4) in xyxy canvas pixels, and a bool mask (B, K), False for padding.
    """
    padded, mask = pad_targets(targets, level.shape[0], max_targets)
    boxes = scale_boxes(cxcywh_to_xyxy(padded[..., 1:]), level.shape[3] * stride, level.shape[2] * stride)
    return padded[..., 0].long(), boxes, mask


def smooth_labels(scores: Tensor, labels: Tensor, settings: LossSettings) -> Tensor:
    """Creates class targets (*S, C): ``scores`` (*S) at ``labels`` (*S), 0 elsewhere, then label smoothing.

    Label smoothing (Szegedy et al. 2016) spreads the fraction eps of a score over all classes. The sum over classes,
    and with it the normalizer and the background, stays the same.
    """
    num_classes = settings.num_classes
    eps = settings.label_smoothing
    one_hot = labels[..., None] == torch.arange(num_classes, device=labels.device)
    return scores[..., None] * (one_hot * (1 - eps) + eps / num_classes)


def add_up(terms: Sequence[Tensor]) -> Tensor:
    """Adds up one or more tensors, from the first to the last."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def pad_targets(targets: Tensor, batch_size: int, max_targets: int) -> tuple[Tensor, Tensor]:
    """Pads ragged targets to a fixed shape, without a host sync.

    Args:
        targets: float (M, 6) as in `Targets`, sorted by image.
        max_targets: K; no image has more targets.

    Returns class, cx, cy, w, h as float (B, K, 5), zeros where empty, and a bool mask (B, K) of the targets.
    """
    padded = targets.new_zeros((batch_size, max_targets, 5))
    per_image = torch.zeros(batch_size, dtype=torch.long, device=targets.device)
    if batch_size > 0 and targets.shape[0] > 0:
        image = targets[:, 0].long()
        per_image.scatter_add_(0, image, torch.ones_like(image))
        first = per_image.cumsum(0) - per_image
        slot = torch.arange(targets.shape[0], device=targets.device) - first[image]
        padded[image, slot] = targets[:, 1:]
    # Not ``mask[image, slot] = True``: that copies the scalar to the device, and the host waits for the copy.
    return padded, torch.arange(max_targets, device=targets.device) < per_image[:, None]
