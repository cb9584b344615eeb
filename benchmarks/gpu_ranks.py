"""Steps with four virtual ranks: twice in one process, and in two processes that share a GPU. All must end with the
same bits. The last batch has fewer images than there are ranks, so some shards are empty.

Then plain DDP, ZeRO and compressed gradients on two processes, compared to rounding.

NCCL refuses two processes on one GPU, and so does train.py. Here the processes form a gloo group, as on CPUs, and
then use the GPU. gloo only sends host memory, so they exchange data through the host.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.training_step import build_step, context_of, make_batches
from utils.distributed.collectives import unwrap
from utils.distributed.context import DistributedContext
from utils.distributed.groups import shard_bounds
from utils.distributed.spawn import spawn

VIRTUAL_RANKS, PROCESSES, STEPS = 4, 2, 4
LAST_IMAGES = 1  # one of the two processes then has none
# Plain DDP on two processes computes what one process does with two virtual ranks, to rounding.
DDP = {"DDP": {}, "DDP with ZeRO": {"zero": True}, "DDP with compressed gradients": {"compress_grads": True}}
ROUNDING = {"DDP with compressed gradients": 0.05}  # relative, of the weights' change; gradients of 8 bits
LEAST_ROUNDING = 5e-3
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def compare_processes(options: argparse.Namespace) -> Iterator[str]:
    """Lines of figures for each optimizer. SystemExit if bits differ."""
    differing = []
    for optimizer in options.optimizers:
        with tempfile.TemporaryDirectory() as folder:
            shared = (options.model, optimizer, options.batch_size, options.imgsz, options.device, folder)
            for name in ("one", "again"):
                take_steps(context_of(options.device), name, *shared)
            spawn(take_share, PROCESSES, shared)
            one, *others = (read(Path(folder, f"{name}.pt")) for name in ("one", "again", "two"))
        for name, other in zip(("once more", f"on {PROCESSES} processes"), others):
            names = [key for key, value in one.items() if not torch.equal(value, other[key])]
            what = f"{options.model} {optimizer}, {STEPS} steps of {VIRTUAL_RANKS} virtual ranks, {name}"
            yield f"{what}: {f'{len(names)} of {len(one)} tensors differ' if names else 'the same bits'}"
            differing += [f"{what}: {len(names)} tensors differ, first {names[0]}"] if names else []
    if differing:
        sys.exit("; ".join(differing))


def compare_ddp(options: argparse.Namespace) -> Iterator[str]:
    """Lines of figures for each way of exchanging gradients. SystemExit if one trains differently."""
    differing = []
    shared = (options.model, options.optimizers[0], options.batch_size, options.imgsz, options.device)
    with tempfile.TemporaryDirectory() as folder:
        take_steps(context_of(options.device), "start", *shared, folder, steps=0)
        take_steps(context_of(options.device), "one", *shared, folder, virtual_ranks=PROCESSES)
        start, one = (weights(Path(folder, f"{name}.pt")) for name in ("start", "one"))
        for name, settings in DDP.items():
            spawn(take_ddp_share, PROCESSES, (*shared, folder, settings))
            found = weights(Path(folder, "two.pt"))
            error = float((found - one).norm() / (one - start).norm())
            yield f"{name} on {PROCESSES} processes: weights' change differs by {error:.1e} from one process's"
            if not error <= ROUNDING.get(name, LEAST_ROUNDING):
                differing.append(f"{name}: {error:.1e}")
    if differing:
        sys.exit(f"differs from one process: {'; '.join(differing)}")


def weights(path: Path) -> Tensor:
    """All parameters, concatenated. DDP keeps a rank's batch statistics, of which rank 0 has stored its own."""
    state = {key: value for key, value in read(path).items() if key.startswith("model.")}
    return torch.cat([value.double().flatten() for key, value in state.items() if not key.endswith(STATISTICS)])


def take_ddp_share(*arguments) -> None:
    """Runs in a process that `spawn` has started."""
    *shared, settings = arguments
    take_share(*shared, virtual_ranks=0, **settings)


def read(path: Path) -> dict[str, Tensor]:
    return torch.load(path, weights_only=True)


def take_share(*arguments, **settings) -> None:
    """Runs in a process that `spawn` has started."""
    ctx = DistributedContext.from_environment("cpu")
    *_, device, _ = arguments
    on_device = context_of(device).device
    take_steps(replace(ctx, device=on_device, devices=(on_device,)), "two", *arguments, **settings)
    ctx.close()


def take_steps(
    ctx: DistributedContext,
    name: str,
    model: str,
    optimizer: str,
    images: int,
    imgsz: int,
    device: str,
    folder: str,
    *,
    steps: int = STEPS,
    virtual_ranks: int = VIRTUAL_RANKS,
    **settings: bool,
) -> None:
    """Writes the weights, averaged weights and momenta after ``steps`` steps to ``folder``."""
    torch.set_num_threads(1)  # how many share a sum on a CPU decides its rounding
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    if ctx.device.type == "cuda":
        torch.cuda.set_device(ctx.device)
        exchange_by_way_of_the_host()
    take_step = build_step(model, ctx=ctx, optimizer=optimizer, virtual_ranks=virtual_ranks, **settings)
    whole = make_batches(2, images, imgsz, torch.device("cpu"))
    for number in range(steps):
        count = images if number < steps - 1 else LAST_IMAGES
        share = whole[number % 2].shard(0, count).shard(*shard_bounds(count, ctx.rank, ctx.world_size))
        take_step([share.pin_memory() if ctx.device.type == "cuda" else share], [count], number + 1)
    take_step.optimizer.consolidate()
    if ctx.is_main:
        torch.save(state_of(take_step), Path(folder, f"{name}.pt"))


def state_of(take_step) -> dict[str, Tensor]:
    """Every tensor that a step changes, on the host."""
    state = {f"model.{key}": value for key, value in unwrap(take_step.model).state_dict().items()}
    state |= {f"ema.{key}": value for key, value in take_step.ema.module.state_dict().items()}
    for place, rule in enumerate(take_step.optimizer.state_dict()["optimizers"]):
        for number, values in rule["state"].items():
            tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
            state |= {f"optimizer.{place}.{number}.{key}": value for key, value in tensors.items()}
    return {key: value.cpu() for key, value in state.items()}


def exchange_by_way_of_the_host() -> None:
    """Adding two float32 numbers gives the same bits there."""
    from engine.parallel import virtual_ranks

    sum_on_host = virtual_ranks.sum_over_processes
    virtual_ranks.sum_over_processes = lambda ctx, flat: sum_on_host(ctx, flat.cpu()).to(flat.device)
