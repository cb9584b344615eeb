"""Takes the first steps of trainings in one process, or in two that share a device, and writes what they change.

    python -m tests.gpu.rank_steps '{"one": {"optimizer": "SGD", ...}, ...}' FOLDER DEVICE IMGSZ BATCH_SIZE [nccl]

train.py refuses two processes on one GPU, and so does NCCL before 2.30. Here the processes form a gloo group, as on
CPUs, and then use the GPU. gloo only sends host memory, so they exchange data through the host; with ``nccl``, DDP uses
NCCL. The last batch has fewer images than there are processes or virtual ranks, so some shards are empty.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.speed.training_step import build_step, context_of, make_batches
from engine.parallel import virtual_ranks
from tests.gpu.step_checks import state_of
from utils.distributed.context import DistributedContext, shard_bounds
from utils.distributed.join import joined_run
from utils.process.launch import read_launch
from utils.process.main import run_main

LAST_IMAGES = 1


def main(argv: Sequence[str]) -> None:
    trainings, folder, device, imgsz, batch_size, *backend = argv
    torch.set_num_threads(1)  # the rounding of sums on a CPU depends on the number of threads
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    with joined_run(read_launch(), "cpu") as ctx:
        if backend == ["nccl"]:
            ctx = join_with_nccl(ctx)
        on = context_of(device).device
        if on.type == "cuda":
            torch.cuda.set_device(on)
            exchange_through_host()
        ctx = replace(ctx, device=on, devices=(on,))
        for name, settings in json.loads(trainings).items():
            state = train(ctx, int(imgsz), int(batch_size), **settings)
            if ctx.is_main:
                torch.save(state, Path(folder, f"{name}.pt"))


def join_with_nccl(ctx: DistributedContext) -> DistributedContext:
    dist.destroy_process_group()
    both = "cpu:gloo,cuda:nccl"
    store = dist.PrefixStore("nccl", ctx.store)
    dist.init_process_group(both, store=store, rank=ctx.rank, world_size=ctx.world_size)
    return replace(ctx, backend=both)


def exchange_through_host() -> None:
    """Lets ranks exchange sums through the host, where adding two float32 numbers gives the same bits."""
    sum_on_host = virtual_ranks.sum_over_processes
    virtual_ranks.sum_over_processes = lambda ctx, flat: sum_on_host(ctx, flat.cpu()).to(flat.device)


def train(
    ctx: DistributedContext, imgsz: int, batch_size: int, *, model: str | dict, steps: int, **settings: Any
) -> dict[str, torch.Tensor]:
    """Takes steps with this process's share of each batch. Returns the state (`state_of`) on rank 0, else nothing."""
    take_step = build_step(model, ctx=ctx, **settings)
    batches = make_batches(2, batch_size, imgsz, torch.device("cpu"))
    for number in range(steps):
        count = batch_size if number < steps - 1 else LAST_IMAGES
        share = batches[number % 2].shard(0, count).shard(*shard_bounds(count, ctx.rank, ctx.world_size))
        take_step([share.pin_memory() if ctx.device.type == "cuda" else share], [count], number + 1)
    take_step.optimizer.consolidate()
    return state_of(take_step) if ctx.is_main else {}


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
