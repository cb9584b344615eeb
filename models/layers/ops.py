"""Functions with a backward pass of their own, which passes over memory less often than autograd's.

Legend: B images, N cells over all levels, C classes, D channels, P picked cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

THRESHOLD = 40.0  # softplus(x) becomes x beyond it; even float64 cannot tell the two apart there


class _DoubleNearest(torch.autograd.Function):
    """Twice the height and width by repetition. torch's backward pass takes six times as long on a CPU."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2, mode="nearest")

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> Tensor:
        rows = gradient[:, :, ::2] + gradient[:, :, 1::2]
        return rows[..., ::2] + rows[..., 1::2]


def double_nearest(x: Tensor) -> Tensor:
    """(B, D, h, w) to (B, D, 2h, 2w)."""
    return _DoubleNearest.apply(x)


class _SplitRows(torch.autograd.Function):
    """See `split_rows`. With cat, cast and split, autograd makes three times as many passes over memory."""

    @staticmethod
    def forward(ctx, width: int, *raw: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(raw[0].dtype, torch.float32)
        batch, cells = raw[0].shape[0], sum(level.shape[2] * level.shape[3] for level in raw)
        first = raw[0].new_empty((batch, cells, width), dtype=dtype)
        rest = raw[0].new_empty((batch, cells, raw[0].shape[1] - width), dtype=dtype)
        ctx.width, ctx.dtype, ctx.shapes = width, raw[0].dtype, [level.shape for level in raw]
        for level, a, b in _by_level(ctx.shapes, first, rest, raw):
            a.copy_(level[..., :width])
            b.copy_(level[..., width:])
        return first, rest

    @staticmethod
    @once_differentiable
    def backward(ctx, first: Tensor, rest: Tensor) -> tuple[Tensor | None, ...]:
        like = {"dtype": ctx.dtype, "device": first.device, "memory_format": torch.channels_last}
        gradients = [torch.empty(shape, **like) for shape in ctx.shapes]
        for level, a, b in _by_level(ctx.shapes, first, rest, gradients):
            level[..., : ctx.width].copy_(a)
            level[..., ctx.width :].copy_(b)
        return None, *gradients


def _by_level(
    shapes: Sequence[torch.Size], first: Tensor, rest: Tensor, maps: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Views of a level's map and of its part of two tensors of rows, (B, h, w, channels) each."""
    sizes = [shape[2] * shape[3] for shape in shapes]
    for shape, level, a, b in zip(shapes, maps, first.split(sizes, 1), rest.split(sizes, 1)):
        yield level.permute(0, 2, 3, 1), a.unflatten(1, shape[2:]), b.unflatten(1, shape[2:])


def split_rows(raw: Sequence[Tensor], width: int) -> tuple[Tensor, Tensor]:
    """`models.box_coding.flatten_levels`, split after ``width`` channels: (B, N, width) and (B, N, the rest), each
    contiguous."""
    return _SplitRows.apply(width, *raw)


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
    def forward(
        ctx, logits: Tensor, cells: Tensor, targets: Tensor, weights: Tensor | None, *ignored: Tensor
    ) -> Tensor:
        ctx.save_for_backward(logits, cells, targets, weights, *ignored)
        background, positive = F.softplus(logits, threshold=THRESHOLD), gather_cells(logits, cells) * targets
        _clear(background, *ignored)
        if weights is not None:
            background, positive = background * weights, positive * weights
        return background.sum() - positive.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, cells, targets, weights, *ignored = ctx.saved_tensors
        result, rows = logits.sigmoid(), _row_numbers(cells, logits.shape[1])
        result.view(-1, logits.shape[-1]).index_add_(0, rows, targets.flatten(0, 1), alpha=-1)
        result.mul_(gradient if weights is None else gradient * weights)
        _clear(result, *ignored)
        return result, None, None, None, *(None for _ in ignored)


def _clear(values: Tensor, images: Tensor | None = None, cells: Tensor | None = None) -> None:
    """Sets ``values`` (B, N, C) to 0 in ``cells`` bool (I, N, C) of ``images`` int64 (I,)."""
    if images is not None:
        values.index_copy_(0, images, values.index_select(0, images).masked_fill_(cells, 0))


def sparse_cross_entropy(
    logits: Tensor,
    cells: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    ignored: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Sum of the binary cross-entropy of all logits (B, N, C), with targets that are 0 except in a few cells.

    Args:
        cells: int64 (B, P).
        targets: (B, P, C); targets of repeated cells add up.
        weights: (C,), of the classes' terms; None: 1.
        ignored: images int64 (I,) and bool (I, N, C), their logits without a loss, whose targets are 0.
    """
    return _SparseCrossEntropy.apply(logits, cells, targets, weights, *(ignored or ()))
