"""``--zero``: each process updates its part of the parameters and sends it to the others."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from engine.optim.model_tensors import copy_from_flat, flatten


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """ZeRO stage 1 (Rajbhandari et al. 2020) that sends a process's parameters in one message.

    torch sends each by itself, 184 of them for yolov8n, or keeps all as views of a buffer, which are not channels_last.
    """

    def _sync_params(self) -> None:
        parts = [[p for group in groups for p in group["params"]] for groups in self._partition_parameters()]
        flat = [flatten(part) for part in parts]
        sent = [dist.broadcast(values, src=rank, async_op=True) for rank, values in enumerate(flat) if parts[rank]]
        for work in sent:
            work.wait()
        for rank, (values, part) in enumerate(zip(flat, parts)):
            if rank != self.rank:
                copy_from_flat(values, part)
