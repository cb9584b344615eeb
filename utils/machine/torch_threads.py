"""Limits the threads that an operation of torch uses on a CPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from utils.machine.resources import available_cores


def threads_of_process(processes: int) -> int:
    """Returns the number of threads for each of ``processes`` that train on this machine: torch's with
    ``OMP_NUM_THREADS``, else at most all cores but one, divided among them.

    The threads of an operation wait for each other, so another program on the core of one stops all: beside one busy
    program, training on two cores with two threads takes five to eight times as long as with one (benchmarks/LOG.md).
    Torch's number also exceeds the quota of a container.
    """
    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ:
        return threads
    return max(min(threads, (available_cores() - 1) // processes), 1)


@contextlib.contextmanager
def torch_threads(most: int) -> Iterator[None]:
    """Runs the block's operations with the calling thread and at most ``most - 1`` others. Short operations wait longer
    for other threads than these save, above all where other work needs the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, max(most, 1)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
