"""Greedy non-maximum suppression of many groups: only a better kept box of the same group suppresses a box.

torchvision's operator is called once per image, with the groups shifted apart, in float64: the shifted coordinates keep
all their bits. CUDA's kernel rounds the threshold to float32, so all devices get the next float32 above it: an IoU of
exactly 0.3 or 0.7 is not higher than the threshold.

Legend: M boxes, G groups per image.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from utils.errors import UserError

_SHIFT = 2.0**20  # pixels between groups


def nms_keep(boxes_xyxy: Tensor, group: Tensor, iou_thres: float, groups_per_image: int) -> Tensor:
    """Selects the boxes to keep. A box is suppressed if its IoU with a kept one is higher than ``iou_thres``; boxes
    without area overlap nothing.

    Args:
        boxes_xyxy: float32 (M, 4), sorted by image, the best of each group first.
        group: int64 (M,), in image i from i * G up to (i + 1) * G - 1.
        groups_per_image: G.

    Returns bool (M,). Raises what `load_nms` raises.
    """
    device = boxes_xyxy.device
    if device.type not in ("cpu", "cuda"):  # MPS has neither float64 nor this operator
        boxes_xyxy = boxes_xyxy.cpu()
        group = group.cpu()
    nms = load_nms(group.device)
    threshold = float(torch.tensor(iou_thres).nextafter(torch.tensor(1.0)))
    shifted = boxes_xyxy.double() + (group % groups_per_image * _SHIFT)[:, None]
    lengths = (group // groups_per_image).unique_consecutive(return_counts=True)[1].tolist()
    best_first = torch.arange(len(group), 0, -1, dtype=shifted.dtype, device=group.device)
    keep = torch.zeros_like(group, dtype=torch.bool)
    for boxes, scores, of_image in zip(shifted.split(lengths), best_first.split(lengths), keep.split(lengths)):
        of_image.index_fill_(0, nms(boxes, scores, threshold), True)
    return keep.to(device)


@functools.cache
def load_nms(device: torch.device) -> Callable[[Tensor, Tensor, float], Tensor]:
    """Loads torchvision's operators and returns ``torchvision.ops.nms``. Importing torchvision would take seconds,
    because it also loads its models, its data sets and torch._dynamo.

    Raises UserError if torchvision was built for another torch, or without CUDA and ``device`` is a GPU, and
    ModuleNotFoundError if it is not installed.
    """
    package = find_spec("torchvision")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")
    folder = Path(package.origin).parent
    try:
        for library in folder.glob("_C*"):
            torch.ops.load_library(library)
        nms = torch.ops.torchvision.nms
    except (OSError, AttributeError):
        raise UserError(
            f"torchvision in {folder} was not built for torch {torch.__version__}; "
            "pip install --upgrade torch torchvision"
        ) from None
    if device.type == "cuda" and not torch._C._dispatch_has_kernel_for_dispatch_key("torchvision::nms", "CUDA"):
        raise UserError(
            f"torchvision in {folder} has no CUDA kernels, which torch {torch.__version__} has; "
            "pip install --force-reinstall torch torchvision"
        )
    return nms
