"""``--zero``: each process updates its shard of the parameters and sends it to the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from engine.optim.model_tensors import copy_from_flat, flatten


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """ZeRO stage 1 (Rajbhandari et al. 2020) that sends a process's parameters in one message.

    torch sends each parameter by itself, 184 of them for yolov8n, or keeps all as views of a buffer, which are not
    channels_last.
    """

    if TYPE_CHECKING:  # torch's decorator hides the type of the parent's method

        def _partition_parameters(self) -> list[list[dict[str, Any]]]:
            """Returns the groups of parameters of each rank."""

    def _sync_params(self) -> None:
        by_rank = [[p for group in groups for p in group["params"]] for groups in self._partition_parameters()]
        vectors = [flatten(parameters) for parameters in by_rank]
        works = []
        for rank, vector in enumerate(vectors):
            if by_rank[rank]:
                works.append(dist.broadcast(vector, src=rank, async_op=True))
        for work in works:
            if work is not None:  # None only on a process outside of the group
                work.wait()
        for rank, (vector, parameters) in enumerate(zip(vectors, by_rank)):
            if rank != self.rank:
                copy_from_flat(vector, parameters)
