"""Batches that the device renders: labels, and for each picture the numbers of `data.render.table`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.augment.plan import SamplePlan
from data.dataset import LoadImagesAndLabels
from data.loading.collate import collate, tile_quad
from data.render.device import paint_layers, render_table
from data.render.mipmap import PyramidLayout
from data.render.table import CachedPixels, PackedPixels, RenderTable, build_table
from data.sampler import BatchRequest
from utils.shared_tensors import InlineTensors
from utils.structures import Batch


@dataclass(frozen=True, slots=True)
class RenderGroup(InlineTensors):
    """Drawings of one canvas size: whole pictures, or quarters of which four in a row make a picture."""

    table: RenderTable
    pixels: Tensor | None  # uint8 (P, 3) that the table refers to; None: the device cache
    places: Tensor  # int64 (n,) of the pictures in the batch
    quarters: bool

    def map(self, function: Callable[[Tensor], Tensor]) -> RenderGroup:
        pixels = None if self.pixels is None else function(self.pixels)
        return replace(self, table=self.table.map(function), pixels=pixels, places=function(self.places))


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
        if all(len(keys) == 1 for keys in request.pictures):
            keys = [one[0] for one in request.pictures]
            drawn = self.dataset.plans(keys)
            plans, samples = [[p] for p in drawn], [[s] for s in self.dataset.undrawn(keys, drawn)]
        else:  # a picture has a canvas size of its own
            plans = [self.dataset.plans(keys) for keys in request.pictures]
            samples = [self.dataset.undrawn(keys, own) for keys, own in zip(request.pictures, plans)]
        rest = collate([s[0] if len(s) == 1 else tile_quad(s) for s in samples], (0, 0))
        whole = [number for number, own in enumerate(plans) if len(own) == 1]
        tiled = [number for number, own in enumerate(plans) if len(own) > 1]
        groups = [self._group([plans[place] for place in places], places) for places in (whole, tiled) if places]
        return PlannedBatch(request.canvas_hw, tuple(groups), rest)

    def _group(self, own: list[list[SamplePlan]], places: list[int]) -> RenderGroup:
        plans = [plan for four_or_one in own for plan in four_or_one]
        sources = PackedPixels(self.dataset.source_image) if self.layout is None else CachedPixels(self.layout)
        table = build_table(plans, plans[0].canvas_hw, self.dataset.source_hw, sources)
        return RenderGroup(
            table=table,
            pixels=sources.pixels if isinstance(sources, PackedPixels) else None,
            places=torch.from_numpy(np.array(places)),
            quarters=len(plans) > len(places),
        )


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
        if len(planned.groups) == 1 and not planned.groups[0].quarters:
            return replace(planned.rest, images=self._drawn(planned.groups[0]))
        shape = (len(planned.rest.images), *planned.canvas_hw, 3)
        pictures = torch.empty(shape, dtype=torch.uint8, device=self.device)
        for group in planned.groups:
            drawn = self._drawn(group).permute(0, 2, 3, 1)
            pictures.index_copy_(0, group.places, joined(drawn) if group.quarters else drawn)
        return replace(planned.rest, images=pictures.permute(0, 3, 1, 2))

    def _drawn(self, group: RenderGroup) -> Tensor:
        pixels = self._cache if group.pixels is None else group.pixels
        if pixels is None:
            raise ValueError("the batch refers to a device cache, and there is none")
        return render_table(group.table, pixels, self._paint)


def joined(quarters: Tensor) -> Tensor:
    """(4n, h, w, 3) to (n, 2h, 2w, 3): each four in a 2 x 2 grid."""
    count, height, width, _ = quarters.shape
    grid = quarters.view(count // 4, 2, 2, height, width, 3).permute(0, 1, 3, 2, 4, 5)
    return grid.reshape(count // 4, 2 * height, 2 * width, 3)


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
