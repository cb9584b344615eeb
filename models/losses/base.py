"""What the losses of all heads share.

A loss returns sums over a shard of the batch and one normalizer (`LossOutput`). No loss waits for the device or has a
shape that depends on values. Images contribute independently, so the sums of shards add up to the whole batch's.

The forward pass scatters by maximum only, which does not depend on the order. The backward pass adds by index: in the
anchor-free loss only one term of each sum is not 0; in the anchor loss there may be several (two targets in one cell),
whose order CUDA fixes only under torch.use_deterministic_algorithms.

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

from models.box_coding import cell_centers, from_host, grid_shapes
from utils.boxes import cxcywh_to_xyxy, scale_boxes
from utils.config.settings import Hyperparameters
from utils.structures import LossOutput, Targets, pad_targets

NO_OBJECT = -1e4  # a logit whose softplus is 0 in any floating-point type


@dataclass(frozen=True, slots=True)
class LossSettings:
    """What the losses of all heads depend on."""

    strides: tuple[int, ...]
    num_classes: int
    hyp: Hyperparameters
    label_smoothing: float = 0.0
    one_to_one: bool = False  # whether a target is assigned to one cell
    class_weights: Tensor | None = None  # float32 (C,), of the classes' cross-entropies; None: 1, see `class_weights`
    taught: tuple[int, ...] = ()  # classes of which a teacher gives targets, see `models.losses.distillation`
    unlabeled_only: bool = False  # whether it does so only where an image does not label them


class Criterion(nn.Module):
    """Base of the losses."""

    settings: LossSettings
    names: tuple[str, ...]  # of ``LossOutput.parts``
    gains: tuple[float, ...]  # of the same terms

    def __init__(self) -> None:
        super().__init__()
        self.teacher: nn.Module | None = None  # a `models.losses.distillation.Teacher`

    def forward(
        self, raw: Sequence[Tensor], targets: Targets, teacher_maps: Sequence[Tensor] | None = None
    ) -> LossOutput:
        """The loss of a shard of the batch, from the head's maps, one per level. ``teacher_maps``: of the same images;
        only a loss with a teacher reads them."""
        raise NotImplementedError

    def teacher_maps(self, images: Tensor) -> list[Tensor] | None:
        """The maps of the teacher for ``images`` (B, 3, H, W); None without one."""
        return None if self.teacher is None else self.teacher(images)

    def ignored_cells(self, raw: Sequence[Tensor], targets: Targets) -> IgnoredCells | None:
        """The cells in ignore regions; None if there are no regions."""
        if targets.ignore is None:
            return None
        return ignored_cells(targets.ignore, raw, self.settings.strides, self.settings.num_classes)

    def weighted(self, terms: Sequence[Tensor], normalizer: Tensor) -> LossOutput:
        """The output of a loss that is the sum of ``terms``, () each, times their gains."""
        parts = [gain * term for gain, term in zip(self.gains, terms, strict=True)]
        return LossOutput(sum(parts), normalizer, torch.stack(parts).detach())

    def compile_terms(self, *, has_regions: bool = False) -> None:
        """Compiles what training, not validation, computes on the device, for all sizes at once. By default nothing is
        compiled. ``has_regions``: whether batches may have regions to ignore."""

    def set_closing(self, closing: bool) -> None:
        """Called with True in the last epochs, which have no mosaic: a loss may then refine its boxes."""


class DualAssignmentLoss(Criterion):
    """The loss of a head with two branches (see models/heads/base.py): the one-to-many branch's plus ``gain`` times the
    one-to-one branch's (YOLOv10, Wang et al. 2024).

    In the paper each branch's sum is divided by that branch's own target scores, here both by the one-to-many branch's;
    ``gain`` stands for the ratio of the two, measured as about 2 on a fresh model and 6 on a trained one. No parameter
    receives gradients of both losses, so the gain only acts as a learning rate of the one-to-one layers.
    """

    def __init__(self, many: Criterion, one: Criterion, *, gain: float):
        super().__init__()
        self.many, self.one, self.gain = many, one, gain
        self.names = (*many.names, *(f"{name}_one" for name in one.names))

    def compile_terms(self, *, has_regions: bool = False) -> None:
        self.many.compile_terms(has_regions=has_regions)
        self.one.compile_terms(has_regions=has_regions)

    def set_closing(self, closing: bool) -> None:
        self.many.set_closing(closing)
        self.one.set_closing(closing)

    def forward(
        self, raw: Sequence[Tensor], targets: Targets, teacher_maps: Sequence[Tensor] | None = None
    ) -> LossOutput:
        """Args: ``raw`` and ``teacher_maps`` of the one-to-many branch, then those of the one-to-one branch."""
        levels = len(raw) // 2
        of_many, of_one = (teacher_maps[:levels], teacher_maps[levels:]) if teacher_maps else (None, None)
        many, one = self.many(raw[:levels], targets, of_many), self.one(raw[levels:], targets, of_one)
        parts = torch.cat((many.parts, self.gain * one.parts))
        return LossOutput(many.total + self.gain * one.total, many.normalizer, parts)


class IgnoredCells(NamedTuple):
    """The cells whose centers are in a region in which a class is ignored: outputs there have no loss, unless they are
    assigned to an object. Few images have regions, and only those are computed."""

    images: Tensor  # int64 (I,)
    cells: Tensor  # bool (I, N, C)

    def except_positive(self, positive: Tensor) -> IgnoredCells:
        """Without the cells that are ``positive``, bool (B, N)."""
        return self._replace(cells=self.cells & ~positive[self.images][..., None])

    def of_best_class(self, class_logits: Tensor) -> Tensor:
        """bool (B, *S): whether the class that an output predicts, from logits (B, *S, C), is ignored there, which
        decides about its objectness; ``cells`` are then (I, *S, C)."""
        predicted = class_logits.detach()[self.images].argmax(-1, keepdim=True)
        found = torch.zeros(class_logits.shape[:-1], dtype=torch.bool, device=class_logits.device)
        return found.index_copy_(0, self.images, self.cells.gather(-1, predicted)[..., 0])


def ignored_cells(ignore: np.ndarray, raw: Sequence[Tensor], strides: Sequence[int], num_classes: int) -> IgnoredCells:
    """The cells to ignore. ``ignore``: (R, 6) as in `Targets`, by image; ``raw``: maps (B, D, h, w), one per level."""
    shapes, device = grid_shapes(raw), raw[0].device
    centers, sizes = cell_centers(shapes, tuple(strides), device)
    # A region of many classes, such as an image that does not label them, has consecutive rows and is computed once.
    begins = np.r_[True, (ignore[1:, [0, 2, 3, 4, 5]] != ignore[:-1, [0, 2, 3, 4, 5]]).any(1)]
    images, first, image = np.unique(ignore[begins, 0].astype(np.int64), return_index=True, return_inverse=True)
    slot = np.arange(len(image)) - first[image]
    boxes = np.full((len(images), slot.max() + 1, 4), -1.0, np.float32)  # padding: no cell is inside
    boxes[image, slot] = ignore[begins, 2:]
    of_class = np.zeros((*boxes.shape[:2], num_classes + 1), np.float32)  # class -1, of all, is the last
    region = np.cumsum(begins) - 1
    of_class[image[region], slot[region], ignore[:, 1].astype(np.int64)] = 1
    of_class[..., :-1] += of_class[..., -1:]
    numbers, regions, members = (from_host(array, device) for array in (images, boxes, of_class[..., :-1]))
    canvas_wh = shapes[0][1] * strides[0], shapes[0][0] * strides[0]
    low, high = scale_boxes(cxcywh_to_xyxy(regions), *canvas_wh)[:, None].split(2, -1)
    points = (centers * sizes)[:, None]
    inside = ((points >= low) & (points <= high)).all(-1)  # (I, N, regions of an image)
    return IgnoredCells(numbers, inside.float() @ members > 0)


def with_empty_regions(ignore: np.ndarray | None, images: int, least: int) -> np.ndarray:
    """``ignore``, (R, 6) as in `Targets`, with regions of no cell in further images, so that at least ``least`` of the
    ``images`` have a region, or all of them."""
    ignore = np.zeros((0, 6), np.float32) if ignore is None else ignore
    present = np.unique(ignore[:, 0])
    absent = np.setdiff1d(np.arange(images), present)[: max(least - len(present), 0)]
    empty = np.zeros((len(absent), 6), np.float32)
    empty[:, 0] = absent
    empty[:, 1:] = -1, -1, -1, 0, 0  # all classes, a point outside of the canvas
    added = np.concatenate([ignore, empty])
    return added[added[:, 0].argsort(kind="stable")]


def class_weights(counts: np.ndarray, power: float) -> Tensor:
    """Weights float32 (C,) of the classes' cross-entropies, proportional to 1 / frequency ** power (1: Cui et al. 2019;
    1/2: Mahajan et al. 2018).

    A weight multiplies the whole term of its class, in the background too, so that scores stay unbiased. As each cell
    has a term of every class, their mean over classes is 1. A class without boxes has the weight 1 and does not count.

    Args: counts: int (C,), boxes.
    """
    weights, seen = np.ones(len(counts)), counts > 0
    inverse = (counts[seen] / counts.sum()) ** -float(power)
    weights[seen] = inverse * len(inverse) / inverse.sum()
    return torch.from_numpy(weights.astype(np.float32))


def canvas_targets(level: Tensor, stride: int, targets: Tensor, max_targets: int) -> tuple[Tensor, Tensor, Tensor]:
    """Targets, (M, 6) as in `Targets`, in a fixed shape: labels int64 (B, K), boxes (B, K, 4) xyxy canvas pixels, and
    mask bool (B, K), False for padding. ``level``: raw map (B, D, h, w), ``stride`` pixels per cell."""
    padded, mask = pad_targets(targets, level.shape[0], max_targets)
    boxes = scale_boxes(cxcywh_to_xyxy(padded[..., 1:]), level.shape[3] * stride, level.shape[2] * stride)
    return padded[..., 0].long(), boxes, mask


def smooth_labels(scores: Tensor, labels: Tensor, settings: LossSettings) -> Tensor:
    """Class targets (*S, C): ``scores`` (*S) at ``labels`` (*S), of which label smoothing (Szegedy et al. 2016) spreads
    the part eps over all classes. The sum over classes stays the same, and so do normalizer and background."""
    num_classes, eps = settings.num_classes, settings.label_smoothing
    one_hot = labels[..., None] == torch.arange(num_classes, device=labels.device)
    return scores[..., None] * (one_hot * (1 - eps) + eps / num_classes)
