"""``--cache device``: holds all decoded source images of a split in device memory, at all pyramid levels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from data.cache.decoding import Decoding
from data.index.index import DatasetIndex
from data.render.pyramid import PyramidLayout
from utils.distributed.context import DistributedContext, leaving_together, shard_bounds
from utils.distributed.groups import node_group
from utils.logger import get_logger
from utils.machine.resources import available_memory, check_space
from utils.strings import counted, format_bytes

MAX_FRACTION = 0.7  # largest fraction of the device's free memory for the cache; training needs the rest
BROADCAST_BYTES = 2**28


def open_device_cache(
    ctx: DistributedContext, index: DatasetIndex, layout: PyramidLayout, decoding: Decoding
) -> Tensor:
    """Returns the source images of ``index`` as (P, C) on ``ctx.device``, arranged by ``layout``.

    Every process of the run must call this. Each process decodes a shard of the images and broadcasts it to the other
    processes of its node. Raises UserError if there is not enough memory, or an image cannot be decoded, and
    PeerFailure on the other processes.
    """
    num_bytes = layout.pixels * index.pixels.nbytes
    sharing = _Sharing.of(ctx, len(index))
    with leaving_together(ctx):
        _check_memory(ctx, num_bytes)
        if ctx.is_main:
            images = counted(len(index), "image")
            get_logger().info("--cache device: %s, %s on %s", images, format_bytes(num_bytes), ctx.device)
        shape = (layout.pixels, index.pixels.channels)
        cache = torch.empty(shape, dtype=index.pixels.torch_dtype, device=ctx.device)
        _decode_shard(cache, sharing.shards[ctx.rank], index=index, layout=layout, decoding=decoding)
    _broadcast_shards(cache, layout, sharing, piece_rows=BROADCAST_BYTES // index.pixels.nbytes)
    if ctx.device.type == "cuda":
        torch.cuda.synchronize(ctx.device)  # other streams read the cache
    return cache


def _check_memory(ctx: DistributedContext, num_bytes: int) -> None:
    """Raises UserError if the cache would take too much of the device's memory."""
    if ctx.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(ctx.device)
    elif ctx.device.type == "cpu":
        free = available_memory()
    else:
        return
    place = f"the memory of {ctx.device}"
    check_space("--cache device", num_bytes, free=free, place=place, remedy="use --cache ram", fraction=MAX_FRACTION)


@dataclass(frozen=True)
class _Sharing:
    """How the images are divided among the processes of a node."""

    shards: dict[int, range]  # images that each process decodes, by its rank in the run
    group: dist.ProcessGroup | None  # group to broadcast in; None: the default group

    @staticmethod
    def of(ctx: DistributedContext, images: int) -> _Sharing:
        ranks: tuple[int, ...] = (ctx.rank,)
        group = None
        if ctx.is_distributed and ctx.local_world_size < ctx.world_size:  # each of several nodes has its own group
            node = node_group(ctx)
            ranks = node.ranks
            group = node.handle
        elif ctx.is_distributed:  # one node uses the default group, whose backend is the fastest
            ranks = tuple(range(ctx.world_size))
        bounds = [shard_bounds(images, number, len(ranks)) for number in range(len(ranks))]
        return _Sharing({rank: range(*shard) for rank, shard in zip(ranks, bounds)}, group)


def _decode_shard(
    cache: Tensor, images: range, *, index: DatasetIndex, layout: PyramidLayout, decoding: Decoding
) -> None:
    """Decodes ``images``, those of this process, into ``cache``. Raises UserError."""

    def decode(image: int) -> None:
        pixels = layout.flat(decoding.read(index, image, layout.source_hw))
        cache[_rows(layout, range(image, image + 1))] = torch.from_numpy(pixels)

    decoding.for_each(images, decode, title="caching images (device)")


def _broadcast_shards(cache: Tensor, layout: PyramidLayout, sharing: _Sharing, *, piece_rows: int) -> None:
    """Broadcasts each process's images to the others of its node, ``piece_rows`` rows at a time."""
    if len(sharing.shards) == 1:
        return
    for rank, images in sharing.shards.items():
        for piece in cache[_rows(layout, images)].split(piece_rows):
            dist.broadcast(piece.view(torch.uint8), src=rank, group=sharing.group)


def _rows(layout: PyramidLayout, images: range) -> slice:
    """Returns the rows of the cache that hold consecutive images."""
    return slice(int(layout.starts[images.start]), int(layout.starts[images.stop]))
