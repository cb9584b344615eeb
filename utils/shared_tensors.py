"""Tensors that travel between processes: small ones inside the message, large ones in memory that both map."""

from __future__ import annotations

import math
import os
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

INLINE_BYTES = 65536


def new_shared(nbytes: int) -> torch.UntypedStorage:
    """Unset memory that another process maps too once a tensor in it is sent there.

    Torch would take a file in /dev/shm, which containers often limit to 64 MiB (``docker --shm-size``): training ends
    where that is full. This memory has no such limit; elsewhere than on Linux it is torch's.
    """
    if not hasattr(os, "memfd_create"):
        return torch.UntypedStorage._new_shared(nbytes)
    handle = os.memfd_create("lockstep-tensor")
    try:
        os.truncate(handle, nbytes)
        return torch.UntypedStorage._new_shared_fd_cpu(handle, nbytes)  # has a handle of its own, which is what is sent
    finally:
        os.close(handle)


class InlineTensors:
    """Base of dataclasses of tensors that workers send. Torch makes a file and a connection for every tensor, which
    takes longer than to copy a few numbers into the message that is sent anyway."""

    __slots__ = ()

    def __reduce__(self) -> tuple:
        return _rebuilt, (type(self), tuple(_packed(getattr(self, field.name)) for field in fields(self)))


class _Packed:
    """A tensor as numpy's array, which is pickled whole."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __reduce__(self) -> tuple:
        return _Packed, (self.array,)


def _packed(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_packed, value))
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return value
    if value.nbytes <= INLINE_BYTES and value.dtype != torch.bfloat16:
        return _Packed(value.detach().numpy())
    return value if value.is_shared() or value.nbytes == 0 else _shared(value.detach())


def _shared(tensor: Tensor) -> Tensor:
    """``tensor``, laid out as it is, in shared memory."""
    held = tensor.untyped_storage()
    storage = new_shared(held.nbytes())
    storage.copy_(held)
    return tensor.new_empty(0).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _rebuilt(kind: type, values: tuple) -> Any:
    return kind(*map(_unpacked, values))


def _unpacked(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_unpacked, value))
    return torch.from_numpy(value.array) if isinstance(value, _Packed) else value


def new_pixels(images: int, canvas_hw: tuple[int, int]) -> Tensor:
    """Unset uint8 (images, H, W, 3). In a loader's worker it lies in shared memory from the start, where torch would
    otherwise copy a batch to hand it over."""
    shape = (images, *canvas_hw, 3)
    if get_worker_info() is None or math.prod(shape) == 0:
        return torch.empty(shape, dtype=torch.uint8)
    return torch.empty(0, dtype=torch.uint8).set_(new_shared(math.prod(shape)), 0, shape)
