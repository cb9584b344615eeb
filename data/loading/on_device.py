"""``--render-on device``: workers plan batches, and the device renders them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from data.cache.decoding import Decoding
from data.cache.device import open_device_cache
from data.loading.packed_pixels import PackedPixels
from data.loading.shared_memory import new_pixels
from data.loading.worker import collate_quad
from data.render.device import DeviceRenderer, PlannedBatch, RenderGroup
from data.render.table import PyramidLayout, build_table
from data.samples.augmented import AugmentedImages
from data.samples.batch_request import BatchRequest
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext


def render_on_device(
    ctx: DistributedContext, config: TrainConfig, dataset: AugmentedImages, workers: int
) -> dict[str, Any]:
    """Arguments of `InfiniteDataLoader` for batches that are rendered on the device."""
    layout, pixels = None, None
    if config.cache == "device":
        layout = PyramidLayout.of(dataset.source_hw)
        decoding = Decoding(max(workers, 2), ctx.is_main)
        pixels = open_device_cache(dataset.index, layout, ctx, decoding)
    fuse = ctx.device.type == "cuda" and not config.deterministic
    return {
        "make_batch": partial(plan_batch, dataset, layout),
        "renderer": DeviceRenderer(ctx.device, pixels, fuse=fuse),
    }


def plan_batch(dataset: AugmentedImages, layout: PyramidLayout | None, request: BatchRequest) -> PlannedBatch:
    """A training batch for `DeviceRenderer` to render. ``layout``: of the device cache with the images; None: visible
    pixels are sent with the batch."""
    plans, images = dataset.plans(request.keys), request.images
    kind = dataset.index.pixels
    rest = collate_quad(dataset.planned(request.keys, plans), request, new_pixels(len(images), (0, 0), kind))
    groups = []
    for canvas_hw in dict.fromkeys(plan.canvas_hw for plan in plans):
        chosen = [n for n, members in enumerate(images) if plans[members[0]].canvas_hw == canvas_hw]
        sources = PackedPixels(dataset.source_images(request.keys), kind) if layout is None else layout
        table = build_table([plans[i] for n in chosen for i in images[n]], canvas_hw, dataset.source_hw, sources)
        pixels = sources.pixels if isinstance(sources, PackedPixels) else None
        groups.append(RenderGroup(table, pixels, torch.tensor(chosen, dtype=torch.int64)))
    return PlannedBatch(request.canvas_hw, tuple(groups), rest)
