"""Settings that a number of processes rules out are refused before anything is built or read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.train.step import check_step_settings
from tests.helpers.messages import refused
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext

SINGLE = DistributedContext.single("cpu")


@pytest.mark.parametrize(
    ("processes", "settings"),
    [
        (3, {"sync_bn": 2}),
        (3, {"deterministic": True}),
        (4, {"virtual_ranks": 2}),
        (2, {"sync_bn": 2, "deterministic": True}),
        (1, {"pipeline": 2}),
        (3, {"pipeline": 2}),
        (2, {"pipeline": 2, "batch_size": -1}),
        (2, {"pipeline": 2, "virtual_ranks": 2, "sync_bn": -1}),
        (4, {"pipeline": 2, "sync_bn": 2, "compile": True}),
        (2, {"pipeline": 2, "keep_old": True}),
        (0, {"sync_bn": -1}),  # replicas of one process
    ],
)
def test_refused(processes, settings):
    both = replace(SINGLE, devices=(torch.device("cuda:0"), torch.device("cuda:1")))
    with refused():
        check_step_settings(ranks(processes) if processes else both, TrainConfig(**settings))


def test_settings_that_the_number_of_processes_allows():
    for processes, settings in (
        (1, {"deterministic": True, "sync_bn": 2}),
        (3, {"sync_bn": -1}),
        (4, {"sync_bn": 2, "amp": "bf16"}),
        (2, {"virtual_ranks": 8}),
        (6, {"pipeline": 2, "deterministic": True, "zero": True}),
    ):
        check_step_settings(ranks(processes), TrainConfig(**settings))


def ranks(count: int) -> DistributedContext:
    """Rank 0 of ``count`` processes; there is no process group, and none is used."""
    return SINGLE if count == 1 else replace(SINGLE, rank=0, local_rank=0, world_size=count)
