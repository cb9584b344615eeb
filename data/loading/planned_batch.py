"""Batches that the device renders: labels, and for each picture the numbers of `data.render.table`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from data.augment.plan import SamplePlan
from data.dataset import LoadImagesAndLabels
from data.loading.collate import collate
from data.render.device import paint_layers, render_table
from data.render.mipmap import PyramidLayout
from data.render.table import CachedPixels, PackedPixels, RenderTable, build_table
from data.sampler import BatchRequest, Cell
from utils.shared_tensors import InlineTensors, new_pixels
from utils.structures import Batch


@dataclass(frozen=True, slots=True)
class RenderGroup(InlineTensors):
    """Samples of one canvas size, rendered together."""

    table: RenderTable
    pixels: Tensor | None  # uint8 (P, 3) that the table refers to; None: the device cache
    cells: Tensor  # int64 (n, 3): picture in the batch, row and column in its grid of cells of this canvas size

    def map(self, function: Callable[[Tensor], Tensor]) -> RenderGroup:
        pixels = None if self.pixels is None else function(self.pixels)
        return replace(self, table=self.table.map(function), pixels=pixels, cells=function(self.cells))


@dataclass(frozen=True, slots=True)
class PlannedBatch(InlineTensors):
    """A `Batch` whose images are to be drawn from ``groups``."""

    canvas_hw: tuple[int, int]
    groups: tuple[RenderGroup, ...]
    rest: Batch  # images are (B, 3, 0, 0)

    def to(self, device: torch.device, non_blocking: bool = True) -> PlannedBatch:
        groups = (group.map(lambda t: t.to(device, non_blocking=non_blocking)) for group in self.groups)
        return replace(self, groups=tuple(groups), rest=self.rest.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PlannedBatch:
        """Called by torch's DataLoader when ``pin_memory=True``."""
        groups = (group.map(lambda t: t.pin_memory()) for group in self.groups)
        return replace(self, groups=tuple(groups), rest=self.rest.pin_memory())


class PlannedBatches:
    """What workers run for a renderer on the device: a request to a planned batch."""

    def __init__(self, dataset: LoadImagesAndLabels, layout: PyramidLayout | None) -> None:
        """
        Args:
            dataset: of training samples.
            layout: of the device cache that holds its images; None: seen pixels travel with the batch.
        """
        self.dataset = dataset
        self.layout = layout

    def __call__(self, request: BatchRequest) -> PlannedBatch:
        plans, cells = self.dataset.plans(request.keys), request.cells()
        pixels = new_pixels(request.pictures, (0, 0))
        rest = collate(self.dataset.planned(request.keys, plans), cells, pixels)
        sizes = dict.fromkeys(plan.canvas_hw for plan in plans)
        members = ([(plan, cell) for plan, cell in zip(plans, cells) if plan.canvas_hw == size] for size in sizes)
        return PlannedBatch(request.canvas_hw, tuple(self._group(*zip(*pairs)) for pairs in members), rest)

    def _group(self, plans: Sequence[SamplePlan], cells: Sequence[Cell]) -> RenderGroup:
        sources = PackedPixels(self.dataset.source_image) if self.layout is None else CachedPixels(self.layout)
        table = build_table(plans, plans[0].canvas_hw, self.dataset.source_hw, sources)
        pixels = sources.pixels if isinstance(sources, PackedPixels) else None
        return RenderGroup(table, pixels, torch.tensor([cell[:3] for cell in cells], dtype=torch.int64))


_log = logging.getLogger("lockstep")


class DeviceRenderer:
    """Moves planned batches to a device and draws them there, on the stream that is current. Waits for nothing."""

    def __init__(self, device: torch.device, cache: Tensor | None = None, *, fuse: bool = False) -> None:
        """
        Args:
            device: where to.
            cache: uint8 (P, 3) on the device, of `open_device_cache`, if the batches refer to one.
            fuse: paint with one compiled kernel. Its rounding may differ from that of single operations.
        """
        self.device = device
        self._cache = cache
        self._paint: Callable[..., Tensor] = FusedPainter() if fuse else paint_layers

    def __call__(self, planned: PlannedBatch) -> Batch:
        """The batch on the device, images stored (B, H, W, 3)."""
        planned = planned.to(self.device)
        if len(planned.groups) == 1 and planned.groups[0].table.canvas_hw == planned.canvas_hw:
            return replace(planned.rest, images=self._render(planned.groups[0]))
        (height, width), count = planned.canvas_hw, len(planned.rest.images)
        pictures = torch.empty((count, height, width, 3), dtype=torch.uint8, device=self.device)
        for group in planned.groups:
            h, w = group.table.canvas_hw
            grid = pictures.view(count, height // h, h, width // w, w, 3).transpose(2, 3)
            grid[group.cells.unbind(1)] = self._render(group).permute(0, 2, 3, 1)
        return replace(planned.rest, images=pictures.permute(0, 3, 1, 2))

    def _render(self, group: RenderGroup) -> Tensor:
        pixels = self._cache if group.pixels is None else group.pixels
        if pixels is None:
            raise ValueError("the batch refers to a device cache, and there is none")
        return render_table(group.table, pixels, self._paint)


class FusedPainter:
    """`paint_layers` as one kernel; operation by operation where none can be compiled, which is said once."""

    def __init__(self) -> None:
        self._compiled: Callable[..., Tensor] | None = torch.compile(paint_layers, dynamic=True)
        self._has_painted = False

    def __call__(self, *arguments: Any) -> Tensor:
        if self._compiled is None:
            return paint_layers(*arguments)
        try:
            painted = self._compiled(*arguments)
        except Exception as error:  # whatever a machine without a working compiler comes up with
            if self._has_painted:
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            _log.info("--render-on device: not compiled (%s); drawing is a few times slower", reason)
            self._compiled = None
            return paint_layers(*arguments)
        self._has_painted = True
        return painted
