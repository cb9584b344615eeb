"""What the measuring processes of both sides do: each is set up once, and measures once for each line of JSON on its
standard input. ultralytics_side.py, which runs in the peer's environment, imports this module too, so it uses only
torch and the standard library.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MARK = "@measured "  # begins the lines that `benchmarks.speed.compare.Sides` reads
BOXES_PER_IMAGE = 12  # in the steps that both sides time
WARM_BATCHES = 3  # processed by a new step before it is timed
PREFETCHED_BATCHES = 10  # batches that may have been prefetched during the other side's turn


def call_named(functions: Mapping[str, Callable[..., None]]) -> None:
    """Calls the function that the command line names, with the arguments that follow as JSON."""
    name, arguments = sys.argv[1:]
    functions[name](**json.loads(arguments))


def take_turns(measure: Callable[..., dict]) -> None:
    """Calls ``measure`` with the arguments in each line of standard input, until its end, and prints the results."""
    for line in sys.stdin:
        print(MARK + json.dumps(measure(**json.loads(line))), flush=True)


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

    def calls(self, batches: int) -> int:
        """Returns how often to run for about ``batches`` batches, at least once."""
        return max(round(batches / self.batches), 1)


def take_step_turns(build: Callable[..., TimedStep], *, batches: int, device: str) -> None:
    """Takes turns (`take_turns`) in which the step is timed that the arguments of a turn name.

    A result has the seconds per batch and the step's facts, or the error if the memory is too small. A turn ends by
    freeing GPU memory, except for weights and optimizers, because other processes need it.

    Args:
        build: builds a step from the arguments of a turn, when they are first given.
        batches: number of batches to time in a turn.
        device: "cpu" or "cuda".
    """
    import torch

    steps: dict[tuple, TimedStep] = {}

    def measure(**names: Any) -> dict:
        key = tuple(names.items())
        try:
            if key not in steps:
                steps[key] = build(**names)
                for _ in range(steps[key].calls(WARM_BATCHES)):
                    steps[key].run()
            step = steps[key]
            if device == "cuda":
                step.run()  # allocates its memory again
            return {"seconds": seconds_of(step.run, step.calls(batches), device) / step.batches, **step.facts}
        except torch.OutOfMemoryError as error:
            steps.pop(key, None)
            return {"error": str(error).splitlines()[0]}
        finally:
            torch.cuda.empty_cache()

    take_turns(measure)


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
