"""Where the time of a loop over batches goes, without making the device wait to find out."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


class StageClock:
    """Seconds by stage. On CUDA a stage is timed by events on the current stream, else by the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._device = device

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        if self._device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
            return
        started = time.perf_counter()
        yield
        if self._device.type == "mps":
            torch.mps.synchronize()
        self._seconds[name] += time.perf_counter() - started

    def waits(self, iterable: Iterable[T], name: str = "wait") -> Iterator[T]:
        """Passes items through, counting the host's time until each comes."""
        iterator = iter(iterable)
        while True:
            started = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self._seconds[name] += time.perf_counter() - started
            yield item

    def seconds(self) -> dict[str, float]:
        """Totals so far; waits for the device."""
        if self._events:
            torch.cuda.synchronize(self._device)
        for name, start, end in self._events:
            self._seconds[name] += start.elapsed_time(end) / 1000
        self._events.clear()
        return dict(self._seconds)
