"""What the losses of several heads share, and the loss of a head with two branches.

A loss returns sums over a shard of the batch and one normalizer (`LossOutput`). No loss waits for the device or has a
shape that depends on values. Images contribute independently, so the sums of shards add up to the whole batch's.

Label smoothing (Szegedy et al. 2016) spreads the part eps of a positive cell's class score evenly over all C classes.
The sum over classes stays the same, so it changes neither the normalizer nor the background, and nothing for one class.

Reproducibility: the forward pass scatters by maximum only, which does not depend on the order. In the backward pass,
selecting rows of logits becomes an indexed addition. In the anchor-free loss only one term of each sum is not 0; in the
anchor loss there may be several (two targets in one cell), and CUDA fixes their order only under
torch.use_deterministic_algorithms.

Legend: B images, K target slots, N cells over all levels, C classes, D channels, P picked cells, S any shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import softplus

from models.box_coding import cell_centers, grid_shapes
from utils.boxes import cxcywh_to_xyxy, scale_boxes
from utils.config.settings import Hyperparameters
from utils.structures import LossOutput, pad_targets

NO_OBJECT = -1e4  # a logit whose softplus is 0 in any floating-point type
THRESHOLD = 40.0  # softplus(x) becomes x beyond it; even float64 cannot tell the two apart there


@dataclass(frozen=True, slots=True)
class LossSettings:
    """What the losses of all heads depend on."""

    strides: tuple[int, ...]
    num_classes: int
    hyp: Hyperparameters
    label_smoothing: float = 0.0
    one_to_one: bool = False  # whether a target is assigned to one cell
    class_weights: Tensor | None = None  # float32 (C,), of the classes' cross-entropies; None: 1, see `class_weights`
    distills: bool = False  # whether an old model's outputs are targets too, see `models.losses.distillation`


class Criterion(nn.Module):
    """Base of the losses."""

    names: tuple[str, ...]  # of ``LossOutput.parts``
    gains: tuple[float, ...]  # of the same terms

    def weighted(self, terms: Sequence[Tensor], normalizer: Tensor) -> LossOutput:
        """The output of a loss that is the sum of ``terms``, () each, times their gains."""
        parts = [gain * term for gain, term in zip(self.gains, terms, strict=True)]
        return LossOutput(sum(parts), normalizer, torch.stack(parts).detach())

    def compile_terms(self) -> None:
        """Compiles what training, not validation, computes on the device, for all sizes at once. By default nothing is
        compiled."""

    def set_refining(self, refining: bool) -> None:
        """Called with True in the last epochs, which have no mosaic: a loss may then refine its boxes."""


def old_outputs(criterion: nn.Module, images: Tensor) -> tuple[list[Tensor], ...]:
    """What a loss takes in addition: the raw maps of its ``old_model`` for ``images`` (B, 3, H, W), if it has one."""
    old = getattr(criterion, "old_model", None)
    if old is None:
        return ()
    with torch.no_grad():
        return (old(images),)


def class_weights(counts: np.ndarray, power: float) -> Tensor:
    """Weights float32 (C,) of the classes' cross-entropies, proportional to 1 / frequency ** power (1: Cui et al. 2019;
    1/2: Mahajan et al. 2018).

    A weight multiplies the whole term of its class, in the background too, so that scores stay unbiased. Each cell has
    one such term of every class, however frequent: therefore the mean over classes is 1 (over boxes, a class with one
    box could outweigh all others). A class without boxes has the weight 1 and does not count.

    Args: counts: int (C,), boxes.
    """
    weights, seen = np.ones(len(counts)), counts > 0
    inverse = (counts[seen] / counts.sum()) ** -float(power)
    weights[seen] = inverse * len(inverse) / inverse.sum()
    return torch.from_numpy(weights.astype(np.float32))


def canvas_targets(level: Tensor, stride: int, targets: Tensor, max_targets: int) -> tuple[Tensor, Tensor, Tensor]:
    """Targets in a fixed shape: labels int64 (B, K), boxes (B, K, 4) xyxy canvas pixels, and mask bool (B, K), False
    for padding.

    Args:
        level: raw map (B, D, h, w) of one level, ``stride`` pixels a cell.
        targets: (M, 6) and ``max_targets`` as in `Batch`.
    """
    padded, mask = pad_targets(targets, level.shape[0], max_targets)
    boxes = scale_boxes(cxcywh_to_xyxy(padded[..., 1:]), level.shape[3] * stride, level.shape[2] * stride)
    return padded[..., 0].long(), boxes, mask


def ignored_cells(
    ignore: np.ndarray | None, raw: Sequence[Tensor], strides: Sequence[int], num_classes: int
) -> Tensor | None:
    """bool (B, N, C): the cells whose centers are in a region of their image in which the class is ignored.

    Args:
        ignore: (R, 6) as in `Batch`, by image; None: no region.
        raw: maps (B, D, h, w), one of each level.

    Returns None without a region.
    """
    if ignore is None:
        return None
    images, shapes, device = raw[0].shape[0], grid_shapes(raw), raw[0].device
    centers, sizes = cell_centers(shapes, tuple(strides), device)
    # A region of many classes, such as an image that does not label them, has consecutive rows and is computed once.
    begins = np.r_[True, (ignore[1:, [0, 2, 3, 4, 5]] != ignore[:-1, [0, 2, 3, 4, 5]]).any(1)]
    image = ignore[begins, 0].astype(np.int64)
    slot = np.arange(len(image)) - np.searchsorted(image, image)
    boxes = np.full((images, slot.max() + 1, 4), -1.0, np.float32)  # padding: no cell is inside
    boxes[image, slot] = ignore[begins, 2:]
    of_class = np.zeros((images, slot.max() + 1, num_classes + 1), np.float32)  # class -1, of all, is the last
    region = np.cumsum(begins) - 1
    of_class[image[region], slot[region], ignore[:, 1].astype(np.int64)] = 1
    of_class[..., :-1] += of_class[..., -1:]
    regions, members = (torch.from_numpy(a).to(device, non_blocking=True) for a in (boxes, of_class[..., :-1]))
    canvas_wh = shapes[0][1] * strides[0], shapes[0][0] * strides[0]
    low, high = scale_boxes(cxcywh_to_xyxy(regions), *canvas_wh)[:, None].split(2, -1)
    points = (centers * sizes)[:, None]
    inside = ((points >= low) & (points <= high)).all(-1)  # (B, N, regions of an image)
    return inside.float() @ members > 0


def of_best_class(ignored: Tensor, class_logits: Tensor) -> Tensor:
    """bool (*S): whether the class that an output predicts is ignored there, which decides about its objectness.

    Args: ignored, class_logits: (*S, C).
    """
    return ignored.gather(-1, class_logits.detach().argmax(-1, keepdim=True))[..., 0]


def without_loss(logits: Tensor, ignored: Tensor | None, positive: Tensor) -> Tensor:
    """``logits`` (*S), of the background where ``ignored`` bool (*S), unless ``positive`` bool (*S): their binary
    cross-entropy with a target of 0, and its gradient, are 0. With ``ignored`` None they stay as they are."""
    return logits if ignored is None else torch.where(ignored & ~positive, NO_OBJECT, logits)


def smooth_labels(scores: Tensor, labels: Tensor, settings: LossSettings) -> Tensor:
    """Class targets (*S, C): ``scores`` (*S) at ``labels`` (*S), a part of each spread over all classes."""
    num_classes, eps = settings.num_classes, settings.label_smoothing
    one_hot = labels[..., None] == torch.arange(num_classes, device=labels.device)
    return scores[..., None] * (one_hot * (1 - eps) + eps / num_classes)


class _GatherCells(torch.autograd.Function):
    """See `gather_cells`. Autograd's backward pass of index_select makes one more copy of the zeros it adds to."""

    @staticmethod
    def forward(ctx, values: Tensor, cells: Tensor) -> Tensor:
        rows = _row_numbers(cells, values.shape[1])
        ctx.save_for_backward(rows)
        ctx.shape = values.shape
        return values.flatten(0, 1).index_select(0, rows).view(*cells.shape, values.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        result = gradient.new_zeros(ctx.shape)
        result.flatten(0, 1).index_add_(0, rows, gradient.flatten(0, 1))
        return result, None


def gather_cells(values: Tensor, cells: Tensor) -> Tensor:
    """Rows of (B, N, D) at ``cells`` int64 (B, P): (B, P, D)."""
    return _GatherCells.apply(values, cells)


def _row_numbers(cells: Tensor, num_cells: int) -> Tensor:
    """``cells`` int64 (B, P) of N an image as row numbers int64 (B * P) among the cells of all images."""
    return (torch.arange(cells.shape[0], device=cells.device)[:, None] * num_cells + cells).flatten()


class _SparseCrossEntropy(torch.autograd.Function):
    """See `sparse_cross_entropy`. The gradient, sigmoid minus target, is computed in one tensor."""

    @staticmethod
    def forward(ctx, logits: Tensor, cells: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(logits, cells, targets, weights)
        background, positive = softplus(logits, threshold=THRESHOLD), gather_cells(logits, cells) * targets
        if weights is not None:
            background, positive = background * weights, positive * weights
        return background.sum() - positive.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        logits, cells, targets, weights = ctx.saved_tensors
        gradient = gradient if weights is None else gradient * weights
        rows = _row_numbers(cells, logits.shape[1])
        if logits.device.type == "cpu":
            result = logits.sigmoid()
            result.view(-1, logits.shape[-1]).index_add_(0, rows, targets.flatten(0, 1), alpha=-1)
            return result.mul_(gradient), None, None, None
        return scaled_difference(logits, rows, targets, gradient), None, None, None


def scaled_difference(logits: Tensor, rows: Tensor, targets: Tensor, gradient: Tensor) -> Tensor:
    """``gradient``, () or (C,), times (sigmoid minus target). The derivative of softplus is the sigmoid, and its kernel
    multiplies by the gradient too, which saves one pass over memory."""
    result = torch.ops.aten.softplus_backward(gradient.expand_as(logits), logits, 1, THRESHOLD)
    result.view(-1, logits.shape[-1]).index_add_(0, rows, (targets * gradient).flatten(0, 1), alpha=-1)
    return result


def sparse_cross_entropy(logits: Tensor, cells: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum of the binary cross-entropy of all logits (B, N, C), with targets that are 0 except in a few cells.

    Args:
        cells: int64 (B, P).
        targets: (B, P, C); targets of repeated cells add up.
        weights: (C,), of the classes' terms; None: 1.
    """
    return _SparseCrossEntropy.apply(logits, cells, targets, weights)


class DualAssignmentLoss(Criterion):
    """The one-to-many branch's loss plus ``gain`` times the one-to-one branch's (YOLOv10, Wang et al. 2024).

    In the paper each branch's sum is divided by that branch's own target scores. Here both are divided by the
    one-to-many branch's, because a loss has one normalizer; ``gain`` stands for the ratio of the two, measured as about
    2 on a fresh model and 6 on a trained one. No parameter receives gradients of both losses, so the gain only acts as
    a learning rate of the one-to-one layers; optimizers that normalize gradients (Muon, Adam) hardly depend on it.
    """

    def __init__(self, many: Criterion, one: Criterion, *, gain: float):
        super().__init__()
        self.many, self.one, self.gain = many, one, gain
        self.names = (*many.names, *(f"{name}_one" for name in one.names))

    def compile_terms(self) -> None:
        self.many.compile_terms()
        self.one.compile_terms()

    def set_refining(self, refining: bool) -> None:
        self.many.set_refining(refining)
        self.one.set_refining(refining)

    def forward(
        self,
        raw: Sequence[Tensor],
        targets: Tensor,
        max_targets: int,
        host_targets: np.ndarray | None = None,
        ignore: np.ndarray | None = None,
        *old: Sequence[Tensor],
    ) -> LossOutput:
        """Args: ``raw``, and ``old`` if given, the maps of the one-to-many branch, then those of the one-to-one branch;
        the others as in the branches' losses."""
        levels = len(raw) // 2
        many = self.many(raw[:levels], targets, max_targets, host_targets, ignore, *(maps[:levels] for maps in old))
        one = self.one(raw[levels:], targets, max_targets, host_targets, ignore, *(maps[levels:] for maps in old))
        parts = torch.cat((many.parts, self.gain * one.parts))
        return LossOutput(many.total + self.gain * one.total, many.normalizer, parts)
