"""Planned batches to batches on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from data.planned_batch import PlannedBatch, RenderGroup
from data.render_torch import paint_layers, render_table
from utils.structures import Batch

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
            _log.info("--augment device: not compiled (%s); drawing is a few times slower", reason)
            self._compiled = None
            return paint_layers(*arguments)
        self._has_painted = True
        return painted
