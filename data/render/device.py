"""Renders tables with torch: a whole batch at once, on the device of its tensors.

Every canvas pixel is mapped back into the source of the patch that covers it (the last one painted, if several do).
Four neighbors are gathered and weighted; pixel operations and mixing follow. All arithmetic is elementwise, so on a
given device an image does not depend on the rest of its batch. `data.render.opencv` renders the same image, except for
interpolation.

Legend: B images of height H and width W, L layers, and P source pixels of C channels, as in `data.render.table`, which
also explains the coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data.render.table import Column, RenderTable
from utils.batches import Batch, map_tensors
from utils.errors import first_line
from utils.logger import get_logger
from utils.pixels import GRAY

# Canvas pixels that are painted together, so that they fit a CPU's cache, or to limit GPU memory.
PIXELS_PER_CHUNK = {"cpu": 2**18, "cuda": 2**25}
_PIXELS_PER_CHUNK_ELSEWHERE = 2**22  # on other devices

Painter = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class RenderGroup:
    """Samples of one canvas size, rendered together."""

    table: RenderTable
    pixels: Tensor | None  # (P, C) to which the table refers; None for the device cache
    # int64 (n,): images of the batch. Each consists of one sample, or of four samples of half its size, in two rows.
    images: Tensor


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """A `Batch` whose images will be rendered from ``groups``."""

    canvas_hw: tuple[int, int]
    groups: tuple[RenderGroup, ...]
    rest: Batch  # with empty images, (B, C, 0, 0)

    def to(self, device: torch.device, non_blocking: bool = True) -> PlannedBatch:
        """Moves tables, pixels and targets to ``device``."""
        groups = map_tensors(self.groups, lambda t: t.to(device, non_blocking=non_blocking))
        return replace(self, groups=groups, rest=self.rest.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PlannedBatch:
        """Copies to page-locked memory. torch's DataLoader calls it with ``pin_memory=True``."""
        return replace(self, groups=map_tensors(self.groups, Tensor.pin_memory), rest=self.rest.pin_memory())


class DeviceRenderer:
    """Moves planned batches to a device and renders them there, on the current stream. Does not synchronize."""

    def __init__(self, device: torch.device, cache: Tensor | None = None, *, fuse: bool = False) -> None:
        """
        Args:
            cache: (P, C) on the device, from `open_device_cache`, if the batches refer to one.
            fuse: whether to paint with a compiled kernel, which may round differently from separate operations.
        """
        self.device = device
        self._cache = cache
        self._paint: Painter = FusedPainter() if fuse else paint_layers

    def __call__(self, planned: PlannedBatch) -> Batch:
        planned = planned.to(self.device)
        if len(planned.groups) == 1 and planned.groups[0].table.canvas_hw == planned.canvas_hw:
            return replace(planned.rest, images=self._render(planned.groups[0]))
        height, width = planned.canvas_hw
        empty = planned.rest.images
        images = torch.empty((len(empty), height, width, empty.shape[1]), dtype=empty.dtype, device=self.device)
        for group in planned.groups:
            h, w = group.table.canvas_hw
            grids = self._render(group).permute(0, 2, 3, 1).unflatten(0, (-1, height // h, width // w))
            grids = grids.transpose(2, 3).reshape(-1, height, width, empty.shape[1])
            _indexable(images)[group.images] = _indexable(grids)
        return replace(planned.rest, images=images.permute(0, 3, 1, 2))

    def _render(self, group: RenderGroup) -> Tensor:
        pixels = self._cache if group.pixels is None else group.pixels
        assert pixels is not None, "a group without pixels refers to the device cache"
        return render_table(group.table, pixels, self._paint)


class FusedPainter:
    """Calls `paint_layers` as one compiled kernel, or uncompiled if compiling fails (which is logged once)."""

    def __init__(self) -> None:
        self._paint: Painter = torch.compile(paint_layers, dynamic=True)

    def __call__(self, *arguments: Any) -> Tensor:
        try:
            return self._paint(*arguments)
        except torch.OutOfMemoryError:  # uncompiled, it would need several times the memory
            raise
        except Exception as error:  # a compiler that does not work raises many kinds of errors
            if self._paint is paint_layers:
                raise
            message = "--render-on device: not compiled (%s); rendering is a few times slower"
            get_logger().info(message, first_line(error))
            self._paint = paint_layers
            return paint_layers(*arguments)


def paint_layers(
    geometry: Tensor,
    address: Tensor,
    pixels: Tensor,
    canvas_hw: tuple[int, int],
    operations: Sequence[Callable[[Tensor, Tensor], Tensor]],
    parameters: Sequence[Tensor],
) -> Tensor:
    """Paints the patches of layers and applies the pixel operations. Returns (L, H, W, C).

    The arguments are the fields of `RenderTable`, and source pixels (P, C).
    """
    sources = _find_sources(geometry, address, canvas_hw)
    largest = 255.0 if pixels.dtype == torch.uint8 else 65535.0
    value = (_interpolated(_indexable(pixels), sources) + 0.5).floor()
    value = torch.where(sources.is_covered.unsqueeze(-1), value, GRAY * largest / 255)
    for operation, values in zip(operations, parameters):
        value = operation(value, values)
    return (value.clamp(0, largest) + 0.5).to(pixels.dtype)


class _Sources(NamedTuple):
    """The source of every canvas pixel, as tensors (L, H, W)."""

    x: Tensor  # float32, on the level that the patch reads; integers are pixel centers
    y: Tensor
    origin: Tensor  # int64, address of the level's pixel (0, 0)
    pitch: Tensor  # int64, pixels per row of the level
    is_covered: Tensor  # bool, whether any patch covers the canvas pixel


def _find_sources(geometry: Tensor, address: Tensor, canvas_hw: tuple[int, int]) -> _Sources:
    """Finds the source of every canvas pixel. See `RenderTable` for the arguments."""
    height, width = canvas_hw
    device = geometry.device
    layers = len(geometry)
    column = torch.arange(width, device=device, dtype=torch.float32) + 0.5
    row = (torch.arange(height, device=device, dtype=torch.float32) + 0.5).unsqueeze(1)
    x = y = torch.zeros((layers, height, width), device=device)
    origin = pitch = torch.zeros((layers, height, width), dtype=torch.int64, device=device)
    covered = torch.zeros((layers, height, width), dtype=torch.bool, device=device)
    for slot in range(geometry.shape[1]):  # in painting order
        cells = geometry[:, slot, :, None, None]
        matrix = cells[:, Column.MATRIX].unbind(1)
        region = cells[:, Column.REGION].unbind(1)
        clamp = cells[:, Column.CLAMP].unbind(1)
        patch_x = (matrix[0] * column + matrix[2]) + matrix[1] * row
        patch_y = (matrix[3] * column + matrix[5]) + matrix[4] * row
        depth = (matrix[6] * column + matrix[8]) + matrix[7] * row  # 1 without perspective
        patch_x = patch_x / depth
        patch_y = patch_y / depth
        is_hit = (patch_x >= region[0]) & (patch_y >= region[1]) & (patch_x < region[2]) & (patch_y < region[3])
        is_hit = is_hit & (depth > 0)  # not beyond the horizon
        x = torch.where(is_hit, torch.minimum(torch.maximum(patch_x - 0.5, clamp[0]), clamp[2]), x)
        y = torch.where(is_hit, torch.minimum(torch.maximum(patch_y - 0.5, clamp[1]), clamp[3]), y)
        origin = torch.where(is_hit, address[:, slot, 0, None, None], origin)
        pitch = torch.where(is_hit, address[:, slot, 1, None, None], pitch)
        covered = covered | is_hit
    return _Sources(x, y, origin, pitch, covered)


def _interpolated(samples: Tensor, sources: _Sources) -> Tensor:
    """Interpolates the four neighbors of every source bilinearly. Returns float32 (L, H, W, C).

    ``samples``: (P, C), as `_indexable` returns them.
    """
    x_floor = sources.x.floor()
    y_floor = sources.y.floor()
    right_weight = (sources.x - x_floor).unsqueeze(-1)
    lower_weight = (sources.y - y_floor).unsqueeze(-1)
    left = x_floor.long()
    right = sources.x.ceil().long()
    upper = sources.origin + sources.pitch * y_floor.long()
    lower = sources.origin + sources.pitch * sources.y.ceil().long()

    def interpolated_row(start: Tensor) -> Tensor:
        return _float(samples[start + left]) * (1 - right_weight) + _float(samples[start + right]) * right_weight

    return interpolated_row(upper) * (1 - lower_weight) + interpolated_row(lower) * lower_weight


def render_table(table: RenderTable, pixels: Tensor, paint: Painter = paint_layers) -> Tensor:
    """Renders the images (B, C, H, W) of a table, stored as (B, H, W, C).

    Args:
        pixels: (P, C), source pixels on the table's device, to which its addresses refer.
        paint: `paint_layers` or a compiled form of it.
    """
    height, width = table.canvas_hw
    layers = len(table.geometry)
    rendered = torch.empty((layers, height, width, pixels.shape[1]), dtype=pixels.dtype, device=pixels.device)
    max_pixels = PIXELS_PER_CHUNK.get(pixels.device.type, _PIXELS_PER_CHUNK_ELSEWHERE)
    layers_per_chunk = max(max_pixels // max(height * width, 1), 1)
    for first in range(0, layers, layers_per_chunk):
        chunk = slice(first, first + layers_per_chunk)
        rendered[chunk] = paint(
            table.geometry[chunk],
            table.address[chunk],
            pixels,
            table.canvas_hw,
            table.operations,
            tuple(values[chunk] for values in table.parameters),
        )
    return _mixed(rendered, table).permute(0, 3, 1, 2)


def _mixed(rendered: Tensor, table: RenderTable) -> Tensor:
    """Mixes each of the L - B second layers into its image. Returns (B, H, W, C)."""
    first = rendered[: table.images]
    second = rendered[table.images :]
    if len(second) == 0:
        return first
    mix = table.mix[:, None, None, None]
    samples = _indexable(first)
    mixture = (_float(samples[table.mixed]) * mix + _float(_indexable(second)) * (1 - mix) + 0.5).to(first.dtype)
    return samples.index_copy(0, table.mixed, _indexable(mixture)).view(first.dtype)


def _indexable(samples: Tensor) -> Tensor:
    """Views uint16 as int16, because CUDA's kernels do not index uint16."""
    return samples.view(torch.int16) if samples.dtype == torch.uint16 else samples


def _float(samples: Tensor) -> Tensor:
    """Converts the result of `_indexable` to float32."""
    return (samples.int() & 0xFFFF).float() if samples.dtype == torch.int16 else samples.float()
