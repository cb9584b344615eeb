"""All tensors of a model as one vector, and back, in few kernels.

`flatten` and `copy_from_flat` order values as PyTorch indexes them. `flatten_as` and `views_as` order them as they are
stored: convolution kernels (O, I, h, w) are channels_last by default, so their values are stored as (O, h, w, I).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn


def float_buffers(model: nn.Module) -> list[Tensor]:
    """The floating-point buffers of ``model`` (unwrapped), mostly running statistics of batch norms."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


@torch.no_grad()
def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of the values of ``tensors``, concatenated (1-D)."""
    return torch.cat([t.reshape(-1) for t in tensors]) if tensors else torch.zeros(0)


@torch.no_grad()
def copy_from_flat(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copies ``flat`` (1-D), as `flatten` returns it, into ``tensors``."""
    pieces = flat.split([t.numel() for t in tensors])
    if tensors:
        torch._foreach_copy_(tensors, [piece.view(t.shape) for piece, t in zip(pieces, tensors)])


def dense_format(tensor: Tensor) -> torch.memory_format | None:
    """The memory format, contiguous or channels_last, in which ``tensor`` is dense; None if it is dense in neither."""
    if tensor.is_contiguous():
        return torch.contiguous_format
    is_kernel = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_kernel else None


@torch.no_grad()
def flatten_as(tensors: Sequence[Tensor], likes: Sequence[Tensor]) -> list[Tensor]:
    """The values (n,) of each tensor in the memory order of its ``like``, which has the same shape and is dense: views
    where possible."""
    laid = (t.contiguous(memory_format=dense_format(like)) for t, like in zip(tensors, likes, strict=True))
    return [t.as_strided((t.numel(),), (1,)) for t in laid]


def views_as(vector: Tensor, likes: Sequence[Tensor]) -> list[Tensor]:
    """Views of ``vector`` (1-D, the concatenation of what `flatten_as` returns) with the shapes and strides of
    ``likes``. Fused optimizers require a gradient to have the strides of its parameter."""
    ends = accumulate((like.numel() for like in likes), initial=vector.storage_offset())
    return [vector.as_strided(like.shape, like.stride(), start) for like, start in zip(likes, ends)]
