"""Depthwise-separable layers (MobileNets, Howard et al. 2017), as YOLOX-nano has them.

Attribute names are those of the public state-dict convention.
"""

from __future__ import annotations

from torch import Tensor, nn

from models.blocks import C3, Bottleneck, Conv


class SeparableConv(nn.Module):
    """A depthwise convolution and a 1x1 one, each with batch norm and activation."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.dconv = Conv(in_channels, in_channels, kernel, stride, groups=in_channels)
        self.pconv = Conv(in_channels, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.pconv(self.dconv(x))


class SeparableBottleneck(Bottleneck):
    """`Bottleneck` of equal channels throughout, whose 3x3 convolution is separable."""

    def __init__(self, channels: int, shortcut: bool = True) -> None:
        super().__init__(channels, channels, shortcut, expansion=1.0)
        self.cv2 = SeparableConv(channels, channels)


class SeparableC3(C3):
    """`C3` of separable bottlenecks."""

    def __init__(self, in_channels: int, out_channels: int, repeats: int = 1, shortcut: bool = True) -> None:
        super().__init__(in_channels, out_channels, 0, shortcut)
        hidden = out_channels // 2
        self.m = nn.Sequential(*(SeparableBottleneck(hidden, shortcut) for _ in range(repeats)))
