"""Parameters as vectors and matrices in the order of their memory: kernels (O, I, h, w) are channels_last, so their
values lie as (O, h, w, I)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def as_matrix(tensor: Tensor) -> Tensor:
    """(first, product of the others): a view, unless a kernel lies in another order."""
    return (tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor).flatten(1)


@torch.no_grad()
def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """A new 1-D tensor of all values, each tensor's in the order of its memory."""
    return torch.cat([t.permute(0, 2, 3, 1).reshape(-1) if t.dim() == 4 else t.reshape(-1) for t in tensors])


def unflatten(piece: Tensor, like: Tensor) -> Tensor:
    """A view of ``piece``, a vector or a matrix, in the shape of ``like``; undoes `flatten` and `as_matrix`."""
    if like.dim() != 4:
        return piece.view(like.shape)
    a, b, c, d = like.shape
    return piece.view(a, c, d, b).permute(0, 3, 1, 2)
