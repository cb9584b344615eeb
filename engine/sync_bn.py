"""Batch normalisation over the whole global batch, on NCCL and on gloo (torch's own takes GPU tensors only)."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class _GlobalNorm(torch.autograd.Function):
    """Normalises (B, C, H, W) by statistics over every rank's B, H and W. Ranks may hold different B, 0 included.

    Means and squared deviations are combined pairwise-exactly (Chan, Golub & LeVeque 1979), not as E[x^2] - E[x]^2.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor, eps: float, group
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        count = x.numel() // x.shape[1]
        mean = wide.sum((0, 2, 3)) / max(count, 1)
        deviation = (wide - mean[:, None, None]).square().sum((0, 2, 3))
        local = torch.cat([mean, deviation, mean.new_tensor([count])])
        ranks = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(ranks, local, group=group)
        table = torch.stack(ranks)
        channels = x.shape[1]
        means, deviations, counts = table[:, :channels], table[:, channels:-1], table[:, -1:]
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        variance = (deviations + counts * (means - mean).square()).sum(0) / total
        inverse = torch.rsqrt(variance + eps)
        normal = (wide - mean[:, None, None]) * inverse[:, None, None]
        ctx.save_for_backward(normal, weight, inverse, total)
        ctx.group = group
        ctx.mark_non_differentiable(mean, variance, total)
        out = normal * weight[:, None, None].to(wide) + bias[:, None, None].to(wide)
        return out.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx, grad: Tensor, *_: Tensor | None):
        normal, weight, inverse, total = ctx.saved_tensors
        wide = grad.to(normal.dtype)
        grad_bias = wide.sum((0, 2, 3))
        grad_weight = (wide * normal).sum((0, 2, 3))
        sums = torch.cat([grad_bias, grad_weight])
        dist.all_reduce(sums, group=ctx.group)
        mean_grad, mean_product = (sums / total).chunk(2)
        centred = wide - mean_grad[:, None, None] - normal * mean_product[:, None, None]
        grad_x = centred * (weight.to(wide) * inverse)[:, None, None]
        return grad_x.to(grad.dtype), grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), None, None


class GlobalBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d whose training statistics are over all processes of ``group`` (None: the whole run)."""

    group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        out, mean, variance, total = _GlobalNorm.apply(x, self.weight, self.bias, self.eps, self.group)
        with torch.no_grad():
            unbiased = variance * (total / (total - 1).clamp(min=1))
            self.running_mean.lerp_(mean.to(self.running_mean), self.momentum)
            self.running_var.lerp_(unbiased.to(self.running_var), self.momentum)
            self.num_batches_tracked.add_(1)
        return out


def convert_sync_bn(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Turns every BatchNorm2d of ``model`` into `GlobalBatchNorm2d` in place; state-dict keys stay as they are."""
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = GlobalBatchNorm2d
            module.group = group
    return model
