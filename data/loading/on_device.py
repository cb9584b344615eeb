"""``--render-on device``: workers plan batches, and the device renders them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from data.cache.decoding import Decoding
from data.cache.device import open_device_cache
from data.loading.packed_pixels import PackedPixels
from data.loading.shared_memory import new_pixels
from data.loading.worker import collate_quad
from data.render.device import DeviceRenderer, PlannedBatch, RenderGroup
from data.render.pyramid import PyramidLayout
from data.render.table import build_table
from data.samples.augmented import AugmentedImages
from data.samples.batch_request import BatchRequest, epoch_of
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext


class DeviceRendering(NamedTuple):
    """The two halves of rendering on the device."""

    make_batch: Callable[[BatchRequest], PlannedBatch]  # runs in the workers
    renderer: DeviceRenderer  # runs in this process


def render_on_device(
    ctx: DistributedContext, config: TrainConfig, dataset: AugmentedImages, workers: int
) -> DeviceRendering:
    """Prepares ``--render-on device``, and opens the cache of ``--cache device``.

    Every process of the run must call this. ``workers``: number of workers of the loader.
    """
    layout = None
    pixels = None
    if config.cache == "device":
        layout = PyramidLayout.of(dataset.source_hw)
        decoding = Decoding(max(workers, 2), ctx.is_main)
        pixels = open_device_cache(dataset.index, layout, ctx, decoding)
    fuse = ctx.device.type == "cuda" and not config.deterministic
    return DeviceRendering(partial(plan_batch, dataset, layout), DeviceRenderer(ctx.device, pixels, fuse=fuse))


def plan_batch(dataset: AugmentedImages, layout: PyramidLayout | None, request: BatchRequest) -> PlannedBatch:
    """Plans a training batch for `DeviceRenderer`.

    ``layout``: layout of the device cache that has the images; None if the batch carries the visible pixels.
    """
    plans = dataset.plans(request.keys, epochs=request.epochs)
    images = request.images
    pixel_format = dataset.index.pixels
    read_image = partial(dataset.source_image, epoch=epoch_of(request.keys))
    no_pixels = new_pixels(len(images), (0, 0), pixel_format)
    rest = collate_quad(dataset.planned(request.keys, plans), request, no_pixels)
    groups = []
    for canvas_hw in dict.fromkeys(plan.canvas_hw for plan in plans):
        selected = [n for n, members in enumerate(images) if plans[members[0]].canvas_hw == canvas_hw]
        sources = PackedPixels(read_image, pixel_format) if layout is None else layout
        table = build_table([plans[i] for n in selected for i in images[n]], canvas_hw, dataset.source_hw, sources)
        pixels = sources.pixels if isinstance(sources, PackedPixels) else None
        groups.append(RenderGroup(table, pixels, torch.tensor(selected, dtype=torch.int64)))
    return PlannedBatch(request.canvas_hw, tuple(groups), rest)
