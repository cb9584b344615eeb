"""Tables to pixels with torch: a whole batch, on whatever device its tensors are.

Every canvas pixel is taken back into the source of the tile that lies there (the last one painted wins), four
neighbours are gathered and weighted, then come colour and mixing. Only sums and products of single numbers: a picture
does not depend on what else is in its batch, given the same device. `data.render.opencv` draws the same picture, to
within interpolation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from data.render.table import Column, RenderTable
from utils.structures import GREY

PIXELS_AT_ONCE = {
    "cpu": 2**18,
    "cuda": 2**25,
}  # of layers that are painted together: what fits a cache, or bounds memory

Painter = Callable[[Tensor, Tensor, Tensor, Tensor, tuple[int, int], bool], Tensor]


def render_table(table: RenderTable, pixels: Tensor, paint: Painter | None = None) -> Tensor:
    """The pictures of a table.

    Args:
        table: on some device.
        pixels: uint8 (P, 3) source pixels on the same device, to which the table's addresses refer.
        paint: `paint_layers`, perhaps compiled.

    Returns:
        uint8 (B, 3, H, W), stored (B, H, W, 3).
    """
    paint = paint or paint_layers
    height, width = table.canvas_hw
    layers = len(table.geometry)
    drawn = torch.empty((layers, height, width, 3), dtype=torch.uint8, device=pixels.device)
    at_once = max(PIXELS_AT_ONCE.get(pixels.device.type, 2**22) // max(height * width, 1), 1)
    for first in range(0, layers, at_once):
        part = slice(first, first + at_once)
        arguments = (table.geometry[part], table.address[part], table.colour[part], pixels)
        drawn[part] = paint(*arguments, table.canvas_hw, table.has_perspective)
    return _mixed(drawn, table).permute(0, 3, 1, 2)


def paint_layers(
    geometry: Tensor, address: Tensor, colour: Tensor, pixels: Tensor, canvas_hw: tuple[int, int], has_perspective: bool
) -> Tensor:
    """Layers of a table, tiles and colour: uint8 (L, H, W, 3). Arguments as in `RenderTable`, pixels uint8 (P, 3)."""
    x, y, origin, pitch, covered = _sources(geometry, address, canvas_hw, has_perspective)
    left, top = x.floor(), y.floor()
    right_share, low_share = (x - left).unsqueeze(-1), (y - top).unsqueeze(-1)
    upper, lower = origin + pitch * top.long(), origin + pitch * y.ceil().long()
    left, right = left.long(), x.ceil().long()

    def row(start: Tensor) -> Tensor:
        first, second = (_gather(pixels, start + column) for column in (left, right))
        return first * (1 - right_share) + second * right_share

    value = row(upper) * (1 - low_share) + row(lower) * low_share
    value = torch.where(covered.unsqueeze(-1), (value + 0.5).floor(), float(GREY))
    columns = colour.transpose(1, 2)[:, :, None, None, :]  # (L, 3 from, 1, 1, 3 to)
    value = value[..., 0:1] * columns[:, 0] + value[..., 1:2] * columns[:, 1] + value[..., 2:3] * columns[:, 2]
    return (value.clamp(0, 255) + 0.5).to(torch.uint8)


def _sources(
    geometry: Tensor, address: Tensor, canvas_hw: tuple[int, int], has_perspective: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """For every canvas pixel (L, H, W): x and y of its source, in pixel centres; address and pitch of that image; and
    whether there is one."""
    height, width = canvas_hw
    device, layers = geometry.device, len(geometry)
    column = torch.arange(width, device=device, dtype=torch.float32) + 0.5
    line = (torch.arange(height, device=device, dtype=torch.float32) + 0.5).unsqueeze(1)
    x = y = torch.zeros((layers, height, width), device=device)
    origin = pitch = torch.zeros((layers, height, width), dtype=torch.int64, device=device)
    covered = torch.zeros((layers, height, width), dtype=torch.bool, device=device)
    for slot in range(geometry.shape[1]):  # in painting order
        cells = geometry[:, slot, :, None, None]
        matrix, inside, read = (cells[:, part].unbind(1) for part in (Column.MATRIX, Column.INSIDE, Column.READ))
        own_x = (matrix[0] * column + matrix[2]) + matrix[1] * line
        own_y = (matrix[3] * column + matrix[5]) + matrix[4] * line
        if has_perspective:
            depth = (matrix[6] * column + matrix[8]) + matrix[7] * line
            own_x, own_y = own_x / depth, own_y / depth
        here = (own_x >= inside[0]) & (own_y >= inside[1]) & (own_x < inside[2]) & (own_y < inside[3])
        if has_perspective:
            here = here & (depth > 0)  # not beyond the horizon
        x = torch.where(here, torch.minimum(torch.maximum(own_x - 0.5, read[0]), read[2]), x)
        y = torch.where(here, torch.minimum(torch.maximum(own_y - 0.5, read[1]), read[3]), y)
        origin = torch.where(here, address[:, slot, 0, None, None], origin)
        pitch = torch.where(here, address[:, slot, 1, None, None], pitch)
        covered = covered | here
    return x, y, origin, pitch, covered


def _gather(pixels: Tensor, places: Tensor) -> Tensor:
    """float32 (L, H, W, 3) of places (L, H, W)."""
    return pixels[places].float()


def _mixed(drawn: Tensor, table: RenderTable) -> Tensor:
    """uint8 (B, H, W, 3): second layers (L - B of them) mixed into the pictures that they belong to."""
    first, second = drawn[: table.pictures], drawn[table.pictures :]
    if len(second) == 0:
        return first
    share = table.share[:, None, None, None]
    mixture = (first[table.mixed] * share + second * (1 - share) + 0.5).to(torch.uint8)
    return first.index_copy(0, table.mixed, mixture)
