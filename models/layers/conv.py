"""Convolution, pooling and resampling layers.

Attribute names are those of public state dicts. Layers accept empty batches and keep the memory format of their input.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.ops import double_nearest

BN_EPS = 1e-3
BN_MOMENTUM = 0.03
Identity = nn.Identity  # under the name that a model YAML uses


class BatchNorm2d(nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` that does not count its batches: that would take one more kernel per norm.

    The training step updates the counters of all norms at once.
    """

    momentum: float  # never None in the norms that `Conv` creates

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            training=self.training,
            momentum=self.momentum,
            eps=self.eps,
        )


class Conv(nn.Module):
    """Convolution without bias, batch norm and activation. By default, odd kernels keep the size at stride 1."""

    bn: BatchNorm2d | nn.Identity  # Identity once folded into ``conv``
    act: nn.Module

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
    """Depthwise `Conv`: the number of groups is the greatest common divisor of the numbers of channels."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__(in_channels, out_channels, kernel, stride, groups=math.gcd(in_channels, out_channels))


class RepConv(nn.Module):
    """Parallel 3x3 and 1x1 convolutions in training, a single 3x3 convolution after `merge` (RepVGG, Ding et al.
    2021)."""

    act: nn.Module

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
        """Adds the 1x1 convolution to the middle of the 3x3 one, unless that has been done. Raises RuntimeError if the
        batch norms are not yet folded into them."""
        if self.conv2 is None:
            return
        wide, narrow = self.conv1.conv, self.conv2.conv
        if wide.bias is None or narrow.bias is None:
            raise RuntimeError("fold the batch norms before merging")
        wide.weight[:, :, 1:2, 1:2] += narrow.weight
        wide.bias += narrow.bias
        self.conv2 = None


class Upsample(nn.Upsample):
    """Resizes by the factor ``scale``. ``size``, as in `torch.nn.Upsample`, must be None: a fixed number of cells fits
    images of one size only.

    Modes: nearest, nearest-exact, bilinear, bicubic.
    """

    def __init__(self, size: int | None = None, scale: float | None = None, mode: str = "nearest") -> None:
        if size is not None:
            raise ValueError(f"takes no size, which fits images of one size only; write [None, 2], not [{size}, None]")
        if scale is None:
            raise ValueError("needs a scale; write [None, 2]")
        if mode not in ("nearest", "nearest-exact", "bilinear", "bicubic"):
            raise ValueError(f"has no mode '{mode}'; known: nearest, nearest-exact, bilinear, bicubic")
        super().__init__(scale_factor=scale, mode=mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "nearest" and self.scale_factor == 2 and x.device.type == "cpu" and x.requires_grad:
            return double_nearest(x)
        return super().forward(x)


class MaxPool(nn.MaxPool2d):
    """`torch.nn.MaxPool2d` with annotated arguments, against which a YAML row is checked."""

    def __init__(self, kernel: int, stride: int | None = None, padding: int = 0) -> None:
        super().__init__(kernel, stride, padding)


class Concat(nn.Module):
    """Concatenates feature maps of equal size along the channels. ``dimension`` must be 1."""

    def __init__(self, dimension: int = 1) -> None:
        super().__init__()
        if dimension != 1:
            raise ValueError(f"concatenates channels (dimension 1), not dimension {dimension}")

    def forward(self, inputs: list[Tensor]) -> Tensor:
        return torch.cat(inputs, 1)


class Add(nn.Module):
    """Sums feature maps of equal shape."""

    def forward(self, inputs: list[Tensor]) -> Tensor:
        total = inputs[0]
        for other in inputs[1:]:
            total = total + other
        return total
