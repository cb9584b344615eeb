"""Wrapping, unused parameters, sharded optimizer state, groups of batch norm; on real gloo ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.optim.build import OptimizerSettings, build_optimizer
from engine.parallel.ddp import average_buffers, freeze_unused, parallelize
from engine.train.step import drop_zero_gradients
from tests.engine.train.steps import global_batch, make_step, weights_of
from tests.helpers.ranks import run_ranks
from tests.helpers.repository import ROOT
from tests.helpers.same_content import assert_same_content
from tests.helpers.scripts import SMALL, run_python
from tests.helpers.tiny import write_dataset, write_model
from utils.distributed.context import DistributedContext


class _Forked(nn.Module):
    """A model with a branch whose result is not used, and one that is used in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Conv2d(3, 4, 3)
        self.dropped = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.auxiliary = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        self.dropped(x)
        main = self.norm(self.used(x))
        return [main, self.auxiliary(x)] if self.training else [main]


def _forked_step(ctx) -> dict[str, torch.Tensor | None]:
    torch.manual_seed(0)
    model = _Forked()
    freeze_unused(model, torch.ones(2, 3, 8, 8))
    wrapped = parallelize(model, ctx, static=True)
    for _ in range(2):  # otherwise DDP raises at the second step
        sum(level.square().sum() for level in wrapped(torch.ones(2, 3, 8, 8) * (ctx.rank + 1))).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_ddp_trains_with_a_dropped_branch():
    first, second = run_ranks(2, _forked_step)
    assert [name for name in first if first[name] is None] == ["dropped.weight", "dropped.bias"]
    assert_same_content(first, second)


def _sharded(ctx, optimizer: str, sharded: bool):
    step, model = make_step(ctx, "anchor_free", optimizer=optimizer, sync_bn=ctx.is_distributed)
    settings = OptimizerSettings(lr=0.01, momentum=0.9, weight_decay=5e-4, sharded=sharded)
    step.optimizer = build_optimizer(model, optimizer, settings)
    share = global_batch().shard(3 * ctx.rank, 3 * ctx.rank + 3)
    for update in (1, 2, 3):
        if update == 2:
            step.optimizer.param_groups[0]["lr"] = 0.02
        step([share], [6], update)
    held = sum(
        v.numel()
        for o in step.optimizer.optimizers
        for s in getattr(o, "optim", o).state.values()
        for v in s.values()
        if isinstance(v, torch.Tensor)
    )
    step.optimizer.consolidate()
    state = step.optimizer.state_dict() if ctx.is_main else None
    return weights_of(model), state, held


SHARDABLE = ["SGD", "AdamW", "Muon"]


def _whole_and_sharded(ctx):
    return [[_sharded(ctx, optimizer, sharded) for sharded in (False, True)] for optimizer in SHARDABLE]


@pytest.fixture(scope="module")
def trained_with_zero() -> dict[str, tuple]:
    """What each of two processes has trained without and with sharded state, by optimizer. One pair trains all."""
    return dict(zip(SHARDABLE, zip(*run_ranks(2, _whole_and_sharded))))


@pytest.mark.parametrize("optimizer", SHARDABLE)
def test_zero_does_not_change_the_weights_and_shards_the_state(trained_with_zero, optimizer):
    ranks = trained_with_zero[optimizer]
    assert len(ranks) == 2
    for whole, parts in ranks:
        assert torch.equal(whole[0], parts[0])
        assert parts[2] < 0.75 * whole[2]
    (_, whole, _), (_, parts, _) = ranks[0]
    for a, b in zip(whole["optimizers"], parts["optimizers"]):
        assert a["state"].keys() == b["state"].keys()
        for index, values in a["state"].items():
            for key, value in values.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(b["state"][index][key])), key
    plain, _ = make_step(DistributedContext.single(), "anchor_free", optimizer=optimizer)
    plain.optimizer.load_state_dict(parts)  # a plain optimizer takes it


def test_exactly_zero_gradients_are_skipped():
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(4)]
    for parameter, value in zip(parameters, (0.0, 1e-30, float("nan"))):
        parameter.grad = torch.full((3,), value)
    drop_zero_gradients(parameters)
    assert [p.grad is None for p in parameters] == [True, False, False, True]


def _averaged(ctx) -> list[torch.Tensor]:
    model = torch.nn.BatchNorm1d(64)
    with torch.no_grad():
        model.running_mean.copy_(torch.linspace(-1, 1, 64).exp())  # equal on all ranks
        model.running_var.fill_(3.0 * ctx.rank)
    average_buffers(model, ctx)
    return [model.running_mean, model.running_var]


def test_averaging_keeps_buffers_that_are_equal_on_all_ranks():
    """The sum of three equal values, divided by three, is another one for every sixth."""
    for mean, variance in run_ranks(3, _averaged):
        assert torch.equal(mean, torch.linspace(-1, 1, 64).exp())
        assert (variance == 3.0).all()


_ROUNDS_DIFFERENTLY = """
import gc
import hashlib
import os

from engine.optim import muon
from engine.train.step import TrainStep
from models.modules import unwrap

if os.environ["RANK"] == "1":
    exact = muon.orthogonalize
    muon.orthogonalize = lambda matrices: exact(matrices) * (1 + 2**-8)


class Hooks:
    def note(self, run, when):
        step = next(each for each in gc.get_objects() if isinstance(each, TrainStep))
        for model in (unwrap(step.model), run.model):
            weights = b"".join(value.contiguous().numpy().tobytes() for value in model.state_dict().values())
            with open(f"weights{run.rank}.txt", "a") as file:
                file.write(f"{when} {run.step} {hashlib.blake2b(weights, digest_size=8).hexdigest()}\\n")

    def on_step(self, run):
        self.note(run, "step")

    def on_epoch(self, run):
        self.note(run, "epoch")
"""


def test_ranks_that_round_differently_have_one_model_after_each_epoch(tmp_path):
    (tmp_path / "hooks.py").write_text(_ROUNDS_DIFFERENTLY)
    data = write_dataset(tmp_path / "set")
    model = write_model(tmp_path / "tiny.yaml")
    flags = ["--data", str(data), "--model", str(model), *SMALL, "--epochs", "2", "--optimizer", "Muon"]
    run_python(ROOT / "train.py", *flags, "--spawn", "2", "--callbacks", "hooks:Hooks", folder=tmp_path)
    first, second = ((tmp_path / f"weights{rank}.txt").read_text().splitlines() for rank in (0, 1))
    assert len(first) == len(second) == 2 * (2 * 3 + 2)  # two models; three steps an epoch
    same = {(line.split()[0], line == other) for line, other in zip(first, second)}
    assert same == {("step", False), ("epoch", True)}
