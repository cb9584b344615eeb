"""--compile: which options are chosen, one graph for all whole batches, and the results of the uncompiled step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import fx

from engine.train.compile import Compilation
from tests.engine.train.steps import make_step, weights_of
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import make_batch
from utils.distributed.context import DistributedContext

REGIONS = np.float32([[1, -1, 0.5, 0.5, 0.2, 0.2], [1, 0, 0.3, 0.3, 0.1, 0.2], [2, 1, 0.5, 0.5, 0.9, 0.9]])
CPU = DistributedContext.single()
GPU = replace(CPU, device=torch.device("cuda:0"), devices=(torch.device("cuda:0"),))


@pytest.fixture(autouse=True)
def no_leftovers():
    yield
    torch.compiler.reset()


def counting(graphs: list[fx.GraphModule]) -> Callable:
    """Returns a backend that compiles nothing and records the graphs."""

    def backend(graph: fx.GraphModule, _: list) -> Callable:
        graphs.append(graph)
        return graph.forward

    return backend


def compiled_step(backend, plan: Compilation, **options):
    step, model = make_step(CPU, "anchor_free", compilation=plan, **options)
    model.compile(backend=backend, dynamic=plan.dynamic)
    return step, model


@pytest.mark.slow
@pytest.mark.parametrize("has_regions", [True, False])
def test_full_batches_share_one_version_of_model_and_loss_and_others_need_none(monkeypatch, has_regions):
    """Whatever is in them: no target, one, many, more slots for targets, regions to ignore in no image or in some."""
    of_model = []
    of_loss = []
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: real(f, **{"backend": counting(of_loss), **options}))
    plan = Compilation(images=4, loss=True, has_regions=has_regions)
    step, model = compiled_step(counting(of_model), plan)
    keys = list(model.state_dict())
    step.criterion.compile_terms(has_regions=has_regions)
    step([make_batch(4)], [4], 1)
    full = [make_batch(4, targets_per_image=boxes) for boxes in (2, 0, 5, 17, 40)]
    one_target = replace(full[1].targets, rows=full[0].targets.rows[1:2].clone(), counts=(1, 0, 0, 0))
    full.append(replace(full[1], targets=one_target))
    if has_regions:
        full += [
            replace(full[0], targets=replace(full[0].targets, ignore=REGIONS[:count]))
            for count in range(1, len(REGIONS))
        ]
    others = [make_batch(images) for images in (3, 2, 1, 0)]
    with torch.compiler.set_stance("fail_on_recompile"):
        for update, batch in enumerate([*full, *others], start=2):
            step([batch], [len(batch.images) or 1], update)
    assert (len(of_model), len(of_loss)) == (1, 1)
    assert list(model.state_dict()) == keys
    assert all(values.finite for values in step.reader.pop(leave=0))


@pytest.mark.parametrize(
    ("plan", "virtual_ranks", "batches", "compiled"),
    [
        pytest.param(  # shards of one and two images
            Compilation(images=6), 4, [(6, 64, 64), (6, 64, 64), (3, 64, 64), (6, 64, 64)], 2, marks=pytest.mark.slow
        ),
        (Compilation(images=4, dynamic=True), 0, [(4, 64, 64), (4, 96, 96), (4, 64, 96), (4, 160, 64)], 1),
    ],
)
def test_each_shard_size_is_compiled_once_and_varying_sizes_share_a_graph(plan, virtual_ranks, batches, compiled):
    graphs: list[fx.GraphModule] = []
    step, _ = compiled_step(counting(graphs), plan, virtual_ranks=virtual_ranks)
    for update, (images, height, width) in enumerate(batches, start=1):
        batch = make_batch(images, size=max(height, width), seed=update)
        batch = replace(batch, images=batch.images[..., :height, :width])
        step([batch], [images], update)
    assert len(graphs) == compiled


@pytest.mark.slow
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_the_compiled_step_equals_the_uncompiled_one(cuda_graphs):
    """With torch's own compiler, as in `Compilation.apply`; on a CPU it does not use CUDA graphs."""
    plan = Compilation(images=4, cuda_graphs=cuda_graphs, loss=True)
    step, model = make_step(CPU, "two_levels", compilation=plan)
    plan.apply(model, step.criterion)
    plain, plain_model = make_step(CPU, "two_levels")
    for update, images in enumerate((4, 4, 3, 4, 4), start=1):
        for take in (step, plain):
            take([make_batch(images, seed=update)], [images], update)
    losses = [[values.losses for values in take.reader.pop(leave=0)] for take in (step, plain)]
    assert torch.allclose(*map(torch.tensor, losses), rtol=1e-3)
    torch.testing.assert_close(weights_of(model), weights_of(plain_model), rtol=1e-3, atol=1e-4)


def _shares_of_steps(ctx: DistributedContext, sync_bn: bool) -> list[torch.Tensor]:
    """Returns the weights after uncompiled and after compiled steps."""
    weights = []
    for plan in (None, Compilation(images=4)):
        step, model = make_step(ctx, "two_levels", sync_bn=sync_bn, compilation=plan)
        if plan is not None:
            plan.apply(model, step.criterion)
        for update, images in enumerate((4, 4, 3, 4), start=1):
            cut = images // 2
            first, last = ((0, cut), (cut, images))[ctx.rank]
            step([make_batch(images, seed=update).shard(first, last)], [images], update)
        weights.append(weights_of(model))
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("sync_bn", [False, True])
def test_two_compiled_processes_equal_two_uncompiled_ones(sync_bn):
    for expected, actual in run_ranks(2, _shares_of_steps, sync_bn, timeout_s=600):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
