"""All tensors of a model as one vector, and back, in few kernels.

`flatten` and `copy_from_flat` order values as PyTorch indexes them. `flatten_as` and `views_as` order them as they are
stored: convolution kernels (O, I, h, w) are channels_last by default, so their values are stored as (O, h, w, I).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def float_buffers(model: nn.Module) -> list[Tensor]:
    """Lists the floating-point buffers of ``model`` (unwrapped), mostly running statistics of batch norms."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


@torch.no_grad()
def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Copies the values of ``tensors`` into one vector (1-D)."""
    return torch.cat([t.reshape(-1) for t in tensors]) if tensors else torch.zeros(0)


@torch.no_grad()
def copy_from_flat(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copies ``flat`` (1-D), as `flatten` returns it, into ``tensors``."""
    pieces = flat.split([t.numel() for t in tensors])
    if tensors:
        torch._foreach_copy_(list(tensors), [piece.view(t.shape) for piece, t in zip(pieces, tensors)])


def dense_format(tensor: Tensor) -> torch.memory_format | None:
    """Returns the memory format, contiguous or channels_last, in which ``tensor`` is dense; None if in neither."""
    if tensor.is_contiguous():
        return torch.contiguous_format
    is_kernel = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_kernel else None


@torch.no_grad()
def flatten_as(tensors: Sequence[Tensor], likes: Sequence[Tensor]) -> list[Tensor]:
    """Returns the values (n,) of each tensor in the memory order of its ``like``, which has the same shape and is
    dense. The results are views where possible.

    Raises ValueError for a ``like`` that is neither contiguous nor channels_last.
    """
    vectors = []
    for tensor, like in zip(tensors, likes, strict=True):
        memory_format = dense_format(like)
        if memory_format is None:
            raise ValueError(
                f"neither contiguous nor channels_last: shape {tuple(like.shape)}, strides {like.stride()}"
            )
        dense = tensor.contiguous(memory_format=memory_format)
        vectors.append(dense.as_strided((dense.numel(),), (1,)))
    return vectors


def views_as(vector: Tensor, likes: Sequence[Tensor]) -> list[Tensor]:
    """Returns views of ``vector`` (1-D, the concatenation of what `flatten_as` returns) with the shapes and strides of
    ``likes``. Fused optimizers require a gradient to have the strides of its parameter."""
    views = []
    start = int(vector.storage_offset())  # torch's stubs allow a symbolic offset
    for like in likes:
        views.append(vector.as_strided(like.shape, like.stride(), start))
        start += like.numel()
    return views


def gradient_vector(parameters: Sequence[nn.Parameter], *others: Tensor) -> Tensor:
    """Concatenates the gradients, with zeros where a parameter has none, and ``others`` (n,) into one vector."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return torch.cat([*flatten_as(gradients, parameters), *(tensor.to(gradients[0]) for tensor in others)])


def set_gradients(parameters: Sequence[nn.Parameter], vector: Tensor) -> Tensor:
    """Makes the gradients views of ``vector``, as `gradient_vector` returns it. Returns the values that follow them."""
    for parameter, gradient in zip(parameters, views_as(vector, parameters)):
        parameter.grad = gradient
    return vector[sum(p.numel() for p in parameters) :]
