"""``--cache device``: all source images of a split in the device's memory, decoded, at all levels of their pyramids."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from data.image_io.decode import Complain, read_source
from data.index.index import DatasetIndex
from data.render.mipmap import PyramidLayout
from utils.distributed.collectives import max_over_ranks
from utils.distributed.context import DistributedContext
from utils.distributed.groups import node_group, shard_bounds
from utils.errors import UserError
from utils.logger import get_logger, progress

MOST_OF_FREE = 0.7  # of the device's free memory; the rest is for training
SENT_AT_ONCE = 2**28  # bytes


def open_device_cache(
    index: DatasetIndex,
    layout: PyramidLayout,
    *,
    ctx: DistributedContext,
    threads: int = 4,
    show_progress: bool = True,
    complain: Complain | None = None,
) -> Tensor:
    """Source images of ``index`` as uint8 (P, 3) on ``ctx.device``, laid out as ``layout`` says.

    Every process of the run must call this: each has all images on its device, and the processes of a node decode a
    part of them each and send it to the others.

    Args:
        threads: decoders of this process.
        complain: called for damaged images, see `data.image_io.decode`.

    Raises:
        UserError: not enough memory, or an image that cannot be decoded.
    """
    _check_room(layout.pixels * 3, ctx.device)
    if show_progress:
        size = layout.pixels * 3 / 2**30
        get_logger().info("--cache device: %d images, %.2f GiB on %s", len(index), size, ctx.device)
    cache = torch.empty((layout.pixels, 3), dtype=torch.uint8, device=ctx.device)
    # One node's processes are the run's own group, the fastest; several nodes need a group of each.
    several_nodes = ctx.is_distributed and ctx.local_world_size < ctx.world_size
    place = node_group(ctx) if several_nodes else None
    ranks = place.ranks if place else tuple(range(ctx.world_size)) if ctx.is_distributed else (ctx.rank,)
    shares = [shard_bounds(len(index), number, len(ranks)) for number in range(len(ranks))]
    failure: UserError | None = None
    try:
        _decode(index, layout, cache, shares[ranks.index(ctx.rank)], threads, show_progress, complain)
    except UserError as error:
        failure = error
    failed = max_over_ranks(ctx, int(failure is not None))
    if failure is not None:
        raise failure
    if failed:
        raise UserError("--cache device: another process could not decode its part of the images")
    if len(ranks) > 1:
        for sender, (first, last) in zip(ranks, shares):
            for piece in cache[int(layout.starts[first]) : int(layout.starts[last])].split(SENT_AT_ONCE // 3):
                dist.broadcast(piece, src=sender, group=place.handle if place else None)
    if ctx.device.type == "cuda":
        torch.cuda.synchronize(ctx.device)  # other streams will read it
    return cache


def _decode(
    index: DatasetIndex,
    layout: PyramidLayout,
    cache: Tensor,
    share: tuple[int, int],
    threads: int,
    show_progress: bool,
    complain: Complain | None,
) -> None:
    """Fills the images ``share`` [first, last)."""

    def decode(i: int) -> None:
        image = read_source(index.path(i), index.image_hw[i], layout.source_hw[i], complain)
        cache[int(layout.starts[i]) : int(layout.starts[i + 1])] = torch.from_numpy(layout.flat(image))

    pool = ThreadPoolExecutor(max(threads, 1))
    try:
        done = pool.map(decode, range(*share))
        for _ in progress(done, desc="caching images (device)", total=share[1] - share[0], enabled=show_progress):
            pass
    finally:
        pool.shutdown(cancel_futures=True)


def _check_room(size: int, device: torch.device) -> None:
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    elif device.type == "cpu" and Path("/proc/meminfo").exists():
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    else:
        return
    if size > MOST_OF_FREE * free:
        raise UserError(
            f"--cache device: needs {size / 2**30:.2f} GiB, {MOST_OF_FREE:.0%} of the {free / 2**30:.2f} GiB free on "
            f"{device} may be taken; use --cache ram"
        )
