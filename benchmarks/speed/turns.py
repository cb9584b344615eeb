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

MARK = "@measured "  # begins the lines that `benchmarks.speed.sides.Side` reads
BOXES_PER_IMAGE = 12  # in the steps that both sides time
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


def _send(values: dict) -> None:
    print(MARK + json.dumps(values), flush=True)
