"""Parameters as matrices and vectors in the order of their memory. Kernels (O, I, h, w) are channels_last by
default, so their values lie as (O, h, w, I)."""

from __future__ import annotations

from collections.abc import Sequence

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


@torch.no_grad()
def flatten_as(tensors: Sequence[Tensor], likes: Sequence[Tensor]) -> list[Tensor]:
    """Each tensor's values (n,) in the order in which those of its ``like``, of the same shape, lie in memory: views of
    tensors that lie as that does."""
    laid = [
        t if t.stride() == like.stride() else torch.empty_like(like, dtype=t.dtype).copy_(t)
        for t, like in zip(tensors, likes, strict=True)
    ]
    return [t.as_strided((t.numel(),), (1,)) for t in laid]


def view_as(piece: Tensor, like: Tensor) -> Tensor:
    """The values ``piece`` (n,) in the shape and the memory order of ``like``; undoes `flatten_as`. A view. Fused
    optimisers want a gradient to lie as its parameter does."""
    return piece.as_strided(like.shape, like.stride())
