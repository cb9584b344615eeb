"""Times the phases of a loop on the device."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PhaseTimer:
    """Measures the phases of a loop over batches.

    On CUDA it records events on the current stream, so that the host does not wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._totals: dict[str, float] = defaultdict(float)  # seconds
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the duration of the block to phase ``name``."""
        if self._device.type == "cuda":
            start = _record_event()
            yield
            self._events.append((name, start, _record_event()))
        else:
            started = self._now()
            yield
            self._totals[name] += self._now() - started

    def _now(self) -> float:
        if self._device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter()

    def seconds(self) -> dict[str, float]:
        """Returns the totals of all phases so far. Waits for the device."""
        totals = dict(self._totals)
        if self._events:
            torch.cuda.synchronize(self._device)
        for name, start, end in self._events:
            totals[name] = totals.get(name, 0.0) + start.elapsed_time(end) / 1000
        return totals


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
