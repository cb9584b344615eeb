"""Ranks and devices of the processes of a run, as launchers number them."""

from __future__ import annotations

import json

import pytest
import torch

from tests.helpers.messages import refused
from utils.distributed import placement
from utils.distributed.placement import place_process
from utils.process.launch import Launch


class _Store:
    """A store that already contains the values of the other processes."""

    def __init__(self, notes: list[list]) -> None:
        self.values = {f"node/{rank}": json.dumps(note).encode() for rank, note in enumerate(notes)}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key] for key in keys]


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([["a"], ["b"]], 0),  # one GPU for each task, which is its number 0
        ([["a", "b"], ["a", "b"]], 1),
        ([["a", "b"], ["c", "d"]], 1),
        ([["a"], ["a"]], None),
    ],
)
def test_each_process_of_a_node_uses_its_own_gpu(monkeypatch, seen, expected):
    """This is the second of two processes of one node."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen[1]))
    monkeypatch.setattr(placement, "identities", lambda devices: seen[1])
    store = _Store([[0, gpus] for gpus in seen])
    launch = Launch(1, 2, 1, 2, 0, "h", 1)
    if expected is None:
        with refused("2 processes on a node with 1 GPU: start one for each (--nproc_per_node or --spawn)"):
            place_process(store, launch, "")
    else:
        assert place_process(store, launch, "").device == torch.device("cuda", expected)


@pytest.mark.parametrize(
    ("gpus", "processes", "expected"),
    [
        (["a", "b", "c"], 3, [(0, 2, "cuda:0"), (1, 2, "cuda:1"), (0, 1, "cuda:2")]),
        (["a", "b"], 3, [(0, 2, "cuda:0"), (1, 2, "cuda:1"), (0, 1, "cpu")]),
        (["a"], 3, [None, None, (0, 1, "cpu")]),
    ],
)
def test_evaluating_processes_take_the_gpus_that_are_left(monkeypatch, gpus, processes, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(placement, "identities", lambda devices: gpus)
    notes = [[0, gpus]] * processes
    for rank, position in enumerate(expected):
        launch = Launch(rank, processes, rank, processes, 0, "h", 1)
        if position is None:
            with refused("2 processes on a node with 1 GPU: start one for each (--nproc_per_node or --spawn)"):
                place_process(_Store(notes), launch, "", 1)
        else:
            place = place_process(_Store(notes), launch, "", 1)
            assert (place.local_rank, place.local_world_size, str(place.device)) == position


def test_a_node_without_a_gpu_for_each_process_makes_all_evaluating_processes_use_the_cpu(monkeypatch):
    """The evaluating process is on the second node, which has two GPUs for two processes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(placement, "identities", lambda devices: ["a", "b"])
    launch = Launch(3, 4, 1, 2, 1, "h", 1)
    for other_gpus, device in ((["c", "d"], "cuda:1"), (["c"], "cpu")):
        store = _Store([[0, other_gpus], [0, other_gpus], [1, ["a", "b"]], [1, ["a", "b"]]])
        assert str(place_process(store, launch, "", 1).device) == device


def test_evaluating_processes_have_ranks_of_their_own(monkeypatch):
    """The table in the docstring of the module."""
    gpus = ["a", "b", "c"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(placement, "identities", lambda devices: gpus)
    notes = [[rank // 3, gpus] for rank in range(6)]
    places = [place_process(_Store(notes), Launch(rank, 6, rank % 3, 3, rank // 3, "h", 1), "", 2) for rank in range(6)]
    assert [place.is_evaluating for place in places] == [False, False, False, False, True, True]
    assert [(place.rank, place.world_size) for place in places] == [(0, 4), (1, 4), (2, 4), (3, 4), (0, 2), (1, 2)]
    local = [(place.local_rank, place.local_world_size) for place in places]
    assert local == [(0, 3), (1, 3), (2, 3), (0, 1), (0, 2), (1, 2)]
    assert [place.device.index for place in places] == [0, 1, 2, 0, 1, 2]
