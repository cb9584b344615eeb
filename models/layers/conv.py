"""Convolution, pooling and resampling layers.

Attribute names are those of the public state-dict convention. Layers take empty batches and leave the memory format of
their input as it is.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

BN_EPS = 1e-3
BN_MOMENTUM = 0.03


class BatchNorm2d(nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` that does not count its batches, which would be a kernel of its own in each norm. The
    training step counts for all norms at once."""

    def forward(self, x: Tensor) -> Tensor:
        statistics = (self.running_mean, self.running_var)
        return F.batch_norm(x, *statistics, self.weight, self.bias, self.training, self.momentum, self.eps)


class Conv(nn.Module):
    """Convolution without bias, batch norm, activation; padded so that stride 1 keeps the size."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int = 1,
        stride: int = 1,
        padding: int | None = None,
        groups: int = 1,
        dilation: int = 1,
        activation: bool = True,
    ) -> None:
        super().__init__()
        if padding is None:
            padding = dilation * (kernel - 1) // 2
        self.conv = nn.Conv2d(
            in_channels, out_channels, kernel, stride, padding, groups=groups, dilation=dilation, bias=False
        )
        self.bn = BatchNorm2d(out_channels, eps=BN_EPS, momentum=BN_MOMENTUM)
        self.act = nn.SiLU() if activation else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class DWConv(Conv):
    """A depthwise `Conv`: one group for each channel that input and output share."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__(in_channels, out_channels, kernel, stride, groups=math.gcd(in_channels, out_channels))


class _DoubleNearest(torch.autograd.Function):
    """Twice the height and width by repetition. torch's backward pass takes six times as long on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2, mode="nearest")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        rows = gradient[:, :, ::2] + gradient[:, :, 1::2]
        return rows[..., ::2] + rows[..., 1::2]


class Upsample(nn.Upsample):
    """Resizes to ``size`` pixels or by ``scale``: exactly one of the two. Modes: nearest, bilinear, bicubic."""

    def __init__(self, size: int | None = None, scale: float | None = None, mode: str = "nearest") -> None:
        if (size is None) == (scale is None):
            raise ValueError("needs either a size or a scale, the other None")
        if mode not in ("nearest", "nearest-exact", "bilinear", "bicubic"):
            raise ValueError(f"has no mode '{mode}' (nearest, nearest-exact, bilinear, bicubic)")
        super().__init__(size=size, scale_factor=scale, mode=mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "nearest" and self.scale_factor == 2 and x.device.type == "cpu" and x.requires_grad:
            return _DoubleNearest.apply(x)
        return super().forward(x)


class MaxPool(nn.MaxPool2d):
    """`torch.nn.MaxPool2d`, its arguments checked."""

    def __init__(self, kernel: int, stride: int | None = None, padding: int = 0) -> None:
        super().__init__(kernel, stride, padding)


class Concat(nn.Module):
    """Joins feature maps of one size along the channels (the only axis accepted: 1)."""

    def __init__(self, dimension: int = 1) -> None:
        super().__init__()
        if dimension != 1:
            raise ValueError(f"joins channels, axis 1, not axis {dimension}")

    def forward(self, inputs: list[Tensor]) -> Tensor:
        return torch.cat(inputs, 1)


class Add(nn.Module):
    """Sums feature maps of equal shape."""

    def forward(self, inputs: list[Tensor]) -> Tensor:
        total = inputs[0]
        for other in inputs[1:]:
            total = total + other
        return total
