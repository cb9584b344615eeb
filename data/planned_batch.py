"""Batches that are still to be drawn: labels, and for each picture the numbers of `data.render_table`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from data.augment import SamplePlan
from data.collate import collate, tile_quad
from data.dataset import LoadImagesAndLabels
from data.pyramid import PyramidLayout
from data.render_table import CachedPixels, PackedPixels, RenderTable, build_table
from data.samplers import BatchRequest
from utils.inline_tensors import InlineTensors
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
