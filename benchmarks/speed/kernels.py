"""The costliest kernels of a training step on a GPU, the number of kernels that it launches, and the share of time in
which the device is busy; on a CPU, operations in place of kernels.

    python -m benchmarks.speed.kernels --model yolov8n --imgsz 640 --batch-size 16 64 --optimizer SGD Muon --device 0
"""

from __future__ import annotations

import itertools

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.command import parse_flags, positive, run_benchmark
from benchmarks.speed.training_step import build_step, make_batches, stepper
from benchmarks.speed.turns import seconds_of

NAME_WIDTH = 70  # characters of a kernel's name
COPIES = ("Memcpy", "Memset")
PROFILED_STEPS = 4


def main() -> None:
    options = parse_flags(
        "speed.kernels",
        __doc__,
        model={"default": "yolov8n", "help": "name of a model"},
        imgsz={},
        batch_size={"nargs": "+", "default": [16]},
        optimizer={"nargs": "+", "default": ["SGD"], "help": "names of optimizers"},
        device={},
        top={"type": positive, "default": 20, "help": "number of kernels to show"},
    )
    for images, optimizer in itertools.product(options.batch_size, options.optimizer):
        show_kernels(options.model, images, optimizer, options.imgsz, options.device, options.top)


def show_kernels(model: str, images: int, optimizer: str, imgsz: int, device: str, top: int) -> None:
    """Prints a line of totals and a table of the ``top`` costliest kernels."""
    on_gpu = device != "cpu"
    take_step = build_step(model, images=images, device=device, optimizer=optimizer)
    step = stepper(take_step, make_batches(2, images, imgsz, take_step.ctx.device))
    for _ in range(PROFILED_STEPS):  # warms up
        step()
    step_ms = 1000 * seconds_of(step, 10, take_step.ctx.device.type)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as recorded:
        for _ in range(PROFILED_STEPS):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    events = [event for event in recorded.key_averages() if not getattr(event, "is_user_annotation", False)]
    operations = [e for e in events if e.device_type == DeviceType.CPU and e.key.startswith("aten::")]
    totals = f"{sum(event.count for event in operations) / PROFILED_STEPS:g} operations on the host"
    if on_gpu:
        kernels = [(e.key, e.self_device_time_total, e.count) for e in events if e.device_type == DeviceType.CUDA]
        copies = sum(calls for name, _, calls in kernels if name.startswith(COPIES)) / PROFILED_STEPS
        launched = sum(calls for _, _, calls in kernels) / PROFILED_STEPS - copies
        totals = f"{launched:g} kernels, {copies:g} copies and fills on the device, {totals}"
    else:
        kernels = [(e.key, e.self_cpu_time_total, e.count) for e in operations]
    kernels.sort(key=lambda kernel: -kernel[1])
    busy_ms = sum(microseconds for _, microseconds, _ in kernels) / 1000 / PROFILED_STEPS
    print(f"\n{model}, {imgsz} px, batch {images}, {optimizer}, device {device}: {totals} a step")
    print(f"busy {busy_ms:.1f} ms of {step_ms:.1f} ms, {busy_ms / step_ms:.0%}\n")
    print("| kernel | ms a step | share | calls |\n| --- | --- | --- | --- |")
    for name, microseconds, calls in kernels[:top]:
        kernel_ms = microseconds / 1000 / PROFILED_STEPS
        cells = (name[:NAME_WIDTH].replace("|", "/"), f"{kernel_ms:.3f}", f"{kernel_ms / busy_ms:.1%}")
        print(f"| {' | '.join(cells)} | {calls / PROFILED_STEPS:g} |", flush=True)


if __name__ == "__main__":
    run_benchmark(main)
