"""The default number of loader workers follows from the cores of the node."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from data.loading.loader import WorkerSettings, _RequestLoader
from data.loading.worker_count import loader_workers, log_loader_workers
from utils.distributed.context import DistributedContext
from utils.logger import get_logger
from utils.pixels import RGB8
from utils.strings import counted


def on_node(processes: int, device: str) -> DistributedContext:
    return replace(DistributedContext.single(), local_world_size=processes, device=torch.device(device))


@pytest.mark.parametrize(("device", "has", "processes", "expected"), [
    ("cpu", 2, 1, 2), ("cpu", 2, 2, 1), ("cpu", 2, 4, 1), ("cpu", 16, 1, 8), ("cpu", 16, 4, 4), ("cpu", 7, 2, 3),
    ("cpu", 128, 8, 8), ("mps", 8, 1, 8),
    ("cuda", 16, 1, 14), ("cuda", 16, 4, 3), ("cuda", 2, 1, 1), ("cuda", 1, 2, 1), ("cuda", 128, 1, 16),
    ("cuda", 128, 8, 15),
])  # fmt: skip
def test_the_default_number_of_workers_is_an_equal_part_of_the_cores(
    monkeypatch, caplog, device, has, processes, expected
):
    monkeypatch.setattr("data.loading.worker_count.available_cores", lambda: has)
    with caplog.at_level(logging.INFO, logger="lockstep"):
        log_loader_workers(-1, on_node(processes, device), "val")
    assert loader_workers(-1, on_node(processes, device)) == expected
    where = f"{counted(has, 'core')}, {counted(processes, 'process')} on this node"
    assert f"{expected} per process ({where})" in caplog.text


def test_more_workers_than_cores_are_our_line_and_not_torchs(caplog, monkeypatch):
    monkeypatch.setattr("data.loading.worker_count.available_cores", lambda: 2)
    monkeypatch.setattr(get_logger(), "handlers", [])
    for requested in (1, 2):
        log_loader_workers(requested, on_node(2, "cpu"), "val")
        assert loader_workers(requested, on_node(2, "cpu")) == requested
    assert caplog.messages == ["--workers 2 (val): 4 workers on 2 cores; about one per core is fastest"]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    samples = SimpleNamespace(reader=SimpleNamespace(index=SimpleNamespace(pixels=RGB8)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _RequestLoader(samples, [], 1, WorkerSettings(9, make_batch=print))
