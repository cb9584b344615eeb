"""``--cache ram``: holds decoded source images in memory, one copy per node, mapped by all its ranks and workers.

The memory is an anonymous file (`data.cache.mapped`). The node's first process creates it, and the others open that
process's descriptor. The memory is freed when the last of them ends, even if killed, and is not limited by the size of
/dev/shm.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import numpy as np

from data.cache.decoding import Decoding
from data.cache.mapped import MappedImages, decode_into, pixel_offsets
from data.images.reduce import reduced_sizes
from data.index.index import DatasetIndex
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.machine.resources import available_memory, check_space


def open_ram_cache(ctx: DistributedContext, index: DatasetIndex, imgsz: int, decoding: Decoding) -> MappedImages:
    """Decodes all images of ``index`` into the node's memory. Call it under `torch_distributed_zero_first`.

    Args:
        imgsz: longer side of the source images, pixels; 0 keeps the size of each file.

    Raises UserError if there is not enough memory, or an image cannot be decoded.
    """
    source_hw = reduced_sizes(index.image_hw, imgsz) if imgsz else index.image_hw.astype(np.int32)
    if ctx.store is None:
        return _fill_memory(index, source_hw, decoding)
    key = f"ram_cache/{ctx.node_rank}/{index.cache_key}/{imgsz}"
    if not ctx.is_node_leader:
        return MappedImages(Path(os.fsdecode(ctx.store.get(key))), source_hw, index.pixels)
    cache = _fill_memory(index, source_hw, decoding)
    ctx.store.set(key, str(cache.path))
    return cache


def _fill_memory(index: DatasetIndex, source_hw: np.ndarray, decoding: Decoding) -> MappedImages:
    """Decodes all images into an anonymous file, which other processes can open while the cache is in use."""
    if not hasattr(os, "memfd_create"):
        raise UserError("--cache ram: needs Linux; use --cache disk")
    size = int(pixel_offsets(source_hw, index.pixels)[-1])
    check_space("--cache ram", size, free=available_memory(), place="memory", remedy="use --cache disk or none")
    descriptor = os.memfd_create("lockstep-images")
    try:
        decode_into(descriptor, index, source_hw, decoding, title="--cache ram")
        cache = MappedImages(Path(f"/proc/{os.getpid()}/fd/{descriptor}"), source_hw, index.pixels)
    except BaseException:
        os.close(descriptor)
        raise
    weakref.finalize(cache, os.close, descriptor).atexit = False
    return cache
