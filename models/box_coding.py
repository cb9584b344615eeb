"""Cell centers of a feature pyramid and box coding, for heads, losses and assigners.

Legend: B images, L levels, N cells over all levels (level by level, row by row), R bins of a side's distance, S any
shape. Units: "cells" are multiples of the cell's own stride; everything else is in canvas pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Shapes = tuple[tuple[int, int], ...]  # rows and columns of each level
MAX_SIDE_STRIDES = 20_000.0


def grid_shapes(raw: Sequence[Tensor]) -> Shapes:
    """Returns the rows and columns of maps (B, channels, h, w), one per level."""
    return tuple((level.shape[2], level.shape[3]) for level in raw)


def cell_centers(shapes: Shapes, strides: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns centers float32 (N, 2), x and y in cells, and strides float32 (N, 1) in canvas pixels.

    Callers share the tensors and must not write to them.
    """
    # In a compiled graph the tensors become constants, and a cache would break the graph.
    make = _new_cell_centers if torch.compiler.is_compiling() else _cached_cell_centers
    return make(shapes, strides, device)


@lru_cache(maxsize=64)  # a run may have hundreds of canvases, whose cells take up to a megabyte each
def _cached_cell_centers(shapes: Shapes, strides: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    # A tensor created in inference mode could not be used in training later.
    with torch.inference_mode(False), torch.no_grad():
        return _new_cell_centers(shapes, strides, device)


def _new_cell_centers(shapes: Shapes, strides: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    centers, sizes = [], []
    for (height, width), stride in zip(shapes, strides):
        y = torch.arange(height, device=device, dtype=torch.float32) + 0.5
        x = torch.arange(width, device=device, dtype=torch.float32) + 0.5
        yy, xx = torch.meshgrid(y, x, indexing="ij")
        centers.append(torch.stack((xx, yy), -1).flatten(0, 1))
        sizes.append(torch.full((height * width, 1), float(stride), device=device))
    return torch.cat(centers), torch.cat(sizes)


def from_host(array: np.ndarray, device: torch.device) -> Tensor:
    """Copies an array to ``device``; to a GPU from pinned memory, so that the host does not wait."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def flatten_levels(raw: Sequence[Tensor]) -> Tensor:
    """Joins maps (B, channels, h, w) of all levels to (B, N, channels), float32 at least. Cheap for channels_last."""
    flat = torch.cat([level.permute(0, 2, 3, 1).flatten(1, 2) for level in raw], dim=1)
    return flat.to(torch.promote_types(flat.dtype, torch.float32))


def flatten_cells(raw: Sequence[Tensor]) -> Tensor:
    """Joins maps (B, channels, h, w) of all levels to (B, channels, N), float32 at least."""
    flat = torch.cat([level.flatten(2) for level in raw], dim=2)
    return flat.to(torch.promote_types(flat.dtype, torch.float32))


def expected_distances(logits: Tensor) -> Tensor:
    """Computes the mean of each side's distribution over distances 0..R-1 (Li et al. 2020): (*S, R) -> (*S), cells.

    A single bin is the distance itself.
    """
    if logits.shape[-1] == 1:
        return logits.squeeze(-1)
    bins = torch.arange(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    return (logits.softmax(-1) * bins).sum(-1)


def convolved_distances(logits: Tensor, bins: int) -> Tensor:
    """Computes `expected_distances` for ONNX graphs: (B, 4 * R, N) -> (B, 4, N), R = ``bins``.

    The mean is a convolution with constant weights: OpenCV 4.8 gives wrong results for sums over one dimension.
    """
    if bins == 1:
        return logits
    probabilities = logits.unflatten(1, (4, bins)).softmax(2).flatten(1, 2)
    weight = torch.arange(bins, dtype=logits.dtype, device=logits.device).view(1, bins, 1, 1).repeat(4, 1, 1, 1)
    return F.conv2d(probabilities.unsqueeze(2), weight, groups=4).squeeze(2)


def distances_to_xyxy(distances: Tensor, centers: Tensor, strides: Tensor) -> Tensor:
    """Decodes distances (*S, 4) in cells to the left, top, right and bottom side: (*S, 4), xyxy pixels.

    ``centers`` (*S, 2) in cells and ``strides`` (*S, 1) in pixels, as from `cell_centers`, broadcast.
    """
    left_top, right_bottom = distances.split(2, -1)
    return torch.cat((centers - left_top, centers + right_bottom), -1) * strides


def anchor_to_cxcywh(logits: Tensor, anchors: Tensor) -> Tensor:
    """Decodes outputs of an anchor head (*S, 4), as YOLOv5 does: (*S, 4), cxcywh in cells.

    The center, relative to the cell's upper left corner, is in (-0.5, 1.5), up to half a cell outside the cell. A side
    is up to 4 times its anchor's; ``anchors`` (*S, 2) are in cells.
    """
    doubled = logits.sigmoid() * 2
    return torch.cat((doubled[..., :2] - 0.5, doubled[..., 2:].square() * anchors), dim=-1)


def offsets_to_cxcywh(logits: Tensor, centers: Tensor, strides: Tensor) -> Tensor:
    """Decodes YOLOX's outputs (*S, 4): (*S, 4), cxcywh in pixels.

    Outputs are the center relative to the cell's upper left corner and the logarithms of the sides, in cells. Sides are
    clamped to `MAX_SIDE_STRIDES`, larger than any canvas, so that they stay finite. ``centers`` and ``strides``: as in
    `distances_to_xyxy`.
    """
    offset, log_size = logits.split(2, -1)
    size = log_size.clamp(max=math.log(MAX_SIDE_STRIDES)).exp()
    return torch.cat((centers - 0.5 + offset, size), -1) * strides


def cxcywh_to_offsets(boxes: Tensor, centers: Tensor, strides: Tensor) -> Tensor:
    """Encodes boxes (*S, 4), cxcywh in pixels, as YOLOX's outputs (*S, 4): the inverse of `offsets_to_cxcywh`.

    A side of 0 counts as 1e-8 strides, so that its logarithm is finite.
    """
    center, size = (boxes / strides).split(2, -1)
    return torch.cat((center - centers + 0.5, size.clamp(min=1e-8).log()), -1)
