"""Opens the cache of a split's images that ``--cache`` selects: in memory, on the disk, or on the device."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from data.cache.decoding import Decoding
from data.cache.device import open_device_cache
from data.cache.disk import open_disk_cache
from data.cache.full_size import open_full_size_cache
from data.cache.image_cache import ImageCache
from data.cache.ram import open_ram_cache
from data.index.index import DatasetIndex
from data.render.pyramid import PyramidLayout
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext, torch_distributed_zero_first
from utils.distributed.groups import one_per_node_group
from utils.errors import UserError

MAX_DECODING_THREADS = 64


def decoding_for(ctx: DistributedContext, workers: int, *, antialias: bool = True) -> Decoding:
    """Returns a `Decoding` with the threads of all processes of this node, because the others wait while one decodes.

    ``workers``: number of workers of each process's loader.
    """
    threads = min(max(workers, 2) * ctx.local_world_size, MAX_DECODING_THREADS)
    return Decoding(threads, ctx.is_main, antialias=antialias)


def open_cache(
    ctx: DistributedContext, kind: str, index: DatasetIndex, *, config: TrainConfig, decoding: Decoding
) -> ImageCache | None:
    """Opens a cache on the host and fills it; returns None for the kind "none", and without images.

    Every process of the run must call this. ``kind``: "ram", "disk" or "none".
    """
    if kind == "none" or not len(index):
        return None
    if kind == "ram":
        with torch_distributed_zero_first(ctx):
            return open_ram_cache(ctx, index, config.imgsz, decoding)
    leaders = None  # the first processes of several nodes, which fill their caches together
    if not config.stage and ctx.is_distributed and ctx.local_world_size < ctx.world_size:
        leaders = one_per_node_group(ctx)
    with torch_distributed_zero_first(ctx):
        return open_disk_cache(ctx, index, config.imgsz, decoding, cache_dir=config.cache_dir, leaders=leaders)


def open_tile_cache(
    ctx: DistributedContext, kind: str, index: DatasetIndex, *, cache_dir: str, decoding: Decoding
) -> ImageCache:
    """Opens the cache that tiles are cut from: images decoded once at full size.

    They are in memory for the kind "ram", otherwise in a file on the disk. Every process of the run must call this.
    Raises UserError for the kind "device".
    """
    if kind == "device":
        raise UserError("--cache device: cannot keep tiles ('tile' in the data set's YAML); use --cache ram or none")
    with torch_distributed_zero_first(ctx):
        if kind == "ram":
            return open_ram_cache(ctx, index, 0, decoding)
        return open_full_size_cache(index, decoding, cache_dir=cache_dir)


def open_device_images(
    ctx: DistributedContext, index: DatasetIndex, source_hw: np.ndarray, workers: int
) -> tuple[PyramidLayout, Tensor]:
    """Opens the cache of ``--cache device``. Returns the layout of the source images, and their pixels on the device.

    Every process of the run must call this. ``source_hw``: int (N, 2), sizes of the source images; ``workers``: number
    of workers of each process's loader.
    """
    layout = PyramidLayout.of(source_hw)
    decoding = Decoding(max(workers, 2), ctx.is_main)  # each process decodes a shard of the images
    return layout, open_device_cache(ctx, index, layout, decoding)
