"""Tensor names of other trainers, converted to ours: YOLOX, and YOLOv9 of MultimediaTechLab/YOLO."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

# YOLOX

HEAD = 24  # index of the head in configs/models/yolox.yaml and yoloxnano.yaml
STEM = "backbone.backbone.stem.conv."
_STAGES = ("stem.conv", *(f"dark{stage}.{part}" for stage in (2, 3, 4, 5) for part in (0, 1)), "dark5.2")
_NECK = (
    ("lateral_conv0", 10), ("C3_p4", 13), ("reduce_conv1", 14), ("C3_p3", 17), ("bu_conv2", 18), ("C3_n3", 20),
    ("bu_conv1", 21), ("C3_n4", 23),
)  # fmt: skip
LAYERS = {
    **{f"backbone.backbone.{name}.": index for index, name in enumerate(_STAGES)},
    **{f"backbone.{name}.": index for name, index in _NECK},
    "head.": HEAD,
}


def is_yolox(tensors: Mapping[str, Tensor]) -> bool:
    return f"{STEM}conv.weight" in tensors and "head.obj_preds.0.weight" in tensors


def from_yolox(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the names of the public convention; tensors that the model does not have keep their names."""
    renamed = {_name(name): tensor for name, tensor in tensors.items()}
    kernel = renamed["model.0.conv.weight"]
    if kernel.ndim == 4 and kernel.shape[1:] == (12, 3, 3):
        renamed["model.0.conv.weight"] = without_focus(kernel).flip(1) * 255
    return renamed


def without_focus(kernel: Tensor) -> Tensor:
    """The kernel (O, C, 6, 6) of stride 2 and padding 2 that equals a focus and a kernel (O, 4C, 3, 3).

    A focus lists the upper left pixels of all squares, then the lower left, upper right and lower right ones.
    """
    out, stacked = kernel.shape[:2]
    by_pixel = kernel.view(out, 2, 2, stacked // 4, 3, 3)  # output, pixel's column, its row, channel, rows, columns
    return by_pixel.permute(0, 3, 4, 2, 5, 1).reshape(out, stacked // 4, 6, 6)


def _name(name: str) -> str:
    for prefix, index in LAYERS.items():
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            return f"model.{index}." + (rest if index == HEAD else re.sub(r"\bconv([123])\.", r"cv\1.", rest))
    return name


# YOLOv9 of MultimediaTechLab/YOLO

_OUTER = re.compile(r"^(?:model\.)*(?=\d+\.)")  # checkpoints of its trainer have more before the layer's number
_HEAD = re.compile(r"^(?:model\.)*(\d+)\.heads\.0\.anchor_conv\.0\.conv\.weight$")
_BRANCHES = {"anchor_conv": "cv2", "class_conv": "cv3"}


def from_mit_yolov9(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the names of the public convention."""
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
    """Names within a layer. The two parts of a re-parameterized convolution have the same names as ours."""
    outer, bottleneck, inner = rest.partition(".bottleneck.")
    outer = re.sub(r"\bconv(\d)\b", r"cv\1", outer)
    number, _, inner = inner.partition(".")
    inner = re.sub(r"^conv(\d)\.", r"cv\1.", inner)
    name = f"{outer}.m.{number}.{inner}" if bottleneck else outer
    return re.sub(r"^conv\.(conv|bn)\.", r"cv1.\1.", name)  # the only convolution of a downsampling layer


def _head_name(rest: str) -> str:
    """The name within the head; empty for the values of the bins."""
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


def to_public_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of any known layout with the names of the public convention."""
    if tensors and all(name.startswith("module.") for name in tensors):  # of (Distributed)DataParallel
        tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    if is_yolox(tensors):
        tensors = from_yolox(tensors)
    if any(map(_HEAD.match, tensors)):
        tensors = from_mit_yolov9(tensors)
    return tensors


def usual_image_size(tensors: Mapping[str, Tensor]) -> int:
    """The usual image size, pixels, of weights under their original names, for files that do not state it: YOLOX-nano
    and -tiny, at most 24 channels wide, use smaller images."""
    return 416 if is_yolox(tensors) and len(tensors[f"{STEM}conv.weight"]) <= 24 else 640
