"""``--cache ram|disk``: decoded source images, one copy per node for all its ranks and workers."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from data.cache.decoding import Decoding
from data.index.index import DatasetIndex
from utils.distributed.context import DistributedContext
from utils.distributed.groups import Subgroup
from utils.errors import UserError
from utils.files.folders import SHARED_MEMORY, cache_folder


class ImageCache(Protocol):
    """Source images by number. Pickles do not contain the pixels."""

    path: Path
    source_hw: np.ndarray  # int32 (N, 2)

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> np.ndarray:
        """(h, w, C) of the index's `PixelFormat`, read-only."""


def open_image_cache(
    index: DatasetIndex,
    kind: str,
    *,
    imgsz: int,
    cache_dir: str = "",
    decoding: Decoding = Decoding(),  # noqa: B008 (immutable)
    ctx: DistributedContext | None = None,
    leaders: Subgroup | None = None,
) -> ImageCache:
    """Fills the node's cache if necessary and opens it. Call it under `torch_distributed_zero_first`.

    Args:
        kind: "ram" or "disk".
        imgsz: longer side of the source images, pixels; 0 (ram only): that of the files.
        cache_dir: folder of a disk cache, which later runs reuse, see `cache_folder`.
        ctx: None: this process is alone. Required with ``leaders``.
        leaders: group of the first processes of the nodes, each of which decodes a shard of the images for the disk
            caches of all nodes. None: each node decodes all images.

    Raises UserError: there is not enough memory or disk space, or an image cannot be decoded.
    """
    if kind == "disk":
        from data.cache.disk import open_disk_cache

        return open_disk_cache(index, made_folder(cache_dir, "--cache disk"), imgsz, decoding, ctx, leaders)
    from data.cache.ram import open_ram_cache

    return open_ram_cache(index, SHARED_MEMORY, imgsz, decoding, ctx)


def made_folder(cache_dir: str, flag: str) -> Path:
    """The cache folder. Raises UserError, which begins with ``flag``, if it cannot be created."""
    folder = cache_folder(cache_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"{flag}: {folder}: cannot be created ({reason}); choose another --cache-dir") from None
    return folder
