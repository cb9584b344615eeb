"""A model trains alike in one process and in two that share a GPU: with virtual ranks bit for bit, with DDP and ZeRO up
to rounding."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from benchmarks.same_bits import unequal_places
from tests.gpu.commands import TORCHRUN, run
from tests.gpu.machine import Figure, Machine

pytestmark = pytest.mark.gpu
PROCESSES = 2
ROUNDING = 5e-3  # relative difference of the weights' change
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
ALONE = {
    "SGD": {"optimizer": "SGD", "virtual_ranks": 4},
    "SGD again": {"optimizer": "SGD", "virtual_ranks": 4},
    "Muon": {"optimizer": "Muon", "virtual_ranks": 4},
    "Muon again": {"optimizer": "Muon", "virtual_ranks": 4},
    "start": {"steps": 0},
    "one shard per process": {"virtual_ranks": PROCESSES},  # computes as DDP does, up to rounding
}
TOGETHER = {
    "SGD": {"optimizer": "SGD", "virtual_ranks": 4},
    "Muon": {"optimizer": "Muon", "virtual_ranks": 4},
    "DDP": {},
    "ZeRO": {"zero": True},
}
States = dict[str, dict[str, torch.Tensor]]  # of trainings
Take = Callable[..., States]


@pytest.fixture(scope="module")
def take(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Take:
    """Takes the first steps of trainings, which are given by name, in one or several processes."""

    def take(trainings: dict[str, dict], *, launcher: tuple = (), backend: tuple = (), **environment: str) -> States:
        folder = tmp_path_factory.mktemp("states")
        common = {"model": machine.heads["yolov8"], "steps": 4}
        arguments = [json.dumps({name: common | settings for name, settings in trainings.items()}), folder]
        arguments += [machine.device, machine.imgsz, machine.batch_size, *backend]
        run(*launcher, "-m", "tests.gpu.rank_steps", *arguments, **environment)
        return {name: torch.load(folder / f"{name}.pt", weights_only=True) for name in trainings}

    return take


@pytest.fixture(scope="module")
def alone(take: Take) -> States:
    return take(ALONE)


@pytest.fixture(scope="module")
def together(take: Take) -> States:
    return take(TOGETHER, launcher=(*TORCHRUN, PROCESSES))


@pytest.mark.quick
@pytest.mark.parametrize("optimizer", ["SGD", "Muon"])
def test_two_processes_give_the_same_bits(alone: States, together: States, optimizer: str):
    assert not unequal_places(alone[optimizer], alone[f"{optimizer} again"])
    assert not unequal_places(alone[optimizer], together[optimizer])


def weights_of(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns the weights as one vector, without batch statistics: under DDP each rank has its own."""
    values = [v for key, v in state.items() if key.startswith("model.") and not key.endswith(STATISTICS)]
    return torch.cat([value.double().flatten() for value in values])


def distance(alone: States, state: dict[str, torch.Tensor]) -> float:
    """Returns the relative difference of the weights' change from one process's."""
    expected = weights_of(alone["one shard per process"])
    return float((weights_of(state) - expected).norm() / (expected - weights_of(alone["start"])).norm())


@pytest.mark.quick
@pytest.mark.parametrize("name", ["DDP", "ZeRO"])
def test_two_processes_compute_what_one_does(alone: States, together: States, figure: Figure, name: str):
    found = distance(alone, together[name])
    figure(f"{name}: difference of the weights' change", f"{found:.1e}")
    assert found <= ROUNDING


def test_nccl_computes_what_one_process_does(machine: Machine, alone: States, take: Take, figure: Figure):
    if machine.device == "cpu" or torch.cuda.nccl.version() < (2, 30):
        pytest.skip("needs NCCL 2.30, the first version that serves two processes on one GPU")
    trainings = {name: TOGETHER[name] for name in ("DDP", "ZeRO")}
    launcher = (*TORCHRUN, PROCESSES)
    states = take(trainings, launcher=launcher, backend=("nccl",), NCCL_MULTI_RANK_GPU_ENABLE="1")
    for name, state in states.items():
        found = distance(alone, state)
        figure(f"{name} by NCCL: difference of the weights' change", f"{found:.1e}")
        assert found <= ROUNDING
