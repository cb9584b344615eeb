"""Batches from a loader to the device, copied while the step before them runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from utils.structures import Batch


class Done(Protocol):
    """What is asked of an event, as `torch.cuda.Event` answers it."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class InFlight:
    """Keeps objects until the device has read their memory. A copy that does not block returns before it is made, and
    whoever gives up its source meanwhile may find the next batch drawn into it."""

    def __init__(self) -> None:
        self._held: deque[tuple[Any, Done]] = deque()

    def hold(self, source: Any, done: Done) -> None:
        """``done``: recorded after the reading, on one and the same stream at all calls."""
        self._held.append((source, done))

    def release(self) -> None:
        """Gives up what has been read. Waits for nothing."""
        while self._held and self._held[0][1].query():
            self._held.popleft()

    def wait(self) -> None:
        """Until all has been read."""
        while self._held:
            self._held[0][1].synchronize()
            self._held.popleft()


class SideStream:
    """A CUDA stream of its own for what is copied and rendered ahead."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[], Batch]) -> tuple[Batch, torch.cuda.Event]:
        """Queues ``work``. Returns its batch, and what tells that it has ended."""
        with torch.cuda.stream(self._stream):
            batch, done = work(), torch.cuda.Event()
            done.record()
        return batch, done

    def hand_over(self, batch: Batch, done: torch.cuda.Event) -> None:
        """Makes the current stream wait for ``batch``; the host does not."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(done)
        batch.record_stream(current)


class DeviceFeed:
    """An iterator of batches on the device.

    On a GPU, what `stage` asks for is copied (and rendered, where that is done on the device) on a stream of its own
    while the step before is still at work; whoever takes a batch makes the device, not the host, wait for it. Bytes
    are copied, not floats, and a batch on the host is kept until they have been. Elsewhere a batch is fetched when it
    is taken. As a context manager it ends when nothing on the host is read any more.
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
            render: makes a batch on the device of one of ``batches``; None: they are batches and only move.
            ahead: stage at all; None: on a GPU.
            side: where batches move; None: a `SideStream` on a GPU, and nowhere else than where they are asked for.
        """
        self._batches = batches
        self._render = render or (lambda batch: batch.to(device))
        self._side = SideStream(device) if side is None and device.type == "cuda" else side
        self._ahead = self._side is not None if ahead is None else ahead
        self._staged: deque[tuple[Batch, Any]] = deque()
        self._in_flight = InFlight()
        self._waited_s = 0.0

    def __enter__(self) -> DeviceFeed:
        return self

    def __exit__(self, *_: object) -> None:
        self._in_flight.wait()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._staged:
            self._fetch()
        batch, done = self._staged.popleft()
        if done is not None:
            self._side.hand_over(batch, done)
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
        self._in_flight.release()  # the loader may draw there again
        started = time.perf_counter()
        batch = next(self._batches)
        self._waited_s += time.perf_counter() - started
        if self._side is None:
            self._staged.append((self._render(batch), None))
            return
        moved, done = self._side.run(lambda: self._render(batch))
        self._in_flight.hold(batch, done)
        self._staged.append((moved, done))
