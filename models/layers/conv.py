"""Convolution, pooling and resampling layers.

Attribute names are those of public state dicts. Layers take empty batches and keep the memory format of their input.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.ops import double_nearest

BN_EPS = 1e-3
BN_MOMENTUM = 0.03
Identity = nn.Identity  # as a model YAML names it


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


class RepConv(nn.Module):
    """A 3x3 and a 1x1 convolution side by side while training, one 3x3 convolution after `merge` (RepVGG, Ding et al.
    2021)."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = Conv(in_channels, out_channels, 3, activation=False)
        self.conv2: Conv | None = Conv(in_channels, out_channels, 1, activation=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(x)
        return self.act(y if self.conv2 is None else y + self.conv2(x))

    @torch.no_grad()
    def merge(self) -> None:
        """Adds the 1x1 convolution into the middle of the 3x3 one. Batch norms must have been folded in before."""
        wide, narrow = self.conv1.conv, self.conv2.conv
        wide.weight[:, :, 1:2, 1:2] += narrow.weight
        wide.bias += narrow.bias
        self.conv2 = None


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
            return double_nearest(x)
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
