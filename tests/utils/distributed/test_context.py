from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
import torch

from tests.helpers.ranks import run_ranks
from utils.distributed.context import DistributedContext, broadcast_object, gather_on_main, torch_distributed_zero_first
from utils.distributed.join import join_run
from utils.errors import PeerFailure, PeerLost, Stopped, UserError


def test_a_plain_process_has_rank_zero_of_one():
    ctx = join_run(None, "cpu")
    assert (ctx.rank, ctx.local_rank, ctx.world_size, ctx.is_distributed, ctx.is_main) == (0, -1, 1, False, True)
    with torch_distributed_zero_first(ctx):
        pass
    assert gather_on_main(ctx, {"a": np.arange(2)})[0]["a"].tolist() == [0, 1]
    assert broadcast_object(ctx, "x") == "x"


@pytest.fixture
def three_gpus(monkeypatch) -> list[torch.device]:
    """The devices that become the current one."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


@pytest.mark.parametrize(("flag", "current"), [("1", 1), ("1,2", 1), ("cuda:2", 2), ("", 0)])
def test_the_first_gpu_of_a_process_becomes_the_current_one(three_gpus, flag, current):
    """Events, streams and pinned copies belong to the current device."""
    ctx = join_run(None, flag)
    assert three_gpus == [torch.device("cuda", current)] == [ctx.device]
    assert DistributedContext.single(ctx.device).device == ctx.device  # detect.py
    assert three_gpus == [ctx.device] * 2


def _order(ctx, folder):
    with torch_distributed_zero_first(ctx):
        existed = os.path.exists(f"{folder}/node{ctx.node_rank}")
        if ctx.is_node_leader:
            time.sleep(0.5)
            open(f"{folder}/node{ctx.node_rank}", "w").close()
    gathered = gather_on_main(ctx, {"rank": np.full(ctx.rank, ctx.rank)})  # rank 0 sends nothing
    return existed, broadcast_object(ctx, ctx.rank), gathered and [len(g["rank"]) for g in gathered]


def test_leaders_of_two_nodes_go_first(tmp_path):
    results = run_ranks(4, _order, str(tmp_path), local_world=2)
    assert [r[0] for r in results] == [False, True, False, True]
    assert [r[1] for r in results] == [0, 0, 0, 0]
    assert results[0][2] == [0, 1, 2, 3]
    assert results[1][2] is None


def _raise(ctx, rank, error):
    """Raises in one process, for which all others wait, and returns what each gets."""
    started = time.monotonic()
    try:
        with torch_distributed_zero_first(ctx):
            if ctx.rank == rank:
                raise error
    except (UserError, PeerFailure, Stopped) as raised:
        assert time.monotonic() - started < 50  # the timeout of the group is 60
        return type(raised), str(raised)
    return None


def test_those_that_wait_for_a_process_get_its_error_or_signal():
    first, *others = run_ranks(3, _raise, 0, UserError("no such folder: x"))
    assert first[0] is UserError
    assert all(kind is PeerFailure and "no such folder: x" in message for kind, message in others)
    assert run_ranks(4, _raise, 2, Stopped(75), local_world=2) == [(Stopped, "75")] * 4


def _lose_host(ctx):
    if ctx.rank == 0:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost), torch_distributed_zero_first(ctx):
        pass


def test_the_loss_of_the_process_with_the_store_ends_those_that_wait():
    assert run_ranks(3, _lose_host, lost=0) == [None] * 3


def _scan_for_long(ctx, seconds):
    """The first process works for longer than a collective may take; then all take part in one."""
    with torch_distributed_zero_first(ctx):
        time.sleep(seconds if ctx.is_main else 0)
    return broadcast_object(ctx, ctx.rank)


def test_a_working_leader_causes_no_timeout():
    assert run_ranks(4, _scan_for_long, 4.5, local_world=2, timeout_s=3) == [0, 0, 0, 0]
