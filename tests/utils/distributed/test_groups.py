"""Groups on real gloo ranks: their members and numbering, and that a collective only reaches the members."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from engine.parallel.sync_bn import convert_sync_bn
from tests.helpers.ranks import run_ranks
from utils.distributed.groups import one_per_node_group, sync_bn_group


def _uneven(ctx):
    """Six ranks as nodes of 1, 3 and 2; batch statistics over groups of two, of three and of all ranks."""
    ctx = replace(ctx, local_rank=[0, 0, 1, 2, 0, 1][ctx.rank])
    image = _images()[ctx.rank : ctx.rank + 1]
    norms = [convert_sync_bn(torch.nn.BatchNorm2d(2), sync_bn_group(ctx, size)).double() for size in (2, 3, 6)]
    total = torch.tensor([2**ctx.rank])
    dist.all_reduce(total, group=one_per_node_group(ctx))
    return int(total), [norm(image) for norm in norms]


def _images() -> torch.Tensor:
    return torch.randn(6, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_groups_of_uneven_nodes_and_of_batch_statistics():
    results = run_ranks(6, _uneven)
    assert [total for total, _ in results] == [19, 19, 36, 8, 19, 36]  # ranks 0, 1, 4; 2, 5; 3
    for which, size in enumerate((2, 3, 6)):
        expected = torch.cat([torch.nn.BatchNorm2d(2).double()(part) for part in _images().split(size)])
        normalized = torch.cat([r[1][which] for r in results])
        torch.testing.assert_close(normalized, expected, rtol=1e-12, atol=1e-12)
