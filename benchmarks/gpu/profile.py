"""Measures where the time of a step goes: loss, assignment, the costliest kernels; and the torch renderer's speed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.speed import report
from benchmarks.speed.report import Comparison
from benchmarks.speed.training_step import StepBuilder, build_step, context_of, loss_pass, make_batches, stepper
from benchmarks.speed.turns import seconds_of
from data.augment.labels import images_of, place_labels
from data.augment.plan import SamplePlanner
from data.render.device import paint_layers, render_table
from data.render.opencv import render_plan
from data.render.pyramid import PyramidLayout
from data.render.table import RenderTable, build_table
from engine.train.step import TrainStep
from utils.batches import SampleKey, map_tensors
from utils.config.settings import Hyperparameters

NAME_WIDTH = 70  # characters of a kernel's name
TOP = 20  # number of kernels in a table
COPIES = ("Memcpy", "Memset")
SOURCES = [(480, 640), (427, 640), (640, 480), (640, 640)]  # heights and widths at 640 px, COCO's most frequent ones
LABELS = 7  # labels per image
HOST_IMAGES = 16


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


def rendering(options: argparse.Namespace) -> Iterator[str]:
    """Yields a table of images per second: for the renderer on the device, with source images in its memory (as with
    ``--render-on device --cache device``), and for the work of one loader process."""
    scene = Scene(options.imgsz, images=64)
    device = context_of(options.device).device
    table = map_tensors(scene.table(options.batch_size), lambda t: t.to(device))
    cache = scene.pixels.to(device)
    painters: dict[str, Callable] = {"renderer, operation by operation": paint_layers}
    if device.type == "cuda":
        painters["renderer, compiled"] = torch.compile(paint_layers, dynamic=True)
    works = {name: partial(render_table, table, cache, paint) for name, paint in painters.items()}
    hosts = {"numbers for it, one process": scene.numbers, "OpenCV renderer, one process": scene.opencv}
    cases = [(name, work, options.batch_size, device.type) for name, work in works.items()]
    cases += [(name, partial(work, HOST_IMAGES), HOST_IMAGES, "cpu") for name, work in hosts.items()]
    rows = []
    for name, work, images, on in cases:
        work()
        rates = [images / seconds_of(work, 1, on) for _ in range(options.rounds)]
        rows.append(Comparison(name, "images/s", rates, higher_is_better=True))
    yield from report.table(rows).splitlines()


class Scene:
    """Source images of noise, with labels and plans."""

    def __init__(self, imgsz: int, *, images: int) -> None:
        rng = np.random.default_rng(0)
        sizes = np.array(SOURCES) * imgsz // 640
        self.source_hw = sizes[np.arange(images) % len(sizes)]
        self.imgsz = imgsz
        self.images = [rng.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in self.source_hw.tolist()]
        corners = rng.uniform(0.2, 0.8, (LABELS, 2))
        extent = rng.uniform(0.05, 0.4, (LABELS, 2))
        self.labels = np.concatenate([np.zeros((LABELS, 1)), corners, extent], 1).astype(np.float32)
        self.layout = PyramidLayout.of(self.source_hw)

    @property
    def pixels(self) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([self.layout.flat(image) for image in self.images]))

    def plans(self, count: int) -> list:
        canvas = (self.imgsz, self.imgsz)
        keys = [SampleKey(p % len(self.images), 0, p, canvas) for p in range(count)]
        return SamplePlanner(self.source_hw, Hyperparameters(), seed=0).draw(keys, run_epochs=100)

    def table(self, count: int) -> RenderTable:
        return build_table(self.plans(count), (self.imgsz, self.imgsz), self.source_hw, self.layout)

    def numbers(self, count: int) -> None:
        plans = self.plans(count)
        build_table(plans, (self.imgsz, self.imgsz), self.source_hw, self.layout)
        place_labels(plans, self.source_hw, *self.labels_of(images_of(plans)))

    def labels_of(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.tile(self.labels, (len(images), 1)), np.repeat(np.arange(len(images)), len(self.labels))

    def opencv(self, count: int) -> None:
        for plan in self.plans(count):
            render_plan(plan, self.images.__getitem__)
