"""Batch-norm statistics in a checkpoint from inside an epoch.

Under plain DDP, they differ between ranks within an epoch, and the trainer averages them at its end. A checkpoint from
inside an epoch stores the means in ``model`` and ``ema``, which makes these usable models, and the statistics of every
rank in ``rank_buffers``. The same number of ranks resumes from those bit for bit; any other number starts from the
means.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.optim.model_tensors import copy_from_flat, flatten, float_buffers
from models.modules import is_parallel, unwrap
from utils.distributed.context import DistributedContext, gather_arrays


def gather_rank_buffers(ctx: DistributedContext, models: dict[str, nn.Module]) -> dict[str, Tensor] | None:
    """Gathers the float buffers of ``models`` by their names: (ranks, values) each. Every rank must call it.

    Returns None on all ranks but 0, and if all ranks hold the same values.
    """
    if not ctx.is_distributed or not any(is_parallel(model) for model in models.values()):
        return None
    local = {name: flatten(float_buffers(unwrap(model))).cpu().numpy() for name, model in models.items()}
    by_rank = gather_arrays(ctx, local)
    if by_rank is None:
        return None
    stacked = {name: torch.from_numpy(np.stack([arrays[name] for arrays in by_rank])) for name in models}
    are_equal = all(bool((values == values[0]).all()) for values in stacked.values())
    return None if are_equal else stacked


def put_means(values: Tensor, model: nn.Module, state: dict[str, Any]) -> None:
    """Replaces the float buffers in ``state``, a state dict of ``model``, by their means over ranks."""
    buffers = {name: buffer for name, buffer in unwrap(model).named_buffers() if buffer.is_floating_point()}
    pieces = _mean(values).split([buffer.numel() for buffer in buffers.values()])
    for (name, buffer), piece in zip(buffers.items(), pieces):
        if name in state:
            state[name] = piece.view(buffer.shape)


def restore_rank_buffers(
    stored: dict[str, Tensor] | None, ctx: DistributedContext, models: dict[str, nn.Module]
) -> None:
    """Restores this rank's own buffers if as many ranks wrote the checkpoint; otherwise the loaded means are kept."""
    for name, values in (stored or {}).items():
        if len(values) == ctx.world_size:
            buffers = float_buffers(unwrap(models[name]))
            copy_from_flat(values[ctx.rank].to(buffers[0].device), buffers)


def _mean(values: Tensor) -> Tensor:
    """Returns the mean over ranks (dimension 0), without rounding where all ranks have the same value."""
    same = (values == values[0]).all(0)
    return torch.where(same, values[0], values.mean(0))
