"""Parameters as matrices and vectors in the order of their memory. Kernels (O, I, h, w) are channels_last by
default, so their values lie as (O, h, w, I)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


def as_matrix(tensor: Tensor) -> Tensor:
    """(first, product of the others): a view, unless a kernel lies in another order."""
    return (tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor).flatten(1)


def unflatten(piece: Tensor, like: Tensor) -> Tensor:
    """A view of the matrix ``piece`` in the shape of ``like``; undoes `as_matrix`."""
    if like.dim() != 4:
        return piece.view(like.shape)
    a, b, c, d = like.shape
    return piece.view(a, c, d, b).permute(0, 3, 1, 2)


def memory_format(tensor: Tensor) -> torch.memory_format | None:
    """None where values do not lie one after another, as they do in either of the two formats."""
    if tensor.is_contiguous():
        return torch.contiguous_format
    is_kernel = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_kernel else None


@torch.no_grad()
def flatten_as(tensors: Sequence[Tensor], likes: Sequence[Tensor]) -> list[Tensor]:
    """Each tensor's values (n,) in the order in which those of its ``like``, of the same shape and with a
    `memory_format`, lie in memory: views of tensors that lie as that does."""
    laid = (t.contiguous(memory_format=memory_format(like)) for t, like in zip(tensors, likes, strict=True))
    return [t.as_strided((t.numel(),), (1,)) for t in laid]


def views_as(vector: Tensor, likes: Sequence[Tensor]) -> list[Tensor]:
    """Views of ``vector`` (1-D), in which the values of all ``likes`` lie one after another, in their shapes and memory
    order; undoes `flatten_as`. Fused optimisers want a gradient to lie as its parameter does."""
    ends = accumulate((like.numel() for like in likes), initial=vector.storage_offset())
    return [vector.as_strided(like.shape, like.stride(), start) for like, start in zip(likes, ends)]
