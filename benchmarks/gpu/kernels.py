"""Finds the costliest kernels of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.speed.training_step import build_step, make_batches, stepper
from benchmarks.speed.turns import seconds_of

NAME_WIDTH = 70  # characters of a kernel's name
TOP = 20  # number of kernels in a table
COPIES = ("Memcpy", "Memset")


def costliest_kernels(*, device: str, imgsz: int, cases: Sequence[tuple[str, int, str]]) -> Iterator[str]:
    """Yields, for each case of model, batch size and optimizer, the number of kernels that a step launches, the share
    of time in which the device is busy, and a table of the costliest kernels; on a CPU, operations in place of
    kernels."""
    on_gpu = device != "cpu"
    times = 4 if on_gpu else 1
    for model, images, optimizer in cases:
        take_step = build_step(model, images=images, device=device, optimizer=optimizer)
        step = stepper(take_step, make_batches(2, images, imgsz, take_step.ctx.device))
        for _ in range(4):
            step()
        step_ms = 1000 * seconds_of(step, 10 if on_gpu else 1, take_step.ctx.device.type)
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as recorded:
            for _ in range(times):
                step()
            if on_gpu:
                torch.cuda.synchronize()
        events = [event for event in recorded.key_averages() if not getattr(event, "is_user_annotation", False)]
        operations = [e for e in events if e.device_type == DeviceType.CPU and e.key.startswith("aten::")]
        counts = f"{sum(event.count for event in operations) / times:g} operations on the host"
        if on_gpu:
            kernels = [(e.key, e.self_device_time_total, e.count) for e in events if e.device_type == DeviceType.CUDA]
            copies = sum(calls for name, _, calls in kernels if name.startswith(COPIES)) / times
            launched = sum(calls for _, _, calls in kernels) / times - copies
            counts = f"{launched:g} kernels, {copies:g} copies and fills on the device, {counts}"
        else:
            kernels = [(e.key, e.self_cpu_time_total, e.count) for e in operations]
        kernels.sort(key=lambda kernel: -kernel[1])
        busy_ms = sum(microseconds for _, microseconds, _ in kernels) / 1000 / times
        case = f"{model} batch {images} {optimizer}"
        yield f"{case}: {counts} a step; busy {busy_ms:.1f} ms of {step_ms:.1f} ms, {busy_ms / step_ms:.0%}"
        yield f"| {case} | ms a step | share | calls |"
        yield "| --- | --- | --- | --- |"
        for rank, (name, microseconds, calls) in enumerate(kernels[:TOP], 1):
            short = f"{case} {rank}. {name[:NAME_WIDTH].replace('|', '/')}"
            kernel_ms = microseconds / 1000 / times
            yield f"| {short} | {kernel_ms:.3f} | {kernel_ms / busy_ms:.1%} | {calls / times:g} |"
