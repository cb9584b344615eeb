"""The number of threads of a process that trains."""

from __future__ import annotations

import pytest
import torch

from utils.machine import torch_threads
from utils.machine.torch_threads import threads_of_process


@pytest.mark.parametrize(
    ("of_torch", "cores", "processes", "threads"),
    [(8, 8, 1, 7), (8, 8, 2, 3), (2, 2, 1, 1), (1, 1, 1, 1), (4, 4, 8, 1), (8, 16, 1, 8), (64, 2, 1, 1)],
)
def test_a_core_is_left_to_other_programs(monkeypatch, of_torch, cores, processes, threads):
    """Torch counts neither hyper-threads nor the quota of a container."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: of_torch)
    monkeypatch.setattr(torch_threads, "available_cores", lambda: cores)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads_of_process(processes) == threads
    monkeypatch.setenv("OMP_NUM_THREADS", str(of_torch))
    assert threads_of_process(processes) == of_torch
