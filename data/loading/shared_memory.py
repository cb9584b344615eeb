"""Passes batches from workers to the parent process in memory that both map.

Torch creates a shared segment for each batch. The kernel has to find, clear and map its pages, which takes longer than
rendering an image. Here the parent assigns each request a slot of one mapping; the slot is free again when the last
tensor of its batch is deleted. Without such memory or a free slot, new memory is allocated for each batch
(`new_pixels`); two workers then load only two thirds (320 px) or half (640 px) as many images per second.
"""

from __future__ import annotations

import itertools
import math
import os
import weakref
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from utils.batches import map_tensors
from utils.pixels import RGB8, PixelFormat

INLINE_BYTES = 65536  # larger tensors are in shared memory
_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, BatchSlots] = weakref.WeakValueDictionary()


class BatchSlots:
    """Slots of equal size in one shared mapping. A page takes up memory only after something is written to it."""

    def __init__(self, count: int, slot_bytes: int) -> None:
        """Raises OSError or RuntimeError if the system cannot provide the memory."""
        self.slot_bytes = slot_bytes
        self._memory = torch.empty(0, dtype=torch.uint8).set_(new_shared(count * slot_bytes))
        self.number = next(_numbers)
        self._free = list(range(count))  # a stack, because the pages of the slot freed last are mapped already
        self._sent: set[int] = set()  # slots that workers hold
        _by_number[self.number] = self

    def take(self, wanted_bytes: int) -> int | None:
        """Reserves a slot for a worker to render into; returns None if no slot is free or large enough."""
        if wanted_bytes > self.slot_bytes or not self._free:
            return None
        slot = self._free.pop()
        self._sent.add(slot)
        return slot

    def reclaim(self) -> None:
        """Frees the slots held by workers. The workers must have ended."""
        self._free.extend(self._sent)
        self._sent.clear()

    def pixels(self, slot: int, shape: tuple[int, ...], dtype: np.dtype | type = np.uint8) -> np.ndarray:
        """Returns a view of a slot as an array."""
        first = slot * self.slot_bytes
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        return self._memory[first : first + nbytes].numpy().view(dtype).reshape(shape)

    def to_tensor(self, slot: int, shape: tuple[int, ...], dtype: np.dtype | type = np.uint8) -> Tensor:
        """Returns `pixels` as a tensor. The slot is freed when nothing refers to its memory anymore."""
        pixels = self.pixels(slot, shape, dtype)
        self._sent.discard(slot)
        weakref.finalize(pixels, self._free.append, slot).atexit = False  # torch's storage keeps the array alive
        return torch.from_numpy(pixels)


@dataclass(eq=False)
class SentBatch:
    """Wraps a batch, a dataclass of tensors (possibly nested), in a worker; unpickles as the batch itself.

    Torch creates a file and a connection for every tensor, which is slow for small tensors. Here small tensors are part
    of the message, and large ones are in memory that both processes map.
    """

    batch: Any
    slots: BatchSlots | None = None
    slot: int | None = None  # slot with the images of a `Batch`; None if they are elsewhere

    def __reduce__(self) -> tuple:
        if self.slots is None or self.slot is None:
            return _rebuild_batch, (map_tensors(self.batch, _portable),)
        images = self.batch.images
        shape = tuple(images.permute(0, 2, 3, 1).shape)
        rest = map_tensors(replace(self.batch, images=images[..., :0, :0].clone()), _portable)
        return _rebuild_batch, (rest, self.slots.number, self.slot, shape)


def _rebuild_batch(batch: Any, number: int = -1, slot: int = -1, shape: tuple[int, ...] = ()) -> Any:
    """Rebuilds a batch in the parent, with images of ``shape`` (B, H, W, C) from a slot of `BatchSlots` ``number``."""
    if number < 0:
        return batch
    images = _by_number[number].to_tensor(slot, shape, batch.images.numpy().dtype)
    return replace(batch, images=images.permute(0, 3, 1, 2))


@dataclass(eq=False)
class _ByValue:
    """A small tensor, pickled by value."""

    tensor: Tensor

    def __reduce__(self) -> tuple:
        return torch.from_numpy, (self.tensor.detach().numpy(),)


def _portable(tensor: Tensor) -> Tensor | _ByValue:
    """Returns ``tensor`` in a form that pickles fast: by value if it is small, otherwise in shared memory."""
    if tensor.device.type != "cpu":
        return tensor
    if tensor.nbytes <= INLINE_BYTES and tensor.dtype != torch.bfloat16:
        return _ByValue(tensor)
    if tensor.is_shared() or tensor.nbytes == 0:
        return tensor
    source = tensor.untyped_storage()
    storage = new_shared(source.nbytes())
    storage.copy_(source)
    return tensor.new_empty(0).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def new_shared(nbytes: int) -> torch.UntypedStorage:
    """Allocates uninitialized shared memory.

    Without memfd torch allocates it in /dev/shm, which containers often limit to 64 MiB (``docker --shm-size``).
    """
    if not hasattr(os, "memfd_create"):
        return torch.UntypedStorage._new_shared(nbytes)
    handle = os.memfd_create("lockstep-tensor")
    try:
        os.truncate(handle, nbytes)
        # Duplicates the handle.
        return torch.UntypedStorage._new_shared_fd_cpu(handle, nbytes)  # type: ignore[attr-defined]  # not in the stubs
    finally:
        os.close(handle)


def new_pixels(images: int, canvas_hw: tuple[int, int], pixels: PixelFormat = RGB8) -> Tensor:
    """Allocates uninitialized pixels (images, H, W, C).

    In a worker they are in shared memory; torch would otherwise copy the batch there.
    """
    shape = (images, *canvas_hw, pixels.channels)
    dtype = pixels.torch_dtype
    if get_worker_info() is None or math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.empty(0, dtype=dtype).set_(new_shared(math.prod(shape) * dtype.itemsize)).view(shape)


def open_slots(count: int, slot_bytes: int) -> BatchSlots | None:
    """Opens `BatchSlots`; returns None if the system cannot provide them."""
    if slot_bytes == 0:
        return None
    try:
        return BatchSlots(count, slot_bytes)
    except (OSError, OverflowError, RuntimeError):  # not enough memory, or more than 64 bits can address
        return None
