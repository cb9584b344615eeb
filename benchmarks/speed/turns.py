"""The loop of a measuring process: for each line of JSON on its standard input it measures once and prints a result.

`benchmarks.speed.sides` starts such processes. ultralytics_side.py, which runs in the peer's environment, also imports
this module, so it uses only torch and the standard library.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

MARK = "@measured "  # begins the lines that `benchmarks.speed.sides.Side` reads
BOXES_PER_IMAGE = 12  # in the steps that both sides time
WARM_BATCHES = 3  # processed by a new step before it is timed
PREFETCHED_BATCHES = 10  # batches that may have been prefetched during the other side's turn


def take_turns(measure: Callable[..., dict]) -> None:
    """Serves a measuring process that is set up: for each line of standard input, until its end, calls ``measure`` with
    the arguments in the line."""
    _send({})  # the process is ready
    for line in sys.stdin:
        _send(measure(**json.loads(line)))


def seconds_of(action: Callable[[], None], times: int, device: str) -> float:
    """Returns the median seconds of ``action``; on a GPU, where it only queues work, the mean over all runs."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(times):
            action()
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / times
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


@dataclass(frozen=True)
class TimedStep:
    """What a side times: each call of ``run`` processes ``batches`` batches."""

    run: Callable[[], None]
    batches: int = 1
    facts: dict[str, Any] = field(default_factory=dict)  # further values of a turn's result


class StepTimer:
    """Times the step that each turn names; a step is built when first named.

    Args:
        build: builds a step from the arguments of a turn.
        batches: number of batches to time in a turn.
        device: "cpu" or "cuda".
    """

    def __init__(self, build: Callable[..., TimedStep], *, batches: int, device: str) -> None:
        self._build = build
        self._batches = batches
        self._device = device
        self._steps: dict[tuple, TimedStep] = {}

    def measure(self, **names: Any) -> dict:
        """Returns seconds per batch, and the step's facts; or an error, if the memory is too small.

        A turn ends by freeing GPU memory, except for weights and optimizers, because other processes need it.
        """
        import torch

        key = tuple(names.items())
        try:
            if key not in self._steps:
                self._steps[key] = self._build(**names)
                for _ in range(_calls(self._steps[key], WARM_BATCHES)):
                    self._steps[key].run()
            step = self._steps[key]
            if self._device == "cuda":
                step.run()  # allocates its memory again
            seconds = seconds_of(step.run, _calls(step, self._batches), self._device)
            return {"seconds": seconds / step.batches, **step.facts}
        except torch.OutOfMemoryError as error:
            self._steps.pop(key, None)
            return {"error": str(error).splitlines()[0]}
        finally:
            torch.cuda.empty_cache()


def rate_of(counts: Iterator[int], seconds: float) -> float:
    """Returns images per second over the next ``seconds``, after skipping batches that were already prefetched."""
    for _ in range(PREFETCHED_BATCHES):
        next(counts)
    images = 0
    started = time.perf_counter()
    elapsed = 0.0
    while elapsed < seconds:
        images += next(counts)
        elapsed = time.perf_counter() - started
    return images / elapsed


def _calls(step: TimedStep, batches: int) -> int:
    """Returns how often to run a step for about ``batches`` batches, at least once."""
    return max(round(batches / step.batches), 1)


def _send(values: dict) -> None:
    print(MARK + json.dumps(values), flush=True)
