"""Functions with a hand-written backward pass, which reads and writes memory less often than autograd's, and one that
becomes other operators in ONNX graphs.

Legend: B images, I images with ignore regions, N cells over all levels, C classes, D channels, P selected cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

SOFTPLUS_THRESHOLD = 40.0  # above it softplus(x) is computed as x; not even float64 can represent the difference


class _DoubleNearest(torch.autograd.Function):
    """See `double_nearest`. torch's backward pass takes six times as long on a CPU."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2, mode="nearest")

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> Tensor:
        rows = gradient[:, :, ::2] + gradient[:, :, 1::2]
        return rows[..., ::2] + rows[..., 1::2]


def double_nearest(x: Tensor) -> Tensor:
    """Doubles height and width by repeating pixels: (B, D, h, w) to (B, D, 2h, 2w)."""
    return _DoubleNearest.apply(x)


class _SplitRows(torch.autograd.Function):
    """See `split_rows`. Autograd of cat, cast and split passes over memory three times as often."""

    @staticmethod
    def forward(ctx, width: int, *raw: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(raw[0].dtype, torch.float32)
        batch, channels = raw[0].shape[:2]
        cells = sum(level.shape[2] * level.shape[3] for level in raw)
        first = raw[0].new_empty((batch, cells, width), dtype=dtype)
        rest = raw[0].new_empty((batch, cells, channels - width), dtype=dtype)
        ctx.width = width
        ctx.dtype = raw[0].dtype
        ctx.shapes = [level.shape for level in raw]
        for level, level_first, level_rest in _views_by_level(ctx.shapes, first, rest, raw):
            level_first.copy_(level[..., :width])
            level_rest.copy_(level[..., width:])
        return first, rest

    @staticmethod
    @once_differentiable
    def backward(ctx, first: Tensor, rest: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [
            torch.empty(shape, dtype=ctx.dtype, device=first.device, memory_format=torch.channels_last)
            for shape in ctx.shapes
        ]
        for level, level_first, level_rest in _views_by_level(ctx.shapes, first, rest, gradients):
            level[..., : ctx.width].copy_(level_first)
            level[..., ctx.width :].copy_(level_rest)
        return None, *gradients


def _views_by_level(
    shapes: Sequence[torch.Size], first: Tensor, rest: Tensor, maps: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields views (B, h, w, channels) of each level's map and of its rows in ``first`` and ``rest``."""
    sizes = [shape[2] * shape[3] for shape in shapes]
    for shape, level, level_first, level_rest in zip(shapes, maps, first.split(sizes, 1), rest.split(sizes, 1)):
        grid_hw = shape[2:]
        yield level.permute(0, 2, 3, 1), level_first.unflatten(1, grid_hw), level_rest.unflatten(1, grid_hw)


def split_rows(raw: Sequence[Tensor], width: int) -> tuple[Tensor, Tensor]:
    """Computes `models.box_coding.flatten_levels`, split after ``width`` channels: (B, N, width) and (B, N, the rest),
    both contiguous."""
    return _SplitRows.apply(width, *raw)


class _GatherCells(torch.autograd.Function):
    """See `gather_cells`. Autograd's backward pass of index_select makes one more copy of the tensor it adds to."""

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
    """Selects the rows of ``values`` (B, N, D) at ``cells`` int64 (B, P): (B, P, D)."""
    return _GatherCells.apply(values, cells)


def _row_numbers(cells: Tensor, num_cells: int) -> Tensor:
    """Numbers ``cells`` int64 (B, P), each below N = ``num_cells``, over all images: int64 (B * P,)."""
    return (torch.arange(cells.shape[0], device=cells.device)[:, None] * num_cells + cells).flatten()


class _SparseCrossEntropy(torch.autograd.Function):
    """See `sparse_cross_entropy`. The gradient, sigmoid minus target, is computed in one tensor."""

    @staticmethod
    def forward(
        ctx, logits: Tensor, cells: Tensor, targets: Tensor, weights: Tensor | None, *ignored: Tensor
    ) -> Tensor:
        ctx.save_for_backward(logits, cells, targets, weights, *ignored)
        # BCE(x, t) = softplus(x) - t * x, whose second term is 0 except in a few cells.
        background = F.softplus(logits, threshold=SOFTPLUS_THRESHOLD)
        positive = gather_cells(logits, cells) * targets
        _clear(background, ignored)
        if weights is not None:
            background = background * weights
            positive = positive * weights
        return background.sum() - positive.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, cells, targets, weights, *ignored = ctx.saved_tensors
        result = logits.sigmoid()
        rows = _row_numbers(cells, logits.shape[1])
        result.view(-1, logits.shape[-1]).index_add_(0, rows, targets.flatten(0, 1), alpha=-1)
        result.mul_(gradient if weights is None else gradient * weights)
        _clear(result, ignored)
        return result, None, None, None, *(None for _ in ignored)


def _clear(values: Tensor, ignored: Sequence[Tensor]) -> None:
    """Sets ``values`` (B, N, C) to 0 where ``ignored``: empty, or images int64 (I,) and cells bool (I, N, C)."""
    if ignored:
        images, cells = ignored
        values.index_copy_(0, images, values.index_select(0, images).masked_fill_(cells, 0))


def sparse_cross_entropy(
    logits: Tensor,
    cells: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    ignored: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Sums the binary cross-entropy of all logits (B, N, C) against targets that are 0 except in a few cells.

    Args:
        logits: (B, N, C).
        cells: int64 (B, P).
        targets: (B, P, C); targets of repeated cells add up.
        weights: (C,), factors of the classes' terms; None: 1.
        ignored: images int64 (I,), and bool (I, N, C), logits without a loss; their targets must be 0.
    """
    return _SparseCrossEntropy.apply(logits, cells, targets, weights, *(ignored or ()))


def split_parts(x: Tensor, sizes: Sequence[int], dim: int) -> Sequence[Tensor]:
    """Computes ``x.split(sizes, dim)``. ONNX graphs get slices: OpenCV 4.7 splits into equal parts only, and cannot add
    a convolution to one of them."""
    if not torch.onnx.is_in_onnx_export():
        return x.split(sizes, dim)
    return [x.narrow(dim, end - size, size) for size, end in zip(sizes, accumulate(sizes))]
