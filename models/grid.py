"""Cell centres of a feature pyramid, made once for each shape and device.

Legend: N cells over all levels, level by level, rows before columns; L levels.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

Shapes = tuple[tuple[int, int], ...]


def _make(shapes: Shapes, strides: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    centres, sizes = [], []
    for (height, width), stride in zip(shapes, strides):
        y = torch.arange(height, device=device, dtype=torch.float32) + 0.5
        x = torch.arange(width, device=device, dtype=torch.float32) + 0.5
        yy, xx = torch.meshgrid(y, x, indexing="ij")
        centres.append(torch.stack((xx, yy), -1).flatten(0, 1))
        sizes.append(torch.full((height * width, 1), float(stride), device=device))
    return torch.cat(centres), torch.cat(sizes)


@lru_cache(maxsize=64)
def _cached(shapes: Shapes, strides: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    # A tensor born in inference mode could not be used in training later.
    with torch.inference_mode(False), torch.no_grad():
        return _make(shapes, strides, device)


def cell_centres(shapes: Shapes, strides: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Centres float32 (N, 2), x and y in units of each level's stride, and strides float32 (N, 1) in canvas pixels.

    The result is shared between callers: never write into it.
    """
    if torch.compiler.is_compiling():  # constants of the graph there; a cache would only break it
        return _make(shapes, strides, device)
    return _cached(shapes, strides, device)


class GridLevels(NamedTuple):
    """Numbers of the levels' grids, on a device."""

    strides: Tensor  # float32 (L, 1), canvas pixels
    last: Tensor  # float32 (L, 2), the last column and row
    columns: Tensor  # int64 (L,)
    offset: Tensor  # int64 (L,), cells of all levels before
    cells: int  # of all levels


def _make_levels(shapes: Shapes, strides: tuple[int, ...], device: torch.device) -> GridLevels:
    sizes = [height * width for height, width in shapes]
    last = [[width - 1, height - 1] for height, width in shapes]
    return GridLevels(
        strides=torch.tensor(strides, dtype=torch.float32, device=device)[:, None],
        last=torch.tensor(last, dtype=torch.float32, device=device),
        columns=torch.tensor([width for _, width in shapes], device=device),
        offset=torch.tensor([sum(sizes[:level]) for level in range(len(sizes))], device=device),
        cells=sum(sizes),
    )


@lru_cache(maxsize=64)
def _cached_levels(shapes: Shapes, strides: tuple[int, ...], device: torch.device) -> GridLevels:
    with torch.inference_mode(False), torch.no_grad():
        return _make_levels(shapes, strides, device)


def grid_levels(shapes: Shapes, strides: tuple[int, ...], device: torch.device) -> GridLevels:
    """As `cell_centres`: shared between callers, never to be written into."""
    return (_make_levels if torch.compiler.is_compiling() else _cached_levels)(shapes, strides, device)
