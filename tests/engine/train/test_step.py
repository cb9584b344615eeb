"""The step: sharding a global batch does not change the result, a non-finite step changes nothing, and there is no host
sync.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math

import pytest
import torch

from models.detector import build_detector
from models.losses.base import Criterion
from tests.engine.train.steps import MODELS, global_batch, make_step, weights_of
from tests.helpers.kernel_count import NoSync
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import make_batch
from utils.distributed.context import DistributedContext


def _train_share(ctx, kind: str, bounds: list[int]) -> tuple[torch.Tensor, tuple[float, ...], torch.Tensor]:
    step, model = make_step(ctx, kind, sync_bn=ctx.is_distributed)
    share = global_batch().shard(bounds[ctx.rank], bounds[ctx.rank + 1])
    for update in (1, 2, 3):
        step([share], [6], update)
    return weights_of(model), step.reader.pop(leave=0)[-1].losses, weights_of(step.ema.module)


@pytest.mark.parametrize("kind", MODELS)
def test_the_same_weights_on_one_two_and_four_ranks(kind):
    expected, losses, ema = _train_share(DistributedContext.single(), kind, [0, 6])
    start = weights_of(build_detector(MODELS[kind], 2, seed=1))
    cuts = ([0, 2, 6], [0, 2, 2, 5, 6])  # rank 0 has no targets; of four, rank 1 has no images
    for bounds in cuts:
        for actual, actual_losses, actual_ema in run_ranks(len(bounds) - 1, _train_share, kind, bounds):
            assert (actual - expected).norm() < 1e-5 * (expected - start).norm() + 1e-5
            assert (actual_ema - ema).norm() < 1e-5 * (expected - start).norm() + 1e-5
            assert actual_losses == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("cuts", [[0, 3, 6], [0, 1, 2, 6], [0, 0, 6]])
def test_accumulation_equals_the_whole_batch(kind, cuts):
    ctx = DistributedContext.single()
    whole, expected = make_step(ctx, kind, norm_eval=True)
    parts, actual = make_step(ctx, kind, norm_eval=True)
    whole([global_batch()], [6], 1)
    bounds = list(itertools.pairwise(cuts))
    parts([global_batch().shard(a, b) for a, b in bounds], [b - a for a, b in bounds], 1)
    torch.testing.assert_close(weights_of(actual), weights_of(expected), rtol=1e-5, atol=1e-7)
    a, b = (s.reader.pop(leave=0)[0] for s in (whole, parts))
    assert a.losses == pytest.approx(b.losses, rel=1e-5)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-4)


@pytest.mark.parametrize("kind", MODELS)
def test_a_step_leaves_no_tensor_in_a_reference_cycle(kind):
    """Its memory is then free at once, although the garbage collector seldom runs (`utils.process.main`)."""
    step, _ = make_step(DistributedContext.single(), kind)
    step([global_batch()], [6], 1)
    step.reader.pop(leave=0)
    gc.collect()
    gc.disable()
    gc.freeze()  # what other tests have left; stays frozen, as what tests/conftest.py froze
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for update in (2, 3):
            step([global_batch()], [6], update)
            step.reader.pop(leave=0)
        gc.collect()
        assert not [unreachable for unreachable in gc.garbage if isinstance(unreachable, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_the_gradient_is_that_of_samples_times_the_mean_loss():
    """An image of ``--quad`` is four samples, which learn at the rate of four."""
    norms = []
    for samples in (None, 24):
        step, _ = make_step(DistributedContext.single(), "anchor_free", clip_norm=math.inf)
        step([global_batch()], [6], 1, samples=samples)
        norms.append(step.reader.pop(leave=0)[0].grad_norm)
    assert norms[1] == pytest.approx(4 * norms[0])


def test_clipping_bounds_the_gradient():
    ctx = DistributedContext.single()
    free, _ = make_step(ctx, "anchor_free", clip_norm=math.inf)
    free([global_batch()], [6], 1)
    norm = free.reader.pop(leave=0)[0].grad_norm
    step, model = make_step(ctx, "anchor_free", clip_norm=norm / 4)
    seen = []
    step.optimizer.step = lambda nonfinite: seen.append(
        torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    )
    step([global_batch()], [6], 1)
    assert float(seen[0]) == pytest.approx(norm / 4, rel=1e-3)


class _Poison(Criterion):
    """A loss whose total is not finite in one call."""

    def __init__(self, criterion, at: int) -> None:
        super().__init__()
        self.criterion = criterion
        self.at = at
        self.calls = 0

    def forward(self, raw, targets, teacher_maps):
        out = self.criterion(raw, targets, teacher_maps)
        self.calls += 1
        return out._replace(total=out.total * float("nan")) if self.calls == self.at else out


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Muon"])
@pytest.mark.parametrize("bad", [1, 2])
def test_a_non_finite_step_leaves_everything_as_it_was(optimizer, bad):
    step, model = make_step(DistributedContext.single(), "anchor_free", optimizer=optimizer)
    step.criterion = _Poison(step.criterion, at=bad)
    for number in (1, 2, 3):
        before = copy.deepcopy(model.state_dict())
        step([make_batch(6, seed=number)], [6], number)
        for key, value in model.state_dict().items():
            if number == bad and value.is_floating_point():
                assert torch.equal(value, before[key]), key
    values = step.reader.pop(leave=0)
    assert [one.finite for one in values] == [number != bad for number in (1, 2, 3)]
    assert not values[bad - 1].local_finite
    assert values[bad - 1].paths == tuple(f"image{i}.png" for i in range(6))
    assert torch.isfinite(torch.cat([weights_of(model), weights_of(step.ema.module)])).all()


def test_values_are_read_one_step_later():
    step, _ = make_step(DistributedContext.single(), "anchor_free")
    step([global_batch()], [6], 1)
    assert step.reader.pop() == []
    step([global_batch()], [6], 2)
    assert len(step.reader.pop()) == 1
    assert len(step.reader.pop(leave=0)) == 1


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Muon"])
def test_the_step_has_no_host_sync(kind, optimizer):
    step, _ = make_step(DistributedContext.single(), kind, optimizer=optimizer)
    step([global_batch()], [6], 1)  # optimizer states are made here
    with NoSync():
        step([global_batch(), make_batch(3)], [6, 3], 2)
