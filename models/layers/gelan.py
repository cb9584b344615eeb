"""Layers of YOLOv9 (Wang, Yeh and Liao 2024): GELAN blocks and downsampling. Attribute names are those of public state
dicts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.conv import Conv, RepConv
from models.layers.csp import C3, Bottleneck


class RepBottleneck(Bottleneck):
    """`Bottleneck` with a `RepConv` first and the same number of channels throughout."""

    def __init__(self, channels: int, shortcut: bool = True) -> None:
        super().__init__(channels, channels, shortcut, expansion=1.0)
        self.cv1 = RepConv(channels, channels)


class RepCSP(C3):
    """`C3` with bottlenecks of type `RepBottleneck`."""

    def __init__(self, in_channels: int, out_channels: int, repeats: int = 1) -> None:
        super().__init__(in_channels, out_channels, 0)
        self.m = nn.Sequential(*(RepBottleneck(out_channels // 2) for _ in range(repeats)))


class RepNCSPELAN4(nn.Module):
    """GELAN block: half of the ``wide`` channels pass two stages of ``narrow`` channels, and all outputs are
    concatenated.

    Raises ValueError if ``wide`` is odd.
    """

    def __init__(self, in_channels: int, out_channels: int, wide: int, narrow: int, repeats: int = 1) -> None:
        super().__init__()
        if wide % 2:
            raise ValueError(f"needs an even number of wide channels, got {wide}")
        self.cv1 = Conv(in_channels, wide)
        self.cv2 = self.stage(wide // 2, narrow, repeats)
        self.cv3 = self.stage(narrow, narrow, repeats)
        self.cv4 = Conv(wide + 2 * narrow, out_channels)

    @staticmethod
    def stage(in_channels: int, out_channels: int, repeats: int) -> nn.Module:
        """Creates one stage; subclasses may override it."""
        return nn.Sequential(RepCSP(in_channels, out_channels, repeats), Conv(out_channels, out_channels, 3))

    def forward(self, x: Tensor) -> Tensor:
        kept, deep = self.cv1(x).chunk(2, 1)
        deep = deep.clone()  # made contiguous once, as in C2f
        middle = self.cv2(deep)
        return self.cv4(torch.cat((kept, deep, middle, self.cv3(middle)), 1))


class ELAN1(RepNCSPELAN4):
    """`RepNCSPELAN4` with a single 3x3 convolution per stage."""

    def __init__(self, in_channels: int, out_channels: int, wide: int, narrow: int) -> None:
        super().__init__(in_channels, out_channels, wide, narrow)

    @staticmethod
    def stage(in_channels: int, out_channels: int, repeats: int) -> nn.Module:
        return Conv(in_channels, out_channels, 3)


class SPPELAN(nn.Module):
    """Three max pools in a row, concatenated with their input: `SPPF` with a free choice of ``hidden`` channels."""

    def __init__(self, in_channels: int, out_channels: int, hidden: int, kernel: int = 5) -> None:
        super().__init__()
        self.cv1 = Conv(in_channels, hidden)
        self.pool = nn.MaxPool2d(kernel, 1, kernel // 2)
        self.cv5 = Conv(4 * hidden, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [self.cv1(x)]
        for _ in range(3):
            outputs.append(self.pool(outputs[-1]))
        return self.cv5(torch.cat(outputs, 1))


class AConv(nn.Module):
    """Halves height and width: 2x2 average pooling of stride 1, then a 3x3 convolution of stride 2."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.cv1 = Conv(in_channels, out_channels, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.cv1(F.avg_pool2d(x, 2, 1))


class ADown(nn.Module):
    """Halves height and width: 2x2 average pooling of stride 1, then for half of the channels a 3x3 convolution of
    stride 2, for the others a max pool of stride 2 and a 1x1 convolution.

    Raises ValueError for an odd number of channels.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        if in_channels % 2 or out_channels % 2:
            raise ValueError(f"needs even numbers of input and output channels, got {in_channels} and {out_channels}")
        self.cv1 = Conv(in_channels // 2, out_channels // 2, 3, 2)
        self.cv2 = Conv(in_channels // 2, out_channels // 2)

    def forward(self, x: Tensor) -> Tensor:
        convolved, pooled = F.avg_pool2d(x, 2, 1).chunk(2, 1)
        return torch.cat((self.cv1(convolved.clone()), self.cv2(F.max_pool2d(pooled, 3, 2, 1))), 1)
