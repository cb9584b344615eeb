"""Checks for equal bits: steps with four virtual ranks, twice in one process and in two processes that share a GPU;
interrupted and resumed trainings compared with uninterrupted ones; batches on the device compared with the rendered
ones.

The last batch of the steps has fewer images than there are ranks, so some shards are empty. Plain DDP and ZeRO on two
processes are compared up to rounding. train.py rejects two processes on one GPU, and so does NCCL before 2.30. Here the
processes form a gloo group, as on CPUs, and then use the GPU. gloo only sends host memory, so they exchange data
through the host. With ``--backend nccl``, DDP uses NCCL.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.same_bits import differences
from benchmarks.speed.training_step import build_step, context_of, make_batches
from benchmarks.speed.turns import ROOT
from data.loading.build import build_train_loader, open_train_samples
from data.loading.loader import InfiniteDataLoader
from data.loading.prefetcher import Prefetcher
from data.source.dataset_yaml import load_dataset_spec
from models.modules import unwrap
from utils.batches import Batch
from utils.config.recipes import hyperparameters_from
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext, shard_bounds
from utils.distributed.rendezvous import join_run
from utils.files.checkpoint_file import read_checkpoint
from utils.process.launch import read_launch
from utils.process.spawn import spawn

VIRTUAL_RANKS = 4
PROCESSES = 2
STEPS = 4
LAST_IMAGES = 1  # one of the two processes then has none
# Plain DDP on two processes computes the same as one process with two virtual ranks, up to rounding.
DDP = {"DDP": {}, "DDP with ZeRO": {"zero": True}}
NCCL = (2, 30)  # the first version that serves two processes on one GPU, with NCCL_MULTI_RANK_GPU_ENABLE=1
ROUNDING = 5e-3  # relative difference of the weights' change
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def compare_processes(options: argparse.Namespace) -> Iterator[str]:
    """Yields lines of figures for each optimizer. Raises SystemExit if bits differ."""
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
            case = f"{options.model} {optimizer}, {STEPS} steps of {VIRTUAL_RANKS} virtual ranks, {name}"
            if names:
                yield f"{case}: {len(names)} of {len(one)} tensors differ"
                differing.append(f"{case}: {len(names)} tensors differ, first {names[0]}")
            else:
                yield f"{case}: the same bits"
    if differing:
        sys.exit("; ".join(differing))


def compare_ddp(options: argparse.Namespace) -> Iterator[str]:
    """Yields lines of figures for each way of exchanging gradients. Raises SystemExit if one trains differently."""
    if options.backend == "nccl" and torch.cuda.nccl.version() < NCCL:
        yield f"left out: NCCL {torch.cuda.nccl.version()} refuses two processes on one GPU, {NCCL} does not"
        return
    differing = []
    shared = (options.model, options.optimizers[0], options.batch_size, options.imgsz, options.device)
    with tempfile.TemporaryDirectory() as folder:
        take_steps(context_of(options.device), "start", *shared, folder, steps=0)
        take_steps(context_of(options.device), "one", *shared, folder, virtual_ranks=PROCESSES)
        start, one = (weights(Path(folder, f"{name}.pt")) for name in ("start", "one"))
        for name, settings in DDP.items():
            spawn(take_ddp_share, PROCESSES, (*shared, folder, settings | {"nccl": options.backend == "nccl"}))
            trained = weights(Path(folder, "two.pt"))
            error = float((trained - one).norm() / (one - start).norm())
            yield f"{name} on {PROCESSES} processes: weights' change differs by {error:.1e} from one process's"
            if not error <= ROUNDING:
                differing.append(f"{name}: {error:.1e}")
    if differing:
        sys.exit(f"differs from one process: {'; '.join(differing)}")


def weights(path: Path) -> Tensor:
    """Returns the weights, concatenated, without batch statistics: under DDP each rank has its own."""
    state = {key: value for key, value in read(path).items() if key.startswith("model.")}
    return torch.cat([value.double().flatten() for key, value in state.items() if not key.endswith(STATISTICS)])


def take_ddp_share(*arguments) -> None:
    """Runs in a process that `spawn` has started."""
    *shared, settings = arguments
    take_share(*shared, virtual_ranks=0, **settings)


def read(path: Path) -> dict[str, Tensor]:
    return torch.load(path, weights_only=True)


def take_share(*arguments, nccl: bool = False, **settings) -> None:
    """Runs in a process that `spawn` has started."""
    ctx = join_run(read_launch(), "cpu")
    *_, device, _ = arguments
    on_device = context_of(device).device
    if nccl:
        dist.destroy_process_group()
        store = dist.PrefixStore("nccl", ctx.store)
        both = "cpu:gloo,cuda:nccl"
        dist.init_process_group(both, store=store, rank=ctx.rank, world_size=ctx.world_size)
        ctx = replace(ctx, backend=both)
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
    torch.set_num_threads(1)  # the rounding of sums on a CPU depends on the number of threads
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
    """Returns every tensor that a step changes, on the host."""
    state = {f"model.{key}": value for key, value in unwrap(take_step.model).state_dict().items()}
    state |= {f"ema.{key}": value for key, value in take_step.ema.module.state_dict().items()}
    for place, rule in enumerate(take_step.optimizer.state_dict()["optimizers"]):
        for number, values in rule["state"].items():
            tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
            state |= {f"optimizer.{place}.{number}.{key}": value for key, value in tensors.items()}
    return {key: value.cpu() for key, value in state.items()}


def exchange_by_way_of_the_host() -> None:
    """Lets ranks exchange sums through the host, where adding two float32 numbers gives the same bits."""
    from engine.parallel import virtual_ranks

    sum_on_host = virtual_ranks.sum_over_processes
    virtual_ranks.sum_over_processes = lambda ctx, flat: sum_on_host(ctx, flat.cpu()).to(flat.device)


STOPPED = 75  # exit code of train.py after a signal that asks it to stop
WRITTEN_S = 120.0  # time limit for the first checkpoint
ENDED_S = 60.0  # time limit for the end of a process after a signal
# The loopback interface is used because the host's name may not resolve.
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc_per_node", "1"]


class Interruption(NamedTuple):
    """A way to end a training early."""

    description: str
    launcher: list[str]
    signal: signal.Signals
    exit_code: int


INTERRUPTIONS = {
    "sigterm": Interruption("stopped", [], signal.SIGTERM, STOPPED),
    # A process group, of NCCL on a GPU. torchrun itself ends with 1 after a signal.
    "torchrun": Interruption("stopped in a process group", TORCHRUN, signal.SIGTERM, 1),
    "sigkill": Interruption("killed", [], signal.SIGKILL, -signal.SIGKILL),
}


def stop_and_resume(options: argparse.Namespace) -> Iterator[str]:
    """Yields how interrupted and resumed runs differ from an uninterrupted one, for each of ``--interruption``. Raises
    SystemExit if bits differ."""
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        whole = training(options, folder, "whole")
        expect(subprocess.run(whole, cwd=ROOT, check=False).returncode, 0, whole)
        wanted = read_checkpoint(Path(folder, "whole", "last.pt"))
        for name in options.interruptions:
            interruption = INTERRUPTIONS[name]
            last = Path(folder, name, "last.pt")
            python, *script = training(options, folder, name)
            command = [python, *interruption.launcher, *script]
            progress, seconds = break_off(command, last, interruption.signal, interruption.exit_code)
            yield f"{interruption.description}: ended {seconds:.1f} s after the signal"
            resume = [sys.executable, "train.py", "--resume", str(last)]
            expect(subprocess.run(resume, cwd=ROOT, check=False).returncode, 0, resume)
            tensors = differences(wanted, read_checkpoint(last))
            moment = f"after epoch {progress['epoch']} and batch {progress['batch']}"
            case = f"{interruption.description} {moment}, resumed"
            if tensors:
                problems.append(f"{case}: {len(tensors)} tensors differ, first {tensors[0]}")
            else:
                yield f"{case}: the same bits as in one go"
    if problems:
        sys.exit("; ".join(problems))


def training(options: argparse.Namespace, folder: str, name: str) -> list[str]:
    """Returns the command of a training with virtual ranks, deterministic kernels and checkpoints within each epoch."""
    return [
        sys.executable, "train.py", "--data", options.data, "--model", options.model, "--imgsz", str(options.imgsz),
        "--batch-size", str(options.batch_size), "--epochs", str(options.epochs), "--device", options.device,
        "--workers", "2", "--virtual-ranks", "4", "--deterministic", "--save-minutes", "1e-6", "--val-every", "0",
        "--noplots", "--cache-dir", str(Path(folder, "index")), "--project", folder, "--name", name,
        "--set", "close_mosaic=0", "close_scale=0",
    ]  # fmt: skip


def break_off(command: Sequence[str], last: Path, number: signal.Signals, code: int) -> tuple[dict, float]:
    """Runs ``command`` until it has written ``last``, then sends it a signal, after which it must end with ``code``.
    Returns the position of the checkpoint, and the seconds that the process took to end."""
    process = subprocess.Popen(command, cwd=ROOT)
    deadline = time.monotonic() + WRITTEN_S
    while not last.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(number)
    sent = time.monotonic()
    expect(process.wait(ENDED_S), code, command)
    return read_checkpoint(last)["progress"], time.monotonic() - sent


def expect(code: int, wanted: int, command: Sequence[str]) -> None:
    if code != wanted:
        sys.exit(f"{' '.join(command)} ended with {code}, not {wanted}")


BATCHES = 40
BURNS = 4  # large matrix products before each copy, which give workers time to overwrite memory that is not kept


def compare_batches(options: argparse.Namespace) -> Iterator[str]:
    """Yields lines of figures. Raises SystemExit if a batch does not arrive as rendered, or no batch is pinned."""
    ctx = context_of(options.device)
    device = ctx.device
    loader = open_loader(options, ctx)
    pinned = 0
    side = 4096 if device.type == "cuda" else 16
    weights = torch.rand(side, side, device=device)

    def move(batch: Batch) -> Batch:
        nonlocal pinned
        pinned += batch.images.is_pinned()
        for _ in range(BURNS):
            torch.mm(weights, weights)
        return batch.to(device)

    prefetcher = Prefetcher(iter(loader), device=device, render=move)
    for number in range(BATCHES):
        images = next(prefetcher).images.cpu()
        prefetcher.prefetch(2)
        if not torch.equal(images, loader.render(*divmod(number, len(loader))).images):
            sys.exit(f"batch {number} is not what was drawn")
    loader.close()
    yield f"{BATCHES} batches arrived as drawn; {pinned} were in page-locked memory"
    if device.type == "cuda" and not pinned:
        sys.exit("no batch was in page-locked memory")


def open_loader(options: argparse.Namespace, ctx: DistributedContext) -> InfiniteDataLoader:
    config = TrainConfig(imgsz=options.imgsz, batch_size=options.batch_size, epochs=1000, workers=4)
    hyp = hyperparameters_from("")
    samples = open_train_samples(ctx, config, hyp, load_dataset_spec(options.data), stride=32)
    return build_train_loader(ctx, config, hyp, samples, stride=32)
