"""``--cache ram|disk``: decoded source images, one copy a node for all its ranks and workers. It changes no pixel."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from data.cache.disk import open_disk_cache
from data.cache.ram import SHARED_MEMORY, open_ram_cache
from data.image_io.decode import Complain
from data.index.index import DatasetIndex
from utils.distributed.context import DistributedContext
from utils.distributed.groups import Subgroup


class ImageCache(Protocol):
    """Source images by number. Picklable without the pixels."""

    path: Path
    source_hw: np.ndarray  # int32 (N, 2)

    def __len__(self) -> int:
        """Images."""

    def __getitem__(self, index: int) -> np.ndarray:
        """uint8 (h, w, 3) RGB, read-only."""

    def close(self) -> None:
        """Gives up what it holds."""


def open_image_cache(
    index: DatasetIndex,
    kind: str,
    *,
    imgsz: int,
    cache_dir: str = "",
    threads: int = 4,
    show_progress: bool = True,
    shared_memory: Path = SHARED_MEMORY,
    ctx: DistributedContext | None = None,
    leaders: Subgroup | None = None,
    complain: Complain | None = None,
) -> ImageCache | None:
    """The node's cache, filled first if it is not there. Call under `torch_distributed_zero_first`.

    Args:
        index: the images.
        kind: "none" (returns None), "ram" or "disk".
        imgsz: longer side of the source images, pixels.
        cache_dir: where a disk cache goes, and stays for later runs; empty: as `cache_folder` says.
        threads: decoders.
        shared_memory: a file system in memory.
        ctx: this process among the others, wanted with ``leaders``.
        leaders: the first processes of several nodes, which decode a part of the images each for all their disks; None:
            each node decodes its own.
        complain: called for damaged images, see `data.image_io.decode`.

    Raises:
        UserError: not enough memory or disk, or an image that cannot be decoded.
    """
    if kind == "none" or len(index) == 0:
        return None
    shared = {"imgsz": imgsz, "threads": threads, "show_progress": show_progress, "complain": complain}
    if kind == "ram":
        return open_ram_cache(index, shared_memory=shared_memory, **shared)
    return open_disk_cache(index, cache_dir=cache_dir, ctx=ctx, leaders=leaders, **shared)
