"""`Prefetcher` copies batches to the device while the previous step runs."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Iterator

import torch

from utils.batches import Batch


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream that copies to a GPU: always the same, because torch's allocator keeps memory for each, and a
    new one would be the next of 32."""
    return torch.cuda.Stream(device)


class Prefetcher:
    """Iterates over batches on the device, and fetches batches ahead.

    On a GPU, batches are copied on a separate stream while the previous step still runs; `next` makes the device wait
    for the batch, not the host. Torch keeps page-locked memory alive until it has been copied.
    """

    def __init__(self, batches: Iterator[Batch], *, device: torch.device) -> None:
        """``batches``: batches on the host."""
        self._batches = batches
        self._device = device
        self._stream = _copy_stream(device) if device.type == "cuda" else None
        self._ready: deque[tuple[Batch, torch.cuda.Event | None]] = deque()
        self._waited_s = 0.0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._ready:
            self._fetch()
        batch, copied = self._ready.popleft()
        if copied is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            batch.record_stream(current)
        return batch

    def prefetch(self, count: int) -> None:
        """Fetches batches until ``count`` are ready or none is left. Call this after queuing a step."""
        with contextlib.suppress(StopIteration):
            while len(self._ready) < count:
                self._fetch()

    def pop_wait_time(self) -> float:
        """Returns the seconds spent waiting for the loader since the last call."""
        waited_s = self._waited_s
        self._waited_s = 0.0
        return waited_s

    def _fetch(self) -> None:
        started = time.perf_counter()
        batch = next(self._batches)
        self._waited_s += time.perf_counter() - started
        with torch.cuda.stream(self._stream):  # without a stream, does nothing
            moved = batch.to(self._device)
            copied = None if self._stream is None else self._stream.record_event()
            self._ready.append((moved, copied))
