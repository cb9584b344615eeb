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
from data.render.table import PyramidLayout, build_table
from data.samples.augmented import AugmentedImages
from data.samples.batch_request import BatchRequest, epoch_of
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext


class DeviceRendering(NamedTuple):
    """What a loader needs for batches that are rendered on the device."""

    make_batch: Callable[[BatchRequest], PlannedBatch]  # in the workers
    renderer: DeviceRenderer  # in this process


def render_on_device(
    ctx: DistributedContext, config: TrainConfig, dataset: AugmentedImages, workers: int
) -> DeviceRendering:
    """Opens the cache on the device, if it is on, for ``--render-on device``. Every process of the run must call this.
    ``workers``: of the loader."""
    layout = None
    pixels = None
    if config.cache == "device":
        layout = PyramidLayout.of(dataset.source_hw)
        decoding = Decoding(max(workers, 2), ctx.is_main)
        pixels = open_device_cache(dataset.index, layout, ctx, decoding)
    fuse = ctx.device.type == "cuda" and not config.deterministic
    return DeviceRendering(partial(plan_batch, dataset, layout), DeviceRenderer(ctx.device, pixels, fuse=fuse))


def plan_batch(dataset: AugmentedImages, layout: PyramidLayout | None, request: BatchRequest) -> PlannedBatch:
    """A training batch for `DeviceRenderer` to render. ``layout``: of the device cache with the images; None: visible
    pixels are sent with the batch."""
    plans = dataset.plans(request.keys, epochs=request.epochs)
    images = request.images
    kind = dataset.index.pixels
    read_image = partial(dataset.source_image, epoch=epoch_of(request.keys))
    rest = collate_quad(dataset.planned(request.keys, plans), request, new_pixels(len(images), (0, 0), kind))
    groups = []
    for canvas_hw in dict.fromkeys(plan.canvas_hw for plan in plans):
        chosen = [n for n, members in enumerate(images) if plans[members[0]].canvas_hw == canvas_hw]
        sources = PackedPixels(read_image, kind) if layout is None else layout
        table = build_table([plans[i] for n in chosen for i in images[n]], canvas_hw, dataset.source_hw, sources)
        pixels = sources.pixels if isinstance(sources, PackedPixels) else None
        groups.append(RenderGroup(table, pixels, torch.tensor(chosen, dtype=torch.int64)))
    return PlannedBatch(request.canvas_hw, tuple(groups), rest)
