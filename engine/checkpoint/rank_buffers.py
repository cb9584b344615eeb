"""BatchNorm statistics that differ from rank to rank, on their way into a checkpoint and back.

Plain DDP keeps statistics apart within an epoch and averages them at its end. A checkpoint from inside one must not
average the run's own, or a run that saves would differ from one that does not. So it holds the mean in ``model`` and
``ema``, which makes it a usable model, and beside them every rank's own. The same number of ranks goes on with those,
bit for bit; any other number starts from the mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from utils.distributed.collectives import gather_arrays, is_parallel, unwrap
from utils.distributed.context import DistributedContext
from utils.flat_tensors import copy_from_flat, flatten, float_buffers


def gather_rank_buffers(ctx: DistributedContext, models: dict[str, nn.Module]) -> dict[str, Tensor] | None:
    """On rank 0, for each of ``models`` the float buffers (ranks, values) if they differ between ranks; None elsewhere,
    and when all ranks hold the same. Every rank must call it."""
    if not ctx.is_distributed or not any(is_parallel(model) for model in models.values()):
        return None
    gathered = gather_arrays(
        ctx, {name: flatten(float_buffers(unwrap(model))).cpu().numpy() for name, model in models.items()}
    )
    if gathered is None:
        return None
    stacked = {name: torch.from_numpy(np.stack([rank[name] for rank in gathered])) for name in models}
    return None if all(bool((values == values[0]).all()) for values in stacked.values()) else stacked


def put_means(values: Tensor, model: nn.Module, state: dict[str, Any]) -> None:
    """Replaces the float buffers in ``state``, a state dict of ``model``, by their means over ranks."""
    names = [name for name, buffer in unwrap(model).named_buffers() if buffer.is_floating_point()]
    buffers = dict(unwrap(model).named_buffers())
    pieces = _mean(values).split([buffers[name].numel() for name in names])
    for name, piece in zip(names, pieces):
        if name in state:
            state[name] = piece.view(buffers[name].shape).clone()


def restore_rank_buffers(
    stored: dict[str, Tensor] | None, ctx: DistributedContext, models: dict[str, nn.Module]
) -> None:
    """Gives this rank its own buffers back when as many ranks stored theirs; otherwise the loaded means stay."""
    for name, values in (stored or {}).items():
        if len(values) == ctx.world_size:
            buffers = float_buffers(unwrap(models[name]))
            copy_from_flat(values[ctx.rank].to(buffers[0].device), buffers)


def _mean(values: Tensor) -> Tensor:
    """Over ranks (dimension 0); where all hold the same, exactly that."""
    same = (values == values[0]).all(0)
    return torch.where(same, values[0], values.mean(0))
