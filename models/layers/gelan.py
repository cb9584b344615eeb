"""Layers of YOLOv9 (Wang, Yeh and Liao 2024): GELAN blocks, downsampling by halves. Attribute names are those of public
state dicts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.conv import Conv, RepConv
from models.layers.csp import C3, Bottleneck


class RepBottleneck(Bottleneck):
    """`Bottleneck` of equal channels throughout: a `RepConv`, then a 3x3 convolution."""

    def __init__(self, channels: int, shortcut: bool = True) -> None:
        super().__init__(channels, channels, shortcut, expansion=1.0)
        self.cv1 = RepConv(channels, channels)


class RepCSP(C3):
    """`C3` of `RepBottleneck`."""

    def __init__(self, in_channels: int, out_channels: int, repeats: int = 1) -> None:
        super().__init__(in_channels, out_channels, 0)
        self.m = nn.Sequential(*(RepBottleneck(out_channels // 2) for _ in range(repeats)))


class RepNCSPELAN4(nn.Module):
    """GELAN block: half of ``wide`` channels go through two stages of ``narrow`` ones, and everything is joined. Raises
    ValueError if ``wide`` is odd."""

    def __init__(self, in_channels: int, out_channels: int, wide: int, narrow: int, repeats: int = 1) -> None:
        super().__init__()
        if wide % 2:
            raise ValueError(f"{wide} channels do not split into halves")
        self.cv1 = Conv(in_channels, wide)
        self.cv2 = self.stage(wide // 2, narrow, repeats)
        self.cv3 = self.stage(narrow, narrow, repeats)
        self.cv4 = Conv(wide + 2 * narrow, out_channels)

    @staticmethod
    def stage(in_channels: int, out_channels: int, repeats: int) -> nn.Module:
        return nn.Sequential(RepCSP(in_channels, out_channels, repeats), Conv(out_channels, out_channels, 3))

    def forward(self, x: Tensor) -> Tensor:
        kept, deep = self.cv1(x).chunk(2, 1)
        deep = deep.clone()  # dense once, as in C2f
        middle = self.cv2(deep)
        return self.cv4(torch.cat((kept, deep, middle, self.cv3(middle)), 1))


class ELAN1(RepNCSPELAN4):
    """`RepNCSPELAN4` whose stages are single 3x3 convolutions."""

    def __init__(self, in_channels: int, out_channels: int, wide: int, narrow: int) -> None:
        super().__init__(in_channels, out_channels, wide, narrow)

    @staticmethod
    def stage(in_channels: int, out_channels: int, repeats: int) -> nn.Module:
        return Conv(in_channels, out_channels, 3)


class SPPELAN(nn.Module):
    """Three max pools in a row, joined with what they began with: `SPPF` with its hidden width given."""

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
    """Halves height and width: 2x2 average pooling of stride 1, then half the channels by a 3x3 convolution of stride
    2, the other half by a max pool and a 1x1 convolution. Raises ValueError for odd numbers of channels."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        if in_channels % 2 or out_channels % 2:
            raise ValueError(f"needs even numbers of channels, got {in_channels} and {out_channels}")
        self.cv1 = Conv(in_channels // 2, out_channels // 2, 3, 2)
        self.cv2 = Conv(in_channels // 2, out_channels // 2)

    def forward(self, x: Tensor) -> Tensor:
        convolved, pooled = F.avg_pool2d(x, 2, 1).chunk(2, 1)
        return torch.cat((self.cv1(convolved.clone()), self.cv2(F.max_pool2d(pooled, 3, 2, 1))), 1)
