"""The MIT-licensed YOLOv9 weights of MultimediaTechLab/YOLO (``v9-c.pt`` and so on).

The same graph as ours under other names, with two differences in the head: its box layers are convolutions in groups,
which are written out as whole ones with zeros, and the values of the distances' bins are fixed, not stored by our name.
Layers after the head serve training alone and are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

_OUTER = re.compile(r"^(?:model\.)*(?=\d+\.)")  # checkpoints of its trainer have more before the layer's number
_HEAD = re.compile(r"^(?:model\.)*(\d+)\.heads\.0\.anchor_conv\.0\.conv\.weight$")
_BRANCHES = {"anchor_conv": "cv2", "class_conv": "cv3"}


def is_mit_yolov9(tensors: Mapping[str, Tensor]) -> bool:
    return any(map(_HEAD.match, tensors))


def from_mit_yolov9(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """By the public convention."""
    head = min(int(match[1]) for match in map(_HEAD.match, tensors) if match)  # later ones are auxiliary
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, rest = _OUTER.sub("", name).partition(".")
        if not layer.isdecimal() or int(layer) > head:
            continue
        rest = _head_name(rest) if int(layer) == head else _block_name(rest)
        if rest:
            renamed[f"model.{layer}.{rest}"] = tensor
    return _with_whole_kernels(renamed, f"model.{head}.")


def _block_name(rest: str) -> str:
    """Names within a layer. A re-parametrised convolution, first of a bottleneck, calls its two parts as we do."""
    outer, bottleneck, inner = rest.partition(".bottleneck.")
    outer = re.sub(r"\bconv(\d)\b", r"cv\1", outer)
    number, _, inner = inner.partition(".")
    inner = re.sub(r"^conv(\d)\.", r"cv\1.", inner)
    name = f"{outer}.m.{number}.{inner}" if bottleneck else outer
    return re.sub(r"^conv\.(conv|bn)\.", r"cv1.\1.", name)  # the only convolution of a downsampling layer


def _head_name(rest: str) -> str:
    """Empty for the bins' values."""
    match = re.match(r"heads\.(\d+)\.(anchor_conv|class_conv)\.(.+)", rest)
    return f"{_BRANCHES[match[2]]}.{match[1]}.{match[3]}" if match else ""


def _with_whole_kernels(tensors: dict[str, Tensor], head: str) -> dict[str, Tensor]:
    for name in [name for name in tensors if re.match(rf"{re.escape(head)}cv2\.\d+\.(1\.conv|2)\.weight$", name)]:
        level = ".".join(name.split(".")[:4])
        channels = tensors[f"{level}.0.conv.weight"].shape[0]
        tensors[name] = ungrouped(tensors[name], channels)
        bins = tensors[f"{level}.2.weight"].shape[0] // 4
    tensors[f"{head}dfl.conv.weight"] = torch.arange(bins, dtype=torch.float32).view(1, -1, 1, 1)
    return tensors


def ungrouped(kernel: Tensor, in_channels: int) -> Tensor:
    """The kernel (O, I, h, w), zero between groups, that equals a grouped one (O, I / groups, h, w)."""
    out, within, height, width = kernel.shape
    groups = in_channels // within
    whole = kernel.new_zeros(groups, out // groups, groups, within, height, width)
    every = torch.arange(groups)
    whole[every, :, every] = kernel.view(groups, out // groups, within, height, width)
    return whole.view(out, in_channels, height, width)
