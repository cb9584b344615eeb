"""Limits the threads that an operation of torch uses on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


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
