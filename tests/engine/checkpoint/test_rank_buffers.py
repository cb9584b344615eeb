from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from engine.checkpoint.rank_buffers import gather_rank_buffers, put_means, restore_rank_buffers
from tests.helpers.ranks import run_ranks
from utils.distributed.context import DistributedContext


def network(value: float) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2), nn.BatchNorm2d(3))
    for buffer in model.buffers():
        buffer.fill_(value)
    return model


def _gather(ctx):
    model = nn.parallel.DistributedDataParallel(network(1.0))
    return [gather_rank_buffers(ctx, {"model": model, "ema": network(value)}) for value in (ctx.rank / 3, 0.1)]


def test_only_differing_buffers_are_gathered():
    (differing, nothing), *others = run_ranks(3, _gather)
    assert others == [[None, None]] * 2
    assert nothing is None
    assert differing["ema"].shape == (3, 10)
    assert torch.equal(differing["ema"][:, 0], torch.tensor([0.0, 1 / 3, 2 / 3]))


def test_the_saved_model_contains_means_and_common_buffers_unchanged():
    model = network(0.0)
    values = torch.full((3, 10), 0.8397902)
    assert values.mean(0)[0] != values[0, 0]  # their mean is rounded
    values[:, 0] = torch.tensor([1.0, 2.0, 6.0])
    state = model.state_dict()
    before = state["1.num_batches_tracked"].clone()
    put_means(values, model, state)
    assert state["1.running_mean"].tolist() == [3.0, values[0, 1].item()]
    assert torch.equal(state["2.running_var"], values[0, -3:])
    assert torch.equal(state["1.num_batches_tracked"], before)
    assert (model[1].running_mean == 0).all()  # the run's own buffers do not change


def test_the_same_number_of_ranks_restores_each_ranks_buffers():
    values = torch.arange(20.0).view(2, 10)
    ctx = replace(DistributedContext.single(), rank=1, local_rank=1, world_size=2, local_world_size=2, backend="gloo")
    model = network(0.0)
    restore_rank_buffers({"model": values}, ctx, {"model": model})
    assert model[1].running_mean.tolist() == [10, 11]
    assert model[2].running_var.tolist() == [17, 18, 19]
    restore_rank_buffers({"model": values + 1}, DistributedContext.single(), {"model": model})
    assert model[1].running_mean.tolist() == [10, 11]
    restore_rank_buffers(None, ctx, {"model": model})
