"""The parts of `benchmarks/gpu.sh` that are more than one command. Each prints lines that begin with "figure:", and one
line that says why if its check fails (exit code 1). All run on a CPU too (``--device cpu``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.training_step import build_step, make_batches


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parts = parser.add_subparsers(dest="part", required=True)
    actions = {
        "environment": environment,
        "data": write_data,
        "sync-free": sync_free,
        "loss-share": loss_share,
        "data-parallel": data_parallel,
        "feed": feed,
        "compiled": compiled,
        "resume": resume,
        "train": train,
    }
    for name in actions:
        part = parts.add_parser(name)
        part.add_argument("--device", default="0")
        part.add_argument("--model", default="yolov8n")
        part.add_argument("--imgsz", type=int, default=640)
        part.add_argument("--batch-size", type=int, default=16)
        part.add_argument("--data", default="")
        part.add_argument("--epochs", type=int, default=3)
        part.add_argument("--peer", default="")
        if name == "data":
            part.add_argument("--folder", type=Path, required=True)
            part.add_argument("--images", type=int, default=256)
            part.add_argument("--times", type=int, default=16)
            part.add_argument("--size", type=int, default=640)
    options = parser.parse_args(argv)
    actions[options.part](options)


def figure(text: str) -> None:
    print(f"figure: {text}", flush=True)


def environment(options: argparse.Namespace) -> None:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from benchmarks.report import commit, machine

    figure(f"{machine()}, Python {platform.python_version()}, commit {commit()}")
    missing = []
    for name in ("torchvision", "numpy", "opencv-python", "opencv-python-headless", "albumentations", "lmdb", "tqdm"):
        try:
            figure(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    figure(f"not installed: {', '.join(missing) or 'nothing'}")


def write_data(options: argparse.Namespace) -> None:
    """``folder``/small: the demo set; ``folder``/large: each of its images many times."""
    from benchmarks.dataset_copy import copy_dataset
    from data.demo import ensure_demo

    sizes = {"train_images": options.images, "val_images": max(options.images // 4, 4), "size": options.size}
    small = ensure_demo(options.folder / "small", **sizes)
    copy_dataset(str(small), options.folder / "large", times=options.times)
    figure(f"{options.images} and {options.images * options.times} training images of {options.size} px")


def sync_free(options: argparse.Namespace) -> None:
    """Steps under torch's error for every operation that makes the host wait; on a CPU, reads of values are counted."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    reads: list[str] = []

    class HostReads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "equal"):
                reads.append(str(function))
            return function(*args, **(kwargs or {}))

    take_step = build_step(options.model, device=options.device)
    device = take_step.ctx.device
    batches = make_batches(2, options.batch_size, options.imgsz, device)
    for number in range(3):
        take_step([batches[number % 2]], [options.batch_size], number + 1)
        take_step.reader.pop()
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    for number in range(3, 8):
        if device.type == "cuda":
            take_step([batches[number % 2]], [options.batch_size], number + 1)
        else:
            with HostReads():
                take_step([batches[number % 2]], [options.batch_size], number + 1)
        take_step.reader.pop()  # waits for the event of the step before
    if reads:
        sys.exit(f"the step waits for {len(reads)} values: {', '.join(sorted(set(reads)))}")
    figure("5 steps without a host sync")


def loss_share(options: argparse.Namespace) -> None:
    """Criterion forwards and backwards to the maps, against the whole step."""
    import torch

    from benchmarks.our_side import seconds_of

    take_step = build_step(options.model, device=options.device)
    device, (batch,) = take_step.ctx.device, make_batches(1, options.batch_size, options.imgsz, take_step.ctx.device)
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        take_step([batch], [options.batch_size], steps)
        take_step.reader.pop()

    on_device = batch.to(device)
    images = on_device.images.to(memory_format=torch.channels_last).float() / 255
    with torch.autocast(device.type, take_step.amp_dtype, enabled=take_step.amp_dtype is not None):
        raw = [level.detach().requires_grad_() for level in take_step.model(images)]

    def loss() -> None:
        take_step.criterion(raw, on_device.targets, on_device.max_targets).total.backward()
        for level in raw:
            level.grad = None

    for action in (step, step, step, loss, loss, loss):
        action()
    whole, part = seconds_of(step, 10, device.type), seconds_of(loss, 10, device.type)
    figure(f"step {whole * 1000:.1f} ms, of which loss and assignment {part * 1000:.2f} ms: {part / whole:.1%}")
    if device.type == "cuda" and part > 0.1 * whole:
        sys.exit("loss and assignment take more than 10 % of the step")


def data_parallel(options: argparse.Namespace) -> None:
    """Two steps through `torch.nn.DataParallel` on one device are two plain steps."""
    import torch
    from torch import nn

    ids = None if options.device == "cpu" else [int(options.device)]

    def losses(wrap) -> torch.Tensor:
        take_step = build_step(options.model, device=options.device, amp="off", wrap=wrap)
        batches = make_batches(2, options.batch_size, options.imgsz, take_step.ctx.device)
        for number, batch in enumerate(batches):
            take_step([batch], [options.batch_size], number + 1)
        return torch.tensor([values.losses for values in take_step.reader.pop(leave=0)])

    plain, wrapped = losses(lambda model: model), losses(lambda model: nn.DataParallel(model, ids))
    if not torch.allclose(plain, wrapped, rtol=1e-3):
        sys.exit(f"losses differ: {plain.tolist()} and {wrapped.tolist()}")
    figure(f"losses of two steps: plain {plain.tolist()}, DataParallel {wrapped.tolist()}")
    if ids:
        try:
            twice = losses(lambda model: nn.DataParallel(model, ids * 2))
            figure(f"replicated twice onto the device: {twice.tolist()} (batch statistics are of halves)")
        except RuntimeError as error:
            figure(f"replicating twice onto one device is refused by torch: {str(error).splitlines()[0]}")


def feed(options: argparse.Namespace) -> None:
    from benchmarks.gpu_feed import compare_batches

    for line in compare_batches(options):
        figure(line)


def compiled(options: argparse.Namespace) -> None:
    from benchmarks.gpu_compiled import compare_steps

    for line in compare_steps(options):
        figure(line)


def resume(options: argparse.Namespace) -> None:
    from benchmarks.gpu_training import stop_and_resume

    figure(stop_and_resume(options.data, options.device, options.imgsz, options.epochs))


def train(options: argparse.Namespace) -> None:
    from benchmarks.gpu_training import time_training

    for line in time_training(options):
        figure(line)


if __name__ == "__main__":
    main()
