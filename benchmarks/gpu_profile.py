"""Where the time of a step goes: the loss and the assignment of targets, and the costliest kernels."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.our_side import seconds_of
from benchmarks.training_step import build_step, loss_pass, make_batches, stepper
from engine.train.step import TrainStep

LOSS_GOAL = ("yolov8n", 64, 64, 0.1)  # model, images, boxes an image, and the most of the step that the loss may take
NAME_WIDTH, TOP = 70, 20
COPIES = ("Memcpy", "Memset")


@dataclass(frozen=True)
class Trace:
    """A trace of one run of an action: on a GPU its kernels and copies, on a CPU its operations."""

    kernels: list[tuple[str, float, float]]  # name, milliseconds, calls; the costliest first
    operations: float  # of ATen, called on the host, those that others call included

    @property
    def busy_ms(self) -> float:
        return sum(milliseconds for _, milliseconds, _ in self.kernels)

    def calls(self, *, copies: bool) -> float:
        """The number of kernels, or of copies and fills."""
        return sum(calls for name, _, calls in self.kernels if name.startswith(COPIES) == copies)


def trace(action: Callable[[], None], on_gpu: bool) -> Trace:
    times = 4 if on_gpu else 1
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as recorded:
        for _ in range(times):
            action()
        if on_gpu:
            torch.cuda.synchronize()
    events = [event for event in recorded.key_averages() if not getattr(event, "is_user_annotation", False)]
    on_host = [event for event in events if event.device_type == DeviceType.CPU and event.key.startswith("aten::")]
    if on_gpu:
        kernels = [(e.key, e.self_device_time_total, e.count) for e in events if e.device_type == DeviceType.CUDA]
    else:
        kernels = [(e.key, e.self_cpu_time_total, e.count) for e in on_host]
    kernels.sort(key=lambda kernel: -kernel[1])
    return Trace(
        [(name, microseconds / 1000 / times, calls / times) for name, microseconds, calls in kernels],
        sum(event.count for event in on_host) / times,
    )


def costliest_kernels(options: argparse.Namespace) -> Iterator[str]:
    """Lines of figures and tables for each size of batch and each optimizer."""
    for images in options.batches:
        for optimizer in options.optimizers:
            take_step = build_step(options.model, device=options.device, optimizer=optimizer)
            on_gpu = take_step.ctx.device.type == "cuda"
            step = stepper(take_step, make_batches(2, images, options.imgsz, take_step.ctx.device))
            for _ in range(4):
                step()
            ms = seconds_of(step, 10 if on_gpu else 1, take_step.ctx.device.type) * 1000
            found = trace(step, on_gpu)
            what = f"{options.model} batch {images} {optimizer}"
            yield f"{what}: {counted(found, on_gpu)} a step; busy {found.busy_ms:.1f} ms of {ms:.1f} ms"
            yield f"| {what} | ms a step | share | calls |"
            yield "| --- | --- | --- | --- |"
            for rank, (name, each_ms, calls) in enumerate(found.kernels[:TOP], 1):
                what = f"{images} {optimizer} {rank}. {name[:NAME_WIDTH].replace('|', '/')}"
                yield f"| {what} | {each_ms:.3f} | {each_ms / found.busy_ms:.1%} | {calls:g} |"


def counted(found: Trace, on_gpu: bool) -> str:
    on_device = f"{found.calls(copies=False):g} kernels, {found.calls(copies=True):g} copies and fills on the device, "
    return (on_device if on_gpu else "") + f"{found.operations:g} operations on the host"


def loss_shares(options: argparse.Namespace) -> Iterator[str]:
    """Lines of figures for each model and number of boxes per image. SystemExit if the loss takes too long."""
    too_much = []
    for model in options.models:
        compiled_for = options.batch_size if options.compile else 0
        take_step = build_step(model, device=options.device, compiled_for=compiled_for)
        for boxes in options.boxes:
            share, text = loss_share(take_step, options.imgsz, options.batch_size, boxes)
            what = f"{model} batch {options.batch_size}{' compiled' * options.compile}, {boxes} boxes an image"
            yield f"{what}: {text}"
            *case, most = LOSS_GOAL
            is_judged = [model, options.batch_size, boxes] == case and not options.compile and options.device != "cpu"
            if is_judged and share > most:
                too_much.append(f"{what}: loss and assignment take {share:.1%} of the step, {most:.0%} is the limit")
    if too_much:
        sys.exit("; ".join(too_much))


def loss_share(take_step: TrainStep, imgsz: int, images: int, boxes: int) -> tuple[float, str]:
    """The fraction of a step (on a GPU: of the time in which its kernels run), and a text that also states milliseconds
    and memory."""
    device = take_step.ctx.device
    on_gpu, times = device.type == "cuda", 10 if device.type == "cuda" else 1
    (batch,) = make_batches(1, images, imgsz, device, boxes, like_coco=True)
    step, loss = stepper(take_step, [batch]), loss_pass(take_step, batch)
    for action in (step, step, step, loss, loss, loss):
        action()
    whole, part = (seconds_of(action, times, device.type) * 1000 for action in (step, loss))
    text = f"step {whole:.1f} ms, of which loss and assignment {part:.2f} ms, {part / whole:.1%}"
    found = trace(loss, on_gpu)
    text += f"; it has {counted(found, on_gpu)}, busy {found.busy_ms:.2f} ms, {found.busy_ms / whole:.1%}"
    if on_gpu:
        text += f"; its peak {peak_bytes(loss, device) / 2**20:.0f} MiB"
    return (found.busy_ms if on_gpu else part) / whole, text


def peak_bytes(action: Callable[[], None], device: torch.device) -> int:
    """Peak device memory of ``action`` in bytes, above what was allocated before."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    action()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
