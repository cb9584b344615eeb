"""`WorkerPool`: processes that render a loader's batches.

Each worker gets requests by a connection of its own, and sends a batch for each. Images are rendered into slots of
memory that all processes map (`BatchSlots`); the rest of a batch is part of its message, as are images for which no
slot is free. The processes share no lock, so a worker can be killed at any time.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from queue import SimpleQueue

import cv2
import numpy as np
import torch
from torch import Tensor

from data.loading.collate import render_batch
from data.samples.dataset import LoadImagesAndLabels
from utils.batches import Batch, BatchRequest, map_tensors
from utils.errors import UserError
from utils.machine.limits import explain_limit
from utils.pixels import PixelFormat
from utils.process.signals import STOP_SIGNALS, killed_by

PREFETCHED_BATCHES = 2  # per worker
RESERVED_BATCHES = 4  # slots for batches that the parent is still using
# By default, from Python 3.14 on, the workers' parent would be another process.
CONTEXT = multiprocessing.get_context("fork") if sys.platform == "linux" else multiprocessing.get_context("spawn")


class WorkerPool:
    """Workers that take turns, so batches come in the order of their requests.

    They end when the pool is closed or deleted, and with this process.
    """

    def __init__(self, samples: LoadImagesAndLabels, *, workers: int, max_pixels: int, pin_memory: bool) -> None:
        """
        Args:
            max_pixels: height times width, summed over the images of the largest batch.
            pin_memory: whether a thread copies the batches to page-locked memory.
        """
        self.capacity = workers * PREFETCHED_BATCHES  # pending requests
        self._slots = BatchSlots(self.capacity + RESERVED_BATCHES, max_pixels, samples.sample_index.pixels)
        self._pinning: ThreadPoolExecutor | None = None
        if pin_memory:
            device = torch.cuda.current_device()
            self._pinning = ThreadPoolExecutor(1, "pin memory", initializer=_prepare_thread, initargs=(device,))
        self.pending: deque[Callable[[], Batch]] = deque()  # waits for the batch of each request
        cv2.setNumThreads(1)  # ends OpenCV's threads: a fork would inherit their locks, but not the threads
        self._workers: list[tuple[Connection, BaseProcess]] = []
        self.close = Finalize(self, _end, (self._workers,), exitpriority=0)
        for _ in range(workers):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=run_worker, args=(theirs, ours, samples, self._slots), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((ours, process))
        self._turns = itertools.cycle(self._workers)

    def request(self, request: BatchRequest) -> None:
        """Requests a batch from the worker whose turn it is."""
        connection, process = next(self._turns)
        slot = self._slots.take(request)
        with contextlib.suppress(OSError):  # the worker has been killed, as `receive` will say
            connection.send((request, slot))
        receive = partial(_receive_batch, connection, process, self._slots, request, slot)
        self.pending.append(self._pinning.submit(_pinned, receive).result if self._pinning else receive)

    def receive(self) -> Batch:
        """Waits for the batch of the oldest request. Raises the error of its worker, or UserError if the worker has
        been killed."""
        return self.pending.popleft()()


def _receive_batch(
    connection: Connection, process: BaseProcess, slots: BatchSlots, request: BatchRequest, slot: int | None
) -> Batch:
    try:
        answer = connection.recv()
    except (EOFError, OSError):
        process.join()
        code = process.exitcode or 0
        ended = f"was {killed_by(-code)}" if code < 0 else f"ended with exit code {code}"
        raise UserError(
            f"a loader process {ended} (if memory ran out, see dmesg, use fewer --workers, a smaller --batch-size or "
            "--imgsz, or no --cache ram)"
        ) from None
    if isinstance(answer, Exception):
        raise answer
    batch, pixels = answer
    images = torch.from_numpy(pixels) if slot is None else slots.to_tensor(slot, request)
    return replace(batch, images=images.permute(0, 3, 1, 2))


def _pinned(receive: Callable[[], Batch]) -> Batch:
    return receive().pin_memory()


def _prepare_thread(device: int) -> None:
    """Limits the thread that pins memory to one core, and to the GPU of this process."""
    torch.set_num_threads(1)
    torch.cuda.set_device(device)


def _end(workers: list[tuple[Connection, BaseProcess]]) -> None:
    for _, process in workers:
        process.kill()
    for _, process in workers:
        process.join()


class BatchSlots:
    """Slots of equal size in one shared mapping. A page takes up memory only after something is written to it.

    New memory for each batch would be slower: the kernel has to find, clear and map its pages, which takes longer than
    rendering an image.
    """

    def __init__(self, count: int, max_pixels: int, pixel_format: PixelFormat) -> None:
        """``max_pixels``: height times width, summed over the images of the largest batch."""
        self._pixel_format = pixel_format
        self._slot_bytes = max_pixels * pixel_format.nbytes
        self._free: list[int] = []  # a stack, because the pages of the slot freed last are mapped already
        with contextlib.suppress(OSError, OverflowError, RuntimeError, ValueError):  # the system has no such memory
            self._memory = _shared_bytes(count * self._slot_bytes).view(count, self._slot_bytes)
            self._free.extend(range(count))

    def take(self, request: BatchRequest) -> int | None:
        """Reserves a slot for a batch; returns None if none is free or large enough."""
        nbytes = len(request.images) * math.prod(request.canvas_hw) * self._pixel_format.nbytes
        return self._free.pop() if self._free and nbytes <= self._slot_bytes else None

    def pixels(self, slot: int, request: BatchRequest) -> np.ndarray:
        """Returns the memory of a slot as the pixels (B, H, W, C) of a batch."""
        shape = (len(request.images), *request.canvas_hw, self._pixel_format.channels)
        dtype = self._pixel_format.dtype
        nbytes = math.prod(shape) * dtype.itemsize
        return self._memory[slot, :nbytes].numpy().view(dtype).reshape(shape)

    def to_tensor(self, slot: int, request: BatchRequest) -> Tensor:
        """Returns `pixels` as a tensor. The slot is freed when nothing refers to its memory anymore."""
        pixels = self.pixels(slot, request)
        weakref.finalize(pixels, self._free.append, slot).atexit = False  # torch's storage keeps the array alive
        return torch.from_numpy(pixels)


def _shared_bytes(count: int) -> Tensor:
    """Allocates ``count`` uninitialized bytes that workers share, with fork outside of /dev/shm, which containers often
    limit to 64 MiB."""
    if CONTEXT.get_start_method() == "fork":
        return torch.from_numpy(np.frombuffer(mmap.mmap(-1, count), np.uint8))
    return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(count))


def run_worker(
    connection: Connection, parents_end: Connection, samples: LoadImagesAndLabels, slots: BatchSlots
) -> None:
    """Answers requests until the parent is gone. ``parents_end``: its copy in this process."""
    parents_end.close()  # otherwise the connection would not end with the parent
    _prepare_process()
    # Threads receive and send, so that this one only renders. Parent and worker cannot both wait to send a message.
    requests: SimpleQueue[tuple[BatchRequest, int | None]] = SimpleQueue()
    answers: SimpleQueue[tuple[Batch, np.ndarray | None] | Exception] = SimpleQueue()
    threading.Thread(target=_repeat, args=(lambda: requests.put(connection.recv()),), daemon=True).start()
    threading.Thread(target=_repeat, args=(lambda: connection.send(answers.get()),), daemon=True).start()
    while True:
        answers.put(_answer(samples, slots, *requests.get()))


def _repeat(exchange: Callable[[], None]) -> None:
    """Exchanges messages, and ends the process when its parent is gone.

    An orphan must end soon: it keeps sockets open, and other ranks notice the death of its parent when these close.
    """
    try:
        while True:
            exchange()
    finally:
        os._exit(1)


def _prepare_process() -> None:
    """Limits a worker to one thread and leaves signals to the parent.

    As a result, Ctrl-C prints no tracebacks of workers, and when a batch system sends SIGTERM to every process, the
    parent can still finish its step and save.
    """
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    gc.freeze()  # a collection would write to, and so copy, the pages that a forked worker shares with its parent
    signal.set_wakeup_fd(-1)  # a fork inherits the descriptor of its parent
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _answer(
    samples: LoadImagesAndLabels, slots: BatchSlots, request: BatchRequest, slot: int | None
) -> tuple[Batch, np.ndarray | None] | Exception:
    """Returns a batch without images and, unless they are in a slot, its pixels (B, H, W, C); or an error for the
    parent to raise, a UserError if the user or the machine has caused it."""
    try:
        pixels = None if slot is None else slots.pixels(slot, request)
        batch = render_batch(samples, request, pixels)
        rest = map_tensors(replace(batch, images=batch.images[:0]), _ByValue)
        return rest, batch.images.permute(0, 2, 3, 1).numpy() if slot is None else None
    except Exception as error:
        message = str(error) if isinstance(error, UserError) else explain_limit(error)
        if message is None:
            return RuntimeError(f"in a loader process:\n{traceback.format_exc()}")
        return UserError(message)


@dataclass(eq=False)
class _ByValue:
    """A tensor that is part of a message. By default, torch creates a file and a connection for each."""

    tensor: Tensor

    def __reduce__(self) -> tuple:
        return torch.from_numpy, (self.tensor.numpy(),)
