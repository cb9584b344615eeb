"""Converts tensor names of other trainers to ours: YOLOX, and YOLOv9 of MultimediaTechLab/YOLO."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

# YOLOX

HEAD = 24  # index of the head in configs/models/yolox.yaml and yoloxnano.yaml
STEM = "backbone.backbone.stem.conv."
# Prefixes of names, and the layers of our model that they belong to.
LAYERS = {
    "backbone.backbone.stem.conv.": 0,
    "backbone.backbone.dark2.0.": 1,
    "backbone.backbone.dark2.1.": 2,
    "backbone.backbone.dark3.0.": 3,
    "backbone.backbone.dark3.1.": 4,
    "backbone.backbone.dark4.0.": 5,
    "backbone.backbone.dark4.1.": 6,
    "backbone.backbone.dark5.0.": 7,
    "backbone.backbone.dark5.1.": 8,
    "backbone.backbone.dark5.2.": 9,
    "backbone.lateral_conv0.": 10,
    "backbone.C3_p4.": 13,
    "backbone.reduce_conv1.": 14,
    "backbone.C3_p3.": 17,
    "backbone.bu_conv2.": 18,
    "backbone.C3_n3.": 20,
    "backbone.bu_conv1.": 21,
    "backbone.C3_n4.": 23,
    "head.": HEAD,
}


def is_yolox(tensors: Mapping[str, Tensor]) -> bool:
    """Returns True for the tensors of a YOLOX model under their original names."""
    kernel = tensors.get(f"{STEM}conv.weight")
    return kernel is not None and kernel.ndim == 4 and "head.obj_preds.0.weight" in tensors


def from_yolox(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames tensors to the public convention. Tensors that the model does not have keep their names.

    YOLOX takes BGR images in [0, 255]; the first kernel is changed so that it takes RGB images in [0, 1].
    """
    renamed = {_yolox_name(name): tensor for name, tensor in tensors.items()}
    kernel = renamed["model.0.conv.weight"]
    if kernel.shape[1:] == (12, 3, 3):
        renamed["model.0.conv.weight"] = without_focus(kernel).flip(1) * 255
    return renamed


def without_focus(kernel: Tensor) -> Tensor:
    """Returns the kernel (O, C, 6, 6) of stride 2 and padding 2 that equals a focus layer and a kernel (O, 4C, 3, 3).

    A focus layer stacks the upper left pixels of all 2x2 squares, then the lower left, upper right and lower right
    ones.
    """
    out, stacked = kernel.shape[:2]
    by_pixel = kernel.view(out, 2, 2, stacked // 4, 3, 3)  # output, pixel's column, its row, channel, rows, columns
    return by_pixel.permute(0, 3, 4, 2, 5, 1).reshape(out, stacked // 4, 6, 6)


def _yolox_name(name: str) -> str:
    for prefix, index in LAYERS.items():
        if name.startswith(prefix):
            local_name = name.removeprefix(prefix)
            if index != HEAD:
                local_name = re.sub(r"\bconv([123])\.", r"cv\1.", local_name)
            return f"model.{index}.{local_name}"
    return name


# YOLOv9 of MultimediaTechLab/YOLO

_OUTER = re.compile(r"^(?:model\.)*(?=\d+\.)")  # checkpoints of its trainer have a longer prefix
_HEAD = re.compile(r"^(?:model\.)*(\d+)\.heads\.0\.anchor_conv\.0\.conv\.weight$")
_BRANCHES = {"anchor_conv": "cv2", "class_conv": "cv3"}


def from_mit_yolov9(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames tensors to the public convention, and drops the auxiliary head's."""
    head = min(int(match[1]) for match in map(_HEAD.match, tensors) if match)  # later ones are auxiliary
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, local_name = _OUTER.sub("", name).partition(".")
        if not layer.isdecimal() or int(layer) > head:
            continue
        public_name = _head_name(local_name) if int(layer) == head else _block_name(local_name)
        if public_name:
            renamed[f"model.{layer}.{public_name}"] = tensor
    return _with_head_kernels(renamed, f"model.{head}.")


def _block_name(local_name: str) -> str:
    """Converts a name within a layer. The two convolutions of a `RepConv` are named as ours."""
    outer, bottleneck, inner = local_name.partition(".bottleneck.")
    outer = re.sub(r"\bconv(\d)\b", r"cv\1", outer)
    number, _, inner = inner.partition(".")
    inner = re.sub(r"^conv(\d)\.", r"cv\1.", inner)
    name = f"{outer}.m.{number}.{inner}" if bottleneck else outer
    return re.sub(r"^conv\.(conv|bn)\.", r"cv1.\1.", name)  # the only convolution of a downsampling layer


def _head_name(local_name: str) -> str:
    """Converts a name within the head; empty for the values of the bins."""
    match = re.match(r"heads\.(\d+)\.(anchor_conv|class_conv)\.(.+)", local_name)
    return f"{_BRANCHES[match[2]]}.{match[1]}.{match[3]}" if match else ""


def _with_head_kernels(tensors: dict[str, Tensor], head: str) -> dict[str, Tensor]:
    """Replaces the grouped kernels of the head's box layers and adds the values of the bins. Raises RuntimeError,
    ArithmeticError or ValueError for kernels of a damaged file that cannot be grouped."""
    pattern = re.compile(rf"{re.escape(head)}cv2\.\d+\.(1\.conv|2)\.weight$")
    for name in [name for name in tensors if pattern.match(name)]:
        level = ".".join(name.split(".")[:4])
        first = tensors.get(f"{level}.0.conv.weight")
        if first is None:
            continue
        tensors[name] = ungrouped(tensors[name], len(first))
        if name == f"{level}.2.weight":
            bins = len(tensors[name]) // 4
            tensors[f"{head}dfl.conv.weight"] = torch.arange(bins, dtype=torch.float32).view(1, -1, 1, 1)
    return tensors


def ungrouped(kernel: Tensor, in_channels: int) -> Tensor:
    """Returns the kernel (O, I, h, w), zero between groups, that equals a grouped one (O, I / groups, h, w)."""
    out, group_width, height, width = kernel.shape
    groups = in_channels // group_width
    dense = kernel.new_zeros(groups, out // groups, groups, group_width, height, width)
    group = torch.arange(groups)
    dense[group, :, group] = kernel.view(groups, out // groups, group_width, height, width)
    return dense.view(out, in_channels, height, width)


def to_public_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames tensors of any known layout to the public convention."""
    if tensors and all(name.startswith("module.") for name in tensors):  # from (Distributed)DataParallel
        tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    if is_yolox(tensors):
        tensors = from_yolox(tensors)
    if any(map(_HEAD.match, tensors)):
        tensors = from_mit_yolov9(tensors)
    return tensors


def usual_image_size(tensors: Mapping[str, Tensor]) -> int:
    """Guesses the image size in pixels for weights, under their original names, whose file does not state it.

    YOLOX-nano and -tiny, at most 24 channels wide, use smaller images than all others.
    """
    return 416 if is_yolox(tensors) and len(tensors[f"{STEM}conv.weight"]) <= 24 else 640
