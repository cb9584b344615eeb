"""``--cache device``: all decoded source images of a split in device memory, at all levels of their pyramids."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from data.cache.decoding import Decoding
from data.index.index import DatasetIndex
from data.render.table import PyramidLayout
from utils.distributed.context import DistributedContext, max_over_ranks, shard_bounds
from utils.distributed.groups import node_group
from utils.errors import UserError
from utils.logger import get_logger
from utils.machine.resources import available_memory
from utils.strings import counted, format_bytes

MAX_FRACTION = 0.7  # of the device's free memory that the cache may take; training needs the rest
BROADCAST_BYTES = 2**28


def open_device_cache(
    index: DatasetIndex, layout: PyramidLayout, ctx: DistributedContext, decoding: Decoding
) -> Tensor:
    """Source images of ``index`` as (P, C) on ``ctx.device``, in the given layout.

    Every process of the run must call this. Each process decodes a shard of the images and broadcasts it to the other
    processes of its node. Raises UserError: there is not enough memory, or an image cannot be decoded.
    """
    nbytes = layout.pixels * index.pixels.nbytes
    free = {"cuda": lambda: torch.cuda.mem_get_info(ctx.device)[0], "cpu": available_memory}.get(ctx.device.type)
    if free is not None and nbytes > MAX_FRACTION * (available := free()):
        raise UserError(
            f"--cache device: needs {format_bytes(nbytes)}, but may use only {MAX_FRACTION:.0%} of the "
            f"{format_bytes(available)} free on {ctx.device}; use --cache ram"
        )
    if ctx.is_main:
        images = counted(len(index), "image")
        get_logger().info("--cache device: %s, %s on %s", images, format_bytes(nbytes), ctx.device)
    shape = (layout.pixels, index.pixels.channels)
    cache = torch.empty(shape, dtype=index.pixels.torch_dtype, device=ctx.device)
    # One node uses the default group, whose backend is the fastest; several nodes use one group each.
    several_nodes = ctx.is_distributed and ctx.local_world_size < ctx.world_size
    group = node_group(ctx) if several_nodes else None
    ranks = group.ranks if group else tuple(range(ctx.world_size)) if ctx.is_distributed else (ctx.rank,)
    shards = [shard_bounds(len(index), number, len(ranks)) for number in range(len(ranks))]
    failure: UserError | None = None

    def decode(i: int) -> None:
        image = decoding.read(index, i, layout.source_hw)
        cache[int(layout.starts[i]) : int(layout.starts[i + 1])] = torch.from_numpy(layout.flat(image))

    try:
        for _ in decoding.each(decode, range(*shards[ranks.index(ctx.rank)]), "caching images (device)"):
            pass
    except UserError as error:
        failure = error
    failed = max_over_ranks(ctx, int(failure is not None))
    if failure is not None:
        raise failure
    if failed:
        raise UserError("--cache device: another process could not decode its part of the images")
    if len(ranks) > 1:
        at_once = BROADCAST_BYTES // index.pixels.nbytes
        for sender, (first, last) in zip(ranks, shards):
            for piece in cache[int(layout.starts[first]) : int(layout.starts[last])].split(at_once):
                dist.broadcast(piece.view(torch.uint8), src=sender, group=group.handle if group else None)
    if ctx.device.type == "cuda":
        torch.cuda.synchronize(ctx.device)  # other streams read the cache
    return cache
