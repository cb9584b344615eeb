"""Checks that a model trains alike in one process and in two that share a GPU: with virtual ranks bit for bit, with
plain DDP and ZeRO up to rounding.

The last batch of the steps has fewer images than there are ranks, so some shards are empty. train.py rejects two
processes on one GPU, and so does NCCL before 2.30. Here the processes form a gloo group, as on CPUs, and then use the
GPU. gloo only sends host memory, so they exchange data through the host; with the backend nccl, DDP uses NCCL.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.same_bits import have_same_bits
from benchmarks.speed.training_step import build_step, context_of, make_batches, state_of
from utils.distributed.context import DistributedContext, shard_bounds
from utils.distributed.join import join_run
from utils.process.launch import read_launch
from utils.process.spawn import spawn

VIRTUAL_RANKS = 4
PROCESSES = 2
STEPS = 4
LAST_IMAGES = 1  # one of the two processes then has none
NCCL = (2, 30)  # the first version that serves two processes on one GPU
ROUNDING = 5e-3  # relative difference of the weights' change
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, kw_only=True)
class FirstSteps:
    """The first steps of a training, which one or several processes take."""

    device: str
    imgsz: int
    batch_size: int  # of all processes together
    model: str = "yolov8n"
    optimizer: str = "SGD"
    steps: int = STEPS
    virtual_ranks: int = VIRTUAL_RANKS  # 0: plain DDP
    zero: bool = False


def compare_processes(*, device: str, imgsz: int, batch_size: int, optimizers: Sequence[str]) -> Iterator[str]:
    """Yields, for each optimizer, whether a second training in one process and one in two have the same bits."""
    for optimizer in optimizers:
        training = FirstSteps(device=device, imgsz=imgsz, batch_size=batch_size, optimizer=optimizer)
        expected = train_in_one_process(training)
        others = {"once more": train_in_one_process(training), f"on {PROCESSES} processes": train_in_two(training)}
        for name, other in others.items():
            names = [key for key, value in expected.items() if not have_same_bits(value, other[key])]
            case = f"{training.model} {optimizer}, {STEPS} steps of {VIRTUAL_RANKS} virtual ranks, {name}"
            if names:
                yield f"! {case}: {len(names)} of {len(expected)} tensors differ, first {names[0]}"
            else:
                yield f"{case}: the same bits"


def compare_ddp(*, device: str, imgsz: int, batch_size: int, backend: str = "gloo") -> Iterator[str]:
    """Yields how far the weights of DDP with and without ZeRO are from those of one process with two virtual ranks,
    which computes the same up to rounding."""
    if backend == "nccl":
        if torch.cuda.nccl.version() < NCCL:
            yield f"left out: NCCL {torch.cuda.nccl.version()} refuses two processes on one GPU, {NCCL} does not"
            return
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # for the two processes
    training = FirstSteps(device=device, imgsz=imgsz, batch_size=batch_size)
    start = weights(train_in_one_process(replace(training, steps=0)))
    expected = weights(train_in_one_process(replace(training, virtual_ranks=PROCESSES)))
    for name, zero in {"DDP": False, "DDP with ZeRO": True}.items():
        ddp = replace(training, virtual_ranks=0, zero=zero)
        trained = weights(train_in_two(ddp, nccl=backend == "nccl"))
        error = float((trained - expected).norm() / (expected - start).norm())
        yield f"{name} on {PROCESSES} processes: weights' change differs by {error:.1e} from one process's"
        if not error <= ROUNDING:  # also nan
            yield f"! {name} differs from one process: {error:.1e}"


def weights(state: dict[str, Tensor]) -> Tensor:
    """Returns the weights, concatenated, without batch statistics: under DDP each rank has its own."""
    values = [
        value.double().flatten()
        for key, value in state.items()
        if key.startswith("model.") and not key.endswith(STATISTICS)
    ]
    return torch.cat(values)


def train_in_one_process(training: FirstSteps) -> dict[str, Tensor]:
    """Returns the state after the steps (`state_of`)."""
    return train(context_of(training.device), training)


def train_in_two(training: FirstSteps, *, nccl: bool = False) -> dict[str, Tensor]:
    """Returns the state after the steps (`state_of`) of two processes. ``nccl``: exchange gradients by NCCL."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state.pt")
        spawn(train_share, PROCESSES, (training, nccl, path))
        return torch.load(path, weights_only=True)


def train_share(training: FirstSteps, nccl: bool, path: Path) -> None:
    """Trains in a process that `spawn` has started. Rank 0 writes the state to ``path``."""
    ctx = join_run(read_launch(), "cpu")
    device = context_of(training.device).device
    if nccl:
        dist.destroy_process_group()
        store = dist.PrefixStore("nccl", ctx.store)
        both = "cpu:gloo,cuda:nccl"
        dist.init_process_group(both, store=store, rank=ctx.rank, world_size=ctx.world_size)
        ctx = replace(ctx, backend=both)
    state = train(replace(ctx, device=device, devices=(device,)), training)
    if ctx.is_main:
        torch.save(state, path)
    dist.destroy_process_group()


def train(ctx: DistributedContext, training: FirstSteps) -> dict[str, Tensor]:
    """Takes the steps with this rank's share of each batch. Returns the state (`state_of`) on rank 0, else nothing."""
    torch.set_num_threads(1)  # the rounding of sums on a CPU depends on the number of threads
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    if ctx.device.type == "cuda":
        torch.cuda.set_device(ctx.device)
        exchange_through_host()
    settings = {"optimizer": training.optimizer, "virtual_ranks": training.virtual_ranks, "zero": training.zero}
    take_step = build_step(training.model, ctx=ctx, **settings)
    batches = make_batches(2, training.batch_size, training.imgsz, torch.device("cpu"))
    for number in range(training.steps):
        count = training.batch_size if number < training.steps - 1 else LAST_IMAGES
        share = batches[number % 2].shard(0, count).shard(*shard_bounds(count, ctx.rank, ctx.world_size))
        take_step([share.pin_memory() if ctx.device.type == "cuda" else share], [count], number + 1)
    take_step.optimizer.consolidate()
    return state_of(take_step) if ctx.is_main else {}


def exchange_through_host() -> None:
    """Lets ranks exchange sums through the host, where adding two float32 numbers gives the same bits."""
    from engine.parallel import virtual_ranks

    sum_on_host = virtual_ranks.sum_over_processes
    virtual_ranks.sum_over_processes = lambda ctx, flat: sum_on_host(ctx, flat.cpu()).to(flat.device)
