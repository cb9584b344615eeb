"""Batches from a loader to the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from utils.structures import Batch


class DeviceFeed:
    """An iterator of batches on the device.

    On a GPU, what `stage` asks for is copied (and rendered, where that is done on the device) on a stream of its own
    while the step before is still at work; whoever takes a batch makes the device, not the host, wait for it. Bytes
    are copied, not floats. Elsewhere a batch is fetched when it is taken.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        *,
        device: torch.device,
        render: Callable[[Any], Batch] | None = None,
        ahead: bool | None = None,
    ) -> None:
        """
        Args:
            batches: on the host.
            render: makes a batch on the device of one of ``batches``; None: they are batches and only move.
            ahead: stage at all; None: on a GPU.
        """
        self._batches = batches
        self._device = device
        self._render = render or (lambda batch: batch.to(device))
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead = device.type == "cuda" if ahead is None else ahead
        self._staged: deque[tuple[Batch, torch.cuda.Event | None]] = deque()
        self._waited_s = 0.0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._staged:
            self._fetch()
        batch, ready = self._staged.popleft()
        if ready is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(ready)
            batch.record_stream(current)
        return batch

    def stage(self, count: int) -> None:
        """Fetches ahead until ``count`` batches lie ready. To be called once a step has been queued."""
        while self._ahead and len(self._staged) < count:
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
            self._staged.append((self._render(batch), None))
            return
        with torch.cuda.stream(self._side):
            moved, ready = self._render(batch), torch.cuda.Event()
            ready.record()
        self._staged.append((moved, ready))
