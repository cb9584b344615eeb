"""YOLOX's public checkpoints (``yolox_s.pth`` and so on): their names, their first layer and their pixels.

They begin with a focus, which lays the pixels of each 2x2 square behind one another, and want channels in the order
blue, green, red and values up to 255 (as all public weights since release 0.1.1 do). Our models begin with the 6x6
convolution that equals focus and convolution, and want red, green, blue up to 1; the kernel takes up both differences.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

HEAD = 24  # index of the head in configs/models/yolox.yaml and yoloxnano.yaml
STEM = "backbone.backbone.stem.conv."
LAYERS = {
    STEM: 0,
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
    return f"{STEM}conv.weight" in tensors and "head.obj_preds.0.weight" in tensors


def image_size_of_yolox(tensors: Mapping[str, Tensor]) -> int:
    """Pixels that the public weights are meant for: nano and tiny, at most 24 channels wide, for smaller images."""
    return 416 if len(tensors[f"{STEM}conv.weight"]) <= 24 else 640


def from_yolox(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """By the public convention; what has no place in the model keeps its name."""
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
