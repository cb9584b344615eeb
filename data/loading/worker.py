"""Runs in a loader's worker processes: renders the requested batches, collates their samples, and sends them back.

Torch creates a shared segment for each batch. The kernel has to find, clear and map its pages, which takes longer than
rendering an image. Here the parent assigns each request a slot of one mapping (`BatchSlots`); the slot is free again
when the last tensor of its batch is deleted. Without such memory or a free slot, new memory is allocated for each batch
(`new_pixels`); two workers then load only two thirds (320 px) or half (640 px) as many images per second.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import signal
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from data.samples.dataset import LoadImagesAndLabels
from utils.batches import Batch, BatchRequest, Sample, Targets, map_tensors
from utils.errors import UserError
from utils.machine.limits import explain_limit
from utils.pixels import RGB8, PixelFormat
from utils.process.signals import STOP_SIGNALS

# An orphan must end soon: it keeps sockets open, and other ranks notice the death of its parent when these close.
PARENT_CHECK_S = 0.5
INLINE_BYTES = 65536  # larger tensors are in shared memory
_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, BatchSlots] = weakref.WeakValueDictionary()


@dataclass(eq=False)
class RequestDataset(Dataset[Any]):
    """The data set as torch's DataLoader sees it: indexed by requests, each item a batch.

    Errors of the user or of the machine are returned as UserError, because torch would add a traceback to a raised one.
    """

    samples: LoadImagesAndLabels
    slots: BatchSlots | None = None  # slots to render into

    def __getitem__(self, request: BatchRequest) -> Batch | SentBatch | UserError:
        try:
            batch = self._render(request)
            return batch if get_worker_info() is None else SentBatch(batch, self.slots, request.slot)
        except Exception as error:
            message = str(error) if isinstance(error, UserError) else explain_limit(error)
            if message is None:
                raise
            return UserError(message)

    def _render(self, request: BatchRequest) -> Batch:
        """Renders a batch, in a slot if the request has one."""
        count = len(request.images)
        pixel_format = self.samples.sample_index.pixels
        if self.slots is None or request.slot is None:
            pixels = new_pixels(count, request.canvas_hw, pixel_format)
        else:
            shape = (count, *request.canvas_hw, pixel_format.channels)
            pixels = torch.from_numpy(self.slots.pixels(request.slot, shape, pixel_format.dtype))
        if count < len(request.keys):  # some images consist of four samples
            return collate_quad(self.samples.render(request), request, pixels)
        return collate(self.samples.render(request, list(pixels.numpy())), pixels)


def collate(samples: Sequence[Sample], pixels: Tensor) -> Batch:
    """Collates samples into a batch, with images of shape (B, C, H, W) in the channels_last layout.

    The images are copied to ``pixels`` (B, H, W, C), unless they were rendered there.
    """
    for sample, out in zip(samples, pixels.numpy()):
        if not np.may_share_memory(sample.image, out):  # it was not rendered in place
            out[:] = sample.image
    return Batch(
        images=pixels.permute(0, 3, 1, 2),
        targets=Targets.from_labels([sample.labels for sample in samples]),
        indices=torch.tensor([s.index for s in samples], dtype=torch.int64),
        original_hw=torch.tensor([s.original_hw for s in samples], dtype=torch.int32).reshape(-1, 2),
        letterbox=torch.tensor([(*s.gain_xy, *s.pad_xy) for s in samples], dtype=torch.float64).reshape(-1, 4),
        paths=tuple(s.path for s in samples),
    )


def collate_quad(samples: Sequence[Sample], request: BatchRequest, pixels: Tensor) -> Batch:
    """Collates as `collate` does, but joins four samples of half the canvas size into one image (``--quad``)."""
    groups = [[samples[i] for i in members] for members in request.images]
    return collate([group[0] if len(group) == 1 else _side_by_side(group) for group in groups], pixels)


def _side_by_side(samples: Sequence[Sample]) -> Sample:
    """Joins four samples in two rows. The result has the index and the path of the first sample."""
    first, second, third, fourth = (sample.image for sample in samples)
    corners = np.array([[0, 0], [0.5, 0], [0, 0.5], [0.5, 0.5]], np.float32)
    labels = np.concatenate([sample.labels for sample in samples])
    labels[:, 1:] /= 2
    labels[:, 1:3] += np.repeat(corners, [len(sample.labels) for sample in samples], 0)
    image = np.vstack([np.hstack([first, second]), np.hstack([third, fourth])])
    return replace(samples[0], image=image, labels=labels)


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


def init_worker(parent: int, worker: int) -> None:
    """Limits a worker to one thread and leaves signals to the parent.

    As a result, Ctrl-C prints no tracebacks of workers, and when a batch system sends SIGTERM to every process, the
    parent can still finish its step and save. ``parent``: process id of the parent, which the worker cannot query
    safely, because the parent may already have been killed.
    """
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    gc.freeze()  # a collection would write to, and so copy, the pages that a forked worker shares with its parent
    signal.set_wakeup_fd(-1)  # a fork inherits the descriptor of its parent
    for number in set(STOP_SIGNALS) - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):  # absent on macOS and Windows, where SIGTERM just ends the worker
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()


def _exit_with_parent(parent: int) -> None:
    """Ends the worker when the parent is gone, or sends the SIGTERM with which torch and multiprocessing stop workers.

    Ignores SIGTERM from other processes.
    """
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, PARENT_CHECK_S)
        if received is not None and received.si_pid == parent:
            break
    os._exit(0)
