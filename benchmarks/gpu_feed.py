"""Copies of batches to the device: directly from the memory that workers render into, which is not overwritten
meanwhile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

BATCHES = 40
BURNS = 4  # products of large matrices before each copy: workers get the time to draw over what is not kept


def compare_batches(options: argparse.Namespace) -> Iterator[str]:
    """Lines with figures; SystemExit if a batch does not arrive as it was rendered, or is not pinned."""
    import torch

    from data.loading.prefetcher import Prefetcher
    from data.shared_memory import PageLock
    from utils.distributed.context import DistributedContext
    from utils.structures import Batch

    ctx = DistributedContext.single("cpu" if options.device == "cpu" else f"cuda:{options.device}")
    device = ctx.device
    loader = open_loader(options, ctx)
    locked: list[range] = []
    lock_pages = PageLock.lock

    def lock(self: PageLock, address: int, nbytes: int) -> bool:
        done = lock_pages(self, address, nbytes)
        if done:
            locked.append(range(address, address + nbytes))
        return done

    PageLock.lock = lock
    straight = 0
    side = 4096 if device.type == "cuda" else 16
    weights = torch.rand(side, side, device=device)

    def move(batch: Batch) -> Batch:
        nonlocal straight
        straight += any(batch.images.data_ptr() in pages for pages in locked) and batch.images.is_pinned()
        for _ in range(BURNS):
            torch.mm(weights, weights)
        return batch.to(device)

    with Prefetcher(iter(loader), device=device, render=move, ahead=True) as prefetcher:
        for number in range(BATCHES):
            images = next(prefetcher).images.cpu()
            prefetcher.prefetch(2)
            if not torch.equal(images, loader.render(*divmod(number, len(loader))).images):
                sys.exit(f"batch {number} is not what was drawn")
    PageLock.lock = lock_pages
    loader.close()
    yield f"{BATCHES} batches arrived as drawn; {straight} straight from {len(locked)} locked slots"
    if device.type == "cuda":
        if not straight:
            sys.exit("no batch came straight from a locked slot")
        yield copy_rates(options, device)


def open_loader(options: argparse.Namespace, ctx):
    from data.index.dataset_yaml import load_dataset_spec
    from data.loading.build import build_train_loader
    from utils.config.parser import hyperparameters_from
    from utils.config.settings import TrainConfig

    config = TrainConfig(imgsz=options.imgsz, batch_size=options.batch_size, epochs=1000, workers=4)
    return build_train_loader(ctx, config, hyperparameters_from(""), load_dataset_spec(options.data), stride=32)


def copy_rates(options: argparse.Namespace, device) -> str:
    """GB/s of copies to the device from a slot, and through pinned memory including the host's copy."""
    import torch

    from benchmarks.our_side import seconds_of
    from data.shared_memory import BatchSlots, PageLock

    shape = (options.batch_size, options.imgsz, options.imgsz, 3)
    slot, plain = (BatchSlots(1, torch.Size(shape).numel(), lock).arrived(0, shape) for lock in (PageLock(), None))
    straight = seconds_of(lambda: slot.to(device, non_blocking=True), 20, device.type)
    twice = seconds_of(lambda: plain.pin_memory().to(device, non_blocking=True), 20, device.type)
    rates = [slot.nbytes / seconds / 1e9 for seconds in (straight, twice)]
    return f"to the device at {rates[0]:.1f} GB/s; by way of pinned memory at {rates[1]:.1f} GB/s"
