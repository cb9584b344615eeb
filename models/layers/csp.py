"""Blocks of cross-stage partial networks: C3, C2f, C3k2, SPPF, attention, and depthwise-separable blocks.

Attribute names (``cv1``, ``m``, ``attn``, ...) are those of public state dicts. Blocks keep height and width unless
they say otherwise, accept empty batches, and keep the memory format of their input. The rows of model YAMLs are checked
against the annotations of the constructors (registry.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.conv import Conv
from models.layers.ops import split_parts


class Bottleneck(nn.Module):
    """Two convolutions with a residual connection if input and output channels are equal (He et al. 2016)."""

    cv1: nn.Module
    cv2: nn.Module

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        shortcut: bool = True,
        groups: int = 1,
        expansion: float = 0.5,
        kernels: tuple[int, int] = (1, 3),
    ) -> None:
        super().__init__()
        hidden = int(out_channels * expansion)
        self.cv1 = Conv(in_channels, hidden, kernels[0])
        self.cv2 = Conv(hidden, out_channels, kernels[1], groups=groups)
        self.add = shortcut and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.cv2(self.cv1(x))
        return x + y if self.add else y


class C3(nn.Module):
    """Cross-stage partial block with three 1x1 convolutions (CSPNet, Wang et al. 2020): half of the channels skip the
    bottlenecks."""

    kernels = (1, 3)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        repeats: int = 1,
        shortcut: bool = True,
        groups: int = 1,
        expansion: float = 0.5,
    ) -> None:
        super().__init__()
        hidden = int(out_channels * expansion)
        self.cv1 = Conv(in_channels, hidden)
        self.cv2 = Conv(in_channels, hidden)
        self.cv3 = Conv(2 * hidden, out_channels)
        self.m = nn.Sequential(
            *(Bottleneck(hidden, hidden, shortcut, groups, 1.0, self.kernels) for _ in range(repeats))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), 1))


class C3k(C3):
    """`C3` with two 3x3 convolutions per bottleneck."""

    kernels = (3, 3)


class C2f(nn.Module):
    """Cross-stage partial block that concatenates the output of every bottleneck (as ELAN does, Wang et al. 2022)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        repeats: int = 1,
        shortcut: bool = False,
        groups: int = 1,
        expansion: float = 0.5,
    ) -> None:
        super().__init__()
        self.hidden = int(out_channels * expansion)
        self.cv1 = Conv(in_channels, 2 * self.hidden)
        self.cv2 = Conv((2 + repeats) * self.hidden, out_channels)
        self.m = nn.ModuleList(
            Bottleneck(self.hidden, self.hidden, shortcut, groups, 1.0, (3, 3)) for _ in range(repeats)
        )

    def forward(self, x: Tensor) -> Tensor:
        outputs = list(self.cv1(x).split(self.hidden, 1))
        outputs[-1] = outputs[-1].clone()  # made contiguous once; otherwise every reader would copy it
        for block in self.m:
            outputs.append(block(outputs[-1]))
        return self.cv2(torch.cat(outputs, 1))


class C3k2(C2f):
    """`C2f` with other inner blocks: half-width bottlenecks or, if ``deep``, `C3k` blocks of two bottlenecks.

    With ``attention`` each is a half-width bottleneck and then a `PSABlock` with heads of 64 channels (YOLO26).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        repeats: int = 1,
        deep: bool = False,
        expansion: float = 0.5,
        attention: bool = False,
        groups: int = 1,
        shortcut: bool = True,
    ) -> None:
        super().__init__(in_channels, out_channels, 0, shortcut, groups, expansion)
        hidden = self.hidden

        def inner_block() -> nn.Module:
            if deep and not attention:
                return C3k(hidden, hidden, 2, shortcut, groups)
            bottleneck = Bottleneck(hidden, hidden, shortcut, groups, kernels=(3, 3))
            if attention:
                return nn.Sequential(bottleneck, PSABlock(hidden, attention_heads(hidden)))
            return bottleneck

        self.cv2 = Conv((2 + repeats) * hidden, out_channels)
        self.m = nn.ModuleList(inner_block() for _ in range(repeats))


class SPP(nn.Module):
    """Spatial pyramid pooling (He et al. 2015): max pools of several sizes, concatenated."""

    def __init__(self, in_channels: int, out_channels: int, kernels: tuple[int, ...] = (5, 9, 13)) -> None:
        super().__init__()
        hidden = in_channels // 2
        self.cv1 = Conv(in_channels, hidden)
        self.cv2 = Conv(hidden * (len(kernels) + 1), out_channels)
        self.m = nn.ModuleList(nn.MaxPool2d(k, 1, k // 2) for k in kernels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cv1(x)
        return self.cv2(torch.cat((x, *(pool(x) for pool in self.m)), 1))


class SPPF(nn.Module):
    """`SPP` with kernels k, 2k-1, 3k-2 as three max pools of kernel k in a row: the same result with less work.

    With ``shortcut`` it is YOLO26's: no activation before the pools, and a residual connection if input and output
    channels are equal.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int = 5, pools: int = 3, shortcut: bool = False
    ) -> None:
        super().__init__()
        hidden = in_channels // 2
        self.cv1 = Conv(in_channels, hidden, activation=not shortcut)
        self.cv2 = Conv((1 + pools) * hidden, out_channels)
        self.m = nn.MaxPool2d(kernel, 1, kernel // 2)
        self.pools = pools
        self.add = shortcut and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        outputs = [self.cv1(x)]
        for _ in range(self.pools):
            outputs.append(self.m(outputs[-1]))
        y = self.cv2(torch.cat(outputs, 1))
        return x + y if self.add else y


class Attention(nn.Module):
    """Multi-head self-attention over all cells, with a depthwise convolution of the values as position encoding. Keys
    are half as wide as values. ``channels`` must be a multiple of ``heads``."""

    def __init__(self, channels: int, heads: int, key_ratio: float = 0.5) -> None:
        super().__init__()
        self.heads = heads
        self.value_width = channels // heads
        self.key_width = int(self.value_width * key_ratio)
        self.qkv = Conv(channels, channels + 2 * heads * self.key_width, activation=False)
        self.proj = Conv(channels, channels, activation=False)
        self.pe = Conv(channels, channels, 3, groups=channels, activation=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        # Cells before channels: no copies in channels_last, and the layout that attention kernels expect.
        tokens = self.qkv(x).flatten(2).transpose(1, 2).unflatten(2, (self.heads, -1)).transpose(1, 2)
        query, key, value = split_parts(tokens, (self.key_width, self.key_width, self.value_width), -1)
        mixed = F.scaled_dot_product_attention(query, key, value)  # (B, heads, cells, value_width)

        def to_map(t: Tensor) -> Tensor:
            return t.transpose(1, 2).reshape(batch, height, width, channels).permute(0, 3, 1, 2)

        attended = to_map(mixed)
        position = self.pe(to_map(value))
        if torch.onnx.is_in_onnx_export():  # OpenCV 4.7 cannot add to a depthwise convolution
            total = attended.flatten(2) + position.flatten(2)
            return self.proj(total.unflatten(2, (height, width)))
        return self.proj(attended + position)


def attention_heads(channels: int) -> int:
    """Returns the number of attention heads of 64 channels, at least one. Raises ValueError if ``channels`` is not a
    multiple of it."""
    heads = max(channels // 64, 1)
    if channels % heads:
        raise ValueError(f"has {channels} hidden channels, which cannot be divided among {heads} attention heads")
    return heads


class PSABlock(nn.Module):
    """Attention, then two 1x1 convolutions as a feed-forward network, each with a residual connection."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.attn = Attention(channels, heads)
        self.ffn = nn.Sequential(Conv(channels, 2 * channels), Conv(2 * channels, channels, activation=False))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.ffn(x)


class C2PSA(nn.Module):
    """Cross-stage partial block with self-attention in one half of the channels, in heads of 64 channels.

    Raises ValueError unless input and output channels are equal.
    """

    def __init__(self, in_channels: int, out_channels: int, repeats: int = 1, expansion: float = 0.5) -> None:
        super().__init__()
        if in_channels != out_channels:
            raise ValueError(f"needs equal input and output channels, got {in_channels} and {out_channels}")
        self.hidden = int(in_channels * expansion)
        heads = attention_heads(self.hidden)
        self.cv1 = Conv(in_channels, 2 * self.hidden)
        self.cv2 = Conv(2 * self.hidden, out_channels)
        self.m = nn.Sequential(*(PSABlock(self.hidden, heads) for _ in range(repeats)))

    def forward(self, x: Tensor) -> Tensor:
        kept, mixed = split_parts(self.cv1(x), (self.hidden, self.hidden), 1)
        return self.cv2(torch.cat((kept, self.m(mixed.clone())), 1))  # made contiguous once, as in C2f


class SeparableConv(nn.Module):
    """Depthwise convolution, then a 1x1 convolution, each with batch norm and activation."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.dconv = Conv(in_channels, in_channels, kernel, stride, groups=in_channels)
        self.pconv = Conv(in_channels, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.pconv(self.dconv(x))


class SeparableBottleneck(Bottleneck):
    """`Bottleneck` with a separable 3x3 convolution and the same number of channels throughout."""

    def __init__(self, channels: int, shortcut: bool = True) -> None:
        super().__init__(channels, channels, shortcut, expansion=1.0)
        self.cv2 = SeparableConv(channels, channels)


class SeparableC3(C3):
    """`C3` with separable bottlenecks."""

    def __init__(self, in_channels: int, out_channels: int, repeats: int = 1, shortcut: bool = True) -> None:
        super().__init__(in_channels, out_channels, 0, shortcut)
        hidden = out_channels // 2
        self.m = nn.Sequential(*(SeparableBottleneck(hidden, shortcut) for _ in range(repeats)))
