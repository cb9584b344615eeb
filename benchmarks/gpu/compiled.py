"""Checks that compiled steps equal uncompiled ones, and times both."""

from __future__ import annotations

from collections.abc import Iterator

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.syncs import sync_debug_mode
from benchmarks.speed.training_step import build_step, make_batches, stepper
from benchmarks.speed.turns import seconds_of
from engine.train.step import StepValues

STEP_KINDS = ("whole", "whole", "whole", "whole", "partial", "whole", "accumulated", "whole")
TOLERANCE = 0.02  # relative, of losses and gradient norms in float32 (on GPUs with TF32 convolutions)


def compare_compiled(*, device: str, imgsz: int, batch_size: int, model: str = "yolov8n") -> Iterator[str]:
    """Yields the number of equal steps, and the times of steps in the autocast type of training; on a GPU also the
    number of CUDA graphs."""
    plain, compiled = (take_steps(device, imgsz, batch_size, model, is_compiled=is_on) for is_on in (False, True))
    for kind, a, b in zip(STEP_KINDS, plain, compiled):
        pairs = [*zip(a.losses, b.losses), (a.grad_norm, b.grad_norm)]
        if any(abs(x - y) > TOLERANCE * abs(x) + 1e-4 for x, y in pairs):
            yield f"! a {kind} step differs, compiled: {b.losses} {b.grad_norm}, not: {a.losses} {a.grad_norm}"
            return
    yield f"{len(STEP_KINDS)} steps, also partial and accumulated ones, within {TOLERANCE:.0%} of uncompiled"
    ms = []
    for is_compiled in (False, True):
        take_step = build_step(model, images=batch_size, device=device, compile=is_compiled)
        step = stepper(take_step, make_batches(2, batch_size, imgsz, take_step.ctx.device))
        for _ in range(5):
            step()
        if is_compiled and device != "cpu":
            with sync_debug_mode("error"), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
                for _ in range(3):
                    step()
            graphs = sum(event.count for event in trace.key_averages() if event.key == "cudaGraphLaunch")
            if graphs < 6:
                yield f"! {graphs} CUDA graphs launched in three steps; a forward and a backward pass each make six"
                return
            yield f"{graphs / 3:g} CUDA graphs a step, no host sync"
        ms.append(1000 * seconds_of(step, 10, take_step.ctx.device.type))
    yield f"step {ms[0]:.2f} ms, compiled {ms[1]:.2f} ms: {ms[0] / ms[1]:.2f} times as fast"


def take_steps(device: str, imgsz: int, batch_size: int, model: str, *, is_compiled: bool) -> list[StepValues]:
    """Takes a float32 step of each of `STEP_KINDS`. Returns their values."""
    take_step = build_step(model, images=batch_size, device=device, amp="off", compile=is_compiled)
    batches = make_batches(2, batch_size, imgsz, take_step.ctx.device)
    values = []
    for number, kind in enumerate(STEP_KINDS):
        taken = batches if kind == "accumulated" else [batches[number % 2]]
        if kind == "partial":
            taken = [batches[0].shard(0, batch_size // 2)]
        take_step(taken, [len(batch.images) for batch in taken], number + 1)
        values += take_step.reader.pop(leave=0)
    return values
