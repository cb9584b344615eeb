"""Models wrapped for several devices, in DistributedDataParallel or DataParallel, and made equal on all ranks."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.optim.model_tensors import copy_from_flat, flatten, float_buffers
from engine.parallel.sync_bn import convert_sync_bn
from utils.distributed.context import DistributedContext
from utils.distributed.groups import sync_bn_group
from utils.logger import get_logger


def freeze_unused(model: nn.Module, example: Tensor) -> None:
    """Freezes the parameters that no training output depends on. A single process leaves them as they are, because they
    have no gradient. DDP would wait for it, and a sum over processes or virtual ranks would make it zero, which decays
    weights. ``example``: images (B, C, H, W), with B at least 2 for batch norm after pooling.

    Runs a copy of the model on the CPU: on a GPU, cuDNN would search for kernels for a size that training does not use.
    """
    copied = copy.deepcopy(model).cpu().train()
    named = [(name, p) for name, p in copied.named_parameters() if p.requires_grad]
    total = sum(level.float().sum() for level in copied(example.cpu()))
    reached = torch.autograd.grad(total, [p for _, p in named], allow_unused=True)
    for (name, _), gradient in zip(named, reached):
        if gradient is None:
            model.get_parameter(name).requires_grad_(False)


def parallelize(model: nn.Module, ctx: DistributedContext, *, sync_bn: int = 0, static: bool = False) -> nn.Module:
    """Wraps ``model`` in DistributedDataParallel in a distributed run, or in DataParallel for several devices;
    otherwise returns it unchanged.

    All trainable parameters must receive gradients (`freeze_unused`). BatchNorm buffers stay local during training
    (`average_buffers` averages them). ``sync_bn``: number of processes that share batch statistics, see
    `sync_bn_group`; 0: each has its own. ``static``: every backward pass has the same graph and sends its gradients, so
    none may run under `Strategy.without_gradient_sync`; DDP then checks less.
    """
    if ctx.is_distributed:
        if sync_bn:
            convert_sync_bn(model, sync_bn_group(ctx, sync_bn))
        device_ids = [ctx.device.index] if ctx.device.type == "cuda" else None
        options: dict[str, Any] = {_buffer_option(): False}
        return nn.parallel.DistributedDataParallel(
            model,
            device_ids=device_ids,
            gradient_as_bucket_view=True,
            bucket_cap_mb=bucket_mebibytes(model),
            static_graph=static,
            **options,
        )
    if len(ctx.devices) > 1:
        count = len(ctx.devices)
        get_logger().info(
            "DataParallel over %d GPUs in one process; torchrun --nproc_per_node %d is faster", count, count
        )
        return DataParallel(model, device_ids=[d.index for d in ctx.devices])
    return model


def _buffer_option() -> str:
    """Returns the name of DDP's option for broadcasting buffers in each forward pass, which torch 2.15 renamed."""
    options = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers"


class DataParallel(nn.DataParallel):
    """`torch.nn.DataParallel` in the caller's autocast type. torch passes on to the threads of the replicas whether
    autocast is enabled, but not its type: they would compute in float16 without a gradient scaler."""

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Sequence[Any]) -> list[Any]:
        device_type = inputs[0][0].device.type
        dtype = torch.get_autocast_dtype(device_type)
        is_enabled = torch.is_autocast_enabled(device_type)
        calls = [torch.autocast(device_type, dtype, enabled=is_enabled)(replica.__call__) for replica in replicas]
        return super().parallel_apply(calls, inputs, kwargs)


def bucket_mebibytes(model: nn.Module) -> float:
    """Returns DDP's bucket size: a quarter of the gradients, within bounds, so that three buckets are sent before the
    backward pass ends. DDP's default of 25 MiB holds all gradients of a small model (measured: benchmarks/LOG.md)."""
    total = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return min(max(total / 4 / 2**20, 1.0), 25.0)


@torch.no_grad()
def average_buffers(model: nn.Module, ctx: DistributedContext) -> None:
    """Averages float buffers (BatchNorm statistics) over ranks. Buffers that are equal on all ranks, such as anchors
    and the statistics of frozen layers, keep their values: dividing the sum of equal values by 3, 6 or 7 would
    round."""
    buffers = float_buffers(model)
    if not ctx.is_distributed or not buffers:
        return
    flat = flatten(buffers)
    extremes = torch.stack((flat, -flat))
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    highest = extremes[0]
    lowest = -extremes[1]
    dist.all_reduce(flat)
    copy_from_flat(torch.where(highest == lowest, highest, flat / ctx.world_size), buffers)


@torch.no_grad()
def broadcast_parameters(model: nn.Module, ctx: DistributedContext) -> None:
    """Sends rank 0's parameters to all ranks. Devices of the same model round alike, so nothing changes. Different
    devices round differently (Newton-Schulz iterations in bfloat16 most of all), so their ranks would drift apart."""
    if ctx.is_distributed:
        parameters = list(model.parameters())
        flat = flatten(parameters)
        dist.broadcast(flat, src=0)
        copy_from_flat(flat, parameters)
