"""Opens the cache of a split's images that ``--cache`` selects: in memory, or on the disk.

Every process of the run must call these functions. The first process of each node fills the node's cache, and the
others map it.
"""

from __future__ import annotations

from data.cache.disk import DiskCache, open_disk_cache, open_full_size_cache
from data.cache.mapped import Decoding, MappedImages, open_ram_cache
from data.index import DatasetIndex
from utils.distributed.context import DistributedContext, torch_distributed_zero_first
from utils.machine.limits import require_posix

MAX_DECODING_THREADS = 64


def decoding_for(ctx: DistributedContext, workers: int, *, antialias: bool = True) -> Decoding:
    """Returns a `Decoding` with the threads of all processes of this node, because the others wait while one decodes.

    ``workers``: number of workers of each process's loader.
    """
    threads = min(max(workers, 2) * ctx.local_world_size, MAX_DECODING_THREADS)
    return Decoding(threads, ctx.is_main, antialias=antialias)


def open_cache(
    ctx: DistributedContext, kind: str, index: DatasetIndex, *, imgsz: int, cache_dir: str, decoding: Decoding
) -> MappedImages | DiskCache | None:
    """Opens the cache of a split's images, reduced to ``imgsz``; returns None for the kind "none", and without images.

    ``kind``: value of ``--cache``; ``cache_dir``: value of the flag. Raises UserError if memory or disk are too small,
    or an image cannot be decoded.
    """
    if kind == "none" or not len(index):
        return None
    require_posix(f"--cache {kind}")
    with torch_distributed_zero_first(ctx):
        if kind == "ram":
            return open_ram_cache(ctx, index, imgsz, decoding)
        return open_disk_cache(index, imgsz, decoding, cache_dir=cache_dir)


def open_tile_cache(
    ctx: DistributedContext, kind: str, index: DatasetIndex, *, cache_dir: str, decoding: Decoding
) -> MappedImages:
    """Opens the cache that tiles are cut from: images decoded once at full size, whatever the kind.

    They are in memory for the kind "ram", otherwise in a file on the disk. Raises UserError as `open_cache` does.
    """
    require_posix("tile: training on tiles")
    with torch_distributed_zero_first(ctx):
        if kind == "ram":
            return open_ram_cache(ctx, index, 0, decoding)
        return open_full_size_cache(index, decoding, cache_dir=cache_dir)
