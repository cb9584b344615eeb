"""Batch normalization over the whole global batch, with NCCL and gloo.

torch.nn.SyncBatchNorm accepts only GPU tensors, and needs three host syncs per norm to find empty shards. Here only its
kernels are used, on GPUs.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.layers.conv import BatchNorm2d

# Count of an empty shard, by which a kernel divides. Rounding absorbs it in sums, and as an integer it is 0.
_EMPTY = 1e-30


class _GlobalNorm(torch.autograd.Function):
    """Normalizes (B, C, H, W) by statistics over every rank's B, H and W. Ranks may hold different B, 0 included.

    Means and squared deviations are combined pairwise-exactly (Chan, Golub & LeVeque 1979), not as E[x^2] - E[x]^2.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        count = x.numel() // x.shape[1]
        mean = wide.sum((0, 2, 3)) / max(count, 1)
        deviation = (wide - mean[:, None, None]).square().sum((0, 2, 3))
        table = _gather(torch.cat([mean, deviation, mean.new_full((1,), count)]), group)
        channels = x.shape[1]
        means, deviations, counts = table[:, :channels], table[:, channels:-1], table[:, -1:]
        total = counts.sum()
        divisor = total.clamp(min=1)  # all shards of a group may be empty
        mean = (means * counts).sum(0) / divisor
        variance = (deviations + counts * (means - mean).square()).sum(0) / divisor
        inverse = torch.rsqrt(variance + eps)
        normal = (wide - mean[:, None, None]) * inverse[:, None, None]
        ctx.save_for_backward(normal, weight, inverse, divisor)
        ctx.group = group
        ctx.mark_non_differentiable(mean, variance, total)
        out = normal * weight[:, None, None].to(wide) + bias[:, None, None].to(wide)
        return out.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        normal, weight, inverse, divisor = ctx.saved_tensors
        wide = grad.to(normal.dtype)
        grad_bias = wide.sum((0, 2, 3))
        grad_weight = (wide * normal).sum((0, 2, 3))
        sums = torch.cat([grad_bias, grad_weight])
        dist.all_reduce(sums, group=ctx.group)
        mean_grad, mean_product = (sums / divisor).chunk(2)
        centered = wide - mean_grad[:, None, None] - normal * mean_product[:, None, None]
        grad_x = centered * (weight.to(wide) * inverse)[:, None, None]
        without_gradient = (None, None)  # eps, group
        return grad_x.to(grad.dtype), grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), *without_gradient


class _GlobalNormByKernels(torch.autograd.Function):
    """Computes the same as `_GlobalNorm` with the kernels of torch.nn.SyncBatchNorm, on GPUs only.

    Saves activations in their own dtype instead of float32, and also updates the running statistics.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        momentum: float,
        eps: float,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        x = _dense(x)
        channels = x.shape[1]
        if x.numel():
            mean, inverse = torch.batch_norm_stats(x, eps)
            count = float(x.numel() // channels)
        else:
            mean = x.new_zeros(channels, dtype=torch.promote_types(x.dtype, torch.float32))
            inverse = torch.ones_like(mean)
            count = _EMPTY
        table = _gather(torch.cat([mean, inverse, mean.new_full((1,), count)]), group)
        means, inverses, counts = table[:, :channels], table[:, channels:-1], table[:, -1].contiguous()
        before = (running_mean.clone(), running_var.clone()) if group is not None else ()
        mean, inverse = torch.batch_norm_gather_stats_with_counts(
            x, means, inverses, running_mean, running_var, momentum, eps, counts
        )
        for running, kept in zip((running_mean, running_var), before):  # a group without images keeps its statistics
            running.copy_(torch.where(counts.max() >= 1, running, kept))
        ctx.save_for_backward(x, weight, mean, inverse, counts.to(torch.int32))
        ctx.group = group
        if not x.numel():
            return torch.empty_like(x)
        return torch.batch_norm_elemt(x, weight, bias, mean, inverse, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, counts = ctx.saved_tensors
        grad = _dense(grad)
        if x.numel():
            sums, products, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
                grad, x, mean, inverse, weight, True, True, True
            )
        else:
            sums, products, grad_weight, grad_bias = (torch.zeros_like(t) for t in (mean, mean, weight, weight))
        both = torch.cat([sums, products])
        dist.all_reduce(both, group=ctx.group)
        total_sums, total_products = both.chunk(2)
        grad_x = grad
        if x.numel():
            grad_x = torch.batch_norm_backward_elemt(grad, x, mean, inverse, weight, total_sums, total_products, counts)
        without_gradient = (None,) * 5  # running_mean, running_var, momentum, eps, group
        return grad_x, grad_weight, grad_bias, *without_gradient


def _gather(local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Gathers ``local`` (n,) of all processes of a group: (processes, n)."""
    table = local.new_empty(dist.get_world_size(group) * len(local))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # deprecated where both exist
    gather(table, local, group=group)
    return table.view(-1, len(local))


def _dense(x: Tensor) -> Tensor:
    """Returns ``x`` in a memory format that the kernels support: channels_last stays, all else becomes contiguous."""
    return x if x.is_contiguous(memory_format=torch.channels_last) else x.contiguous()


def _has_kernels(device: torch.device) -> bool:
    """Returns True if torch.nn.SyncBatchNorm has kernels for the device."""
    return device.type == "cuda"


class GlobalBatchNorm2d(BatchNorm2d):
    """BatchNorm2d with training statistics over all processes of ``group`` (None: the whole run)."""

    group: dist.ProcessGroup | None = None
    running_mean: Tensor  # never None: these norms track statistics
    running_var: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        if _has_kernels(x.device):
            return _GlobalNormByKernels.apply(
                x, self.weight, self.bias, self.running_mean, self.running_var, self.momentum, self.eps, self.group
            )
        out, mean, variance, total = _GlobalNorm.apply(x, self.weight, self.bias, self.eps, self.group)
        with torch.no_grad():
            unbiased = variance * (total / (total - 1).clamp(min=1))
            momentum = self.momentum * (total > 0).to(self.running_mean)  # a group without images keeps its statistics
            self.running_mean.lerp_(mean.to(self.running_mean), momentum)
            self.running_var.lerp_(unbiased.to(self.running_var), momentum)
        return out


def convert_sync_bn(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Turns every BatchNorm2d of ``model`` into `GlobalBatchNorm2d` in place; state-dict keys do not change."""
    for module in model.modules():
        if type(module) in (nn.BatchNorm2d, BatchNorm2d):
            module.__class__ = GlobalBatchNorm2d
            cast(GlobalBatchNorm2d, module).group = group
    return model
