"""``--zero``: each process updates its shard of the parameters and sends it to the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from engine.optim.model_tensors import flatten_as, views_as


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """ZeRO stage 1 (Rajbhandari et al. 2020) that sends a process's parameters in one message.

    torch sends each parameter by itself, 184 of them for yolov8n, or keeps all as views of a buffer, which are not
    channels_last.
    """

    if TYPE_CHECKING:  # torch's decorator hides the type of the parent's method

        def _partition_parameters(self) -> list[list[dict[str, Any]]]:
            """Returns the groups of parameters of each rank."""

    @torch.no_grad()
    def _sync_params(self) -> None:
        by_rank = [[p for group in groups for p in group["params"]] for groups in self._partition_parameters()]
        # In memory order, which is the same on all ranks: channels_last kernels are copied as they are.
        vectors = [torch.cat(flatten_as(parameters, parameters)) if parameters else None for parameters in by_rank]
        works = []
        for rank, vector in enumerate(vectors):
            if vector is not None:
                works.append(dist.broadcast(vector, src=rank, async_op=True))
        for work in works:
            if work is not None:  # None only on a process outside of the group
                work.wait()
        for rank, (vector, parameters) in enumerate(zip(vectors, by_rank)):
            if vector is not None and rank != self.rank:
                torch._foreach_copy_(parameters, views_as(vector, parameters))
