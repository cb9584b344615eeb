"""Measures where the time of a step goes: loss, assignment, the costliest kernels."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.speed.training_step import StepBuilder, build_step, loss_pass, make_batches, stepper
from benchmarks.speed.turns import seconds_of
from engine.train.step import TrainStep

NAME_WIDTH = 70  # characters of a kernel's name
TOP = 20  # number of kernels in a table
COPIES = ("Memcpy", "Memset")


@dataclass(frozen=True)
class Trace:
    """A trace of one run of an action: its kernels and copies on a GPU, or its operations on a CPU."""

    kernels: list[tuple[str, float, float]]  # name, milliseconds, calls; the costliest first
    operations: float  # number of ATen operations called on the host, including nested ones

    @property
    def busy_ms(self) -> float:
        return sum(milliseconds for _, milliseconds, _ in self.kernels)

    def calls(self, *, copies: bool) -> float:
        """Returns the number of kernels or, with ``copies``, of copies and fills."""
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
    """Yields figures and a table of kernels for each of ``--case``: MODEL:BATCH:OPTIMIZER."""
    for case in options.cases:
        model, images, optimizer = case.split(":")
        yield from kernels_of(options, model, int(images), optimizer)


def kernels_of(
    options: argparse.Namespace, model: str, images: int, optimizer: str, *, build: StepBuilder = build_step
) -> Iterator[str]:
    """Yields the number of kernels that a step launches, the share of time in which the device is busy, and the
    costliest kernels."""
    take_step = build(model, images=images, device=options.device, optimizer=optimizer)
    device = take_step.ctx.device
    on_gpu = device.type == "cuda"
    step = stepper(take_step, make_batches(2, images, options.imgsz, device))
    for _ in range(4):
        step()
    step_ms = 1000 * seconds_of(step, 10 if on_gpu else 1, device.type)
    step_trace = trace(step, on_gpu)
    case = f"{model} batch {images} {optimizer}"
    busy = f"busy {step_trace.busy_ms:.1f} ms of {step_ms:.1f} ms, {step_trace.busy_ms / step_ms:.0%}"
    yield f"{case}: {count_text(step_trace, on_gpu)} a step; {busy}"
    yield f"| {case} | ms a step | share | calls |"
    yield "| --- | --- | --- | --- |"
    for rank, (name, kernel_ms, calls) in enumerate(step_trace.kernels[:TOP], 1):
        short = f"{case} {rank}. {name[:NAME_WIDTH].replace('|', '/')}"
        yield f"| {short} | {kernel_ms:.3f} | {kernel_ms / step_trace.busy_ms:.1%} | {calls:g} |"


def first_steps(options: argparse.Namespace, *, build: StepBuilder = build_step) -> Iterator[str]:
    """Yields the times of single steps, the first of which searches for kernels, and of steps with a smaller batch, as
    at the end of an epoch, which should not search. Raises SystemExit if the first of these takes as long as a search.
    """
    images = options.batch_size
    take_step = build(options.model, images=images, device=options.device)
    device = take_step.ctx.device
    seconds: list[list[float]] = []
    number = 0
    for count in (images, max(images // 2, 1)):
        step = stepper(take_step, make_batches(1, count, options.imgsz, device), start=number)
        seconds.append([seconds_of(step, 1, device.type) for _ in range(4)])
        number += 4
        shown = ", ".join(f"{value:.3f}" for value in seconds[-1])
        yield f"{options.model} batch {count}, steps one by one: {shown} s"
    search_s, again_s = (found[0] - min(found[1:]) for found in seconds)
    if device.type == "cuda" and again_s > max(search_s / 3, 0.5):
        sys.exit(f"the first step of a smaller batch takes {again_s:.2f} s longer than its others")


def count_text(found: Trace, on_gpu: bool) -> str:
    on_device = f"{found.calls(copies=False):g} kernels, {found.calls(copies=True):g} copies and fills on the device, "
    return (on_device if on_gpu else "") + f"{found.operations:g} operations on the host"


def loss_shares(options: argparse.Namespace, *, build: StepBuilder = build_step) -> Iterator[str]:
    """Yields the loss's share of a step for each model and number of boxes per image."""
    for model in options.models:
        take_step = build(model, images=options.batch_size, device=options.device, compile=options.compile)
        case = f"{model} batch {options.batch_size}{' compiled' if options.compile else ''}"
        for boxes in options.boxes:
            share = loss_share(take_step, options.imgsz, options.batch_size, boxes)
            yield f"{case}, {boxes} boxes an image: {share}"


def loss_share(take_step: TrainStep, imgsz: int, images: int, boxes: int) -> str:
    """Describes milliseconds, launches and memory of the loss, and its share of a step, in wall time and, on a GPU, in
    kernel time."""
    device = take_step.ctx.device
    on_gpu = device.type == "cuda"
    times = 10 if on_gpu else 1
    (batch,) = make_batches(1, images, imgsz, device, boxes, like_coco=True)
    step = stepper(take_step, [batch])
    loss = loss_pass(take_step, batch)
    for action in (step, loss):
        for _ in range(3):
            action()
    step_ms = 1000 * seconds_of(step, times, device.type)
    loss_ms = 1000 * seconds_of(loss, times, device.type)
    loss_trace = trace(loss, on_gpu)
    line = f"step {step_ms:.1f} ms, of which loss and assignment {loss_ms:.2f} ms, {loss_ms / step_ms:.1%}"
    busy_share = loss_trace.busy_ms / step_ms
    line += f"; it has {count_text(loss_trace, on_gpu)}, busy {loss_trace.busy_ms:.2f} ms, {busy_share:.1%}"
    if on_gpu:
        line += f"; its peak {peak_bytes(loss, device) / 2**20:.0f} MiB"
    return line


def peak_bytes(action: Callable[[], None], device: torch.device) -> int:
    """Returns the peak device memory of ``action`` in bytes, above the memory allocated before."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    action()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
