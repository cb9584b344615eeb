"""Copies batches from a loader to the device while the previous step runs."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from utils.structures import Batch


class SideStream:
    """A separate CUDA stream on which batches are copied and rendered ahead."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[], Batch]) -> tuple[Batch, torch.cuda.Event]:
        """Queues ``work``. Returns its batch and an event that is recorded after it."""
        with torch.cuda.stream(self._stream):
            batch, done = work(), torch.cuda.Event()
            done.record()
        return batch, done

    def hand_over(self, batch: Batch, done: torch.cuda.Event) -> None:
        """Makes the current stream wait for ``batch``; the host does not."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(done)
        batch.record_stream(current)


class Prefetcher:
    """An iterator of batches on the device.

    On a GPU, `prefetch` copies batches (and renders them, with ``--render-on device``) on a separate stream while the
    previous step still runs; taking a batch makes the device wait for it, not the host. Torch keeps page-locked memory
    until its copy has finished. On other devices a batch is fetched when it is taken.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        *,
        device: torch.device,
        render: Callable[[Any], Batch] | None = None,
        ahead: bool | None = None,
        side: SideStream | None = None,
    ) -> None:
        """
        Args:
            batches: on the host.
            render: turns an element of ``batches`` into a batch on the device; None: elements are batches, to copy.
            ahead: whether `prefetch` does anything; None: on a GPU.
            side: the stream that batches are copied on; None: a `SideStream` on a GPU, no separate one elsewhere.
        """
        self._batches = batches
        self._render = render or (lambda batch: batch.to(device))
        self._side = SideStream(device) if side is None and device.type == "cuda" else side
        self._ahead = self._side is not None if ahead is None else ahead
        self._ready: deque[tuple[Batch, Any]] = deque()
        self._waited_s = 0.0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._ready:
            self._fetch()
        batch, done = self._ready.popleft()
        if done is not None:
            self._side.hand_over(batch, done)
        return batch

    def prefetch(self, count: int) -> None:
        """Fetches batches until ``count`` are ready, or all. Call it after a step has been queued."""
        with contextlib.suppress(StopIteration):
            while self._ahead and len(self._ready) < count:
                self._fetch()

    def take_wait(self) -> float:
        """Seconds spent waiting for the loader since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def _fetch(self) -> None:
        started = time.perf_counter()
        batch = next(self._batches)
        self._waited_s += time.perf_counter() - started
        if self._side is None:
            self._ready.append((self._render(batch), None))
            return
        self._ready.append(self._side.run(lambda: self._render(batch)))
