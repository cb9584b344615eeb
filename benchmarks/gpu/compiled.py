"""Checks that compiled steps equal uncompiled ones, and times both."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Generator, Iterator

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.speed.training_step import build_step, make_batches, stepper
from benchmarks.speed.turns import seconds_of
from engine.train.step import StepValues

WHOLE = "whole"
ACCUMULATED = "accumulated"
PARTIAL = "partial"
STEP_KINDS = (WHOLE, WHOLE, WHOLE, WHOLE, PARTIAL, WHOLE, ACCUMULATED, WHOLE)
COMPILED_TOLERANCE = 0.02  # relative, of losses and gradient norms in float32 (on GPUs with TF32 convolutions)


def compare_compiled(options: argparse.Namespace) -> Iterator[str]:
    """Yields lines of figures. Raises SystemExit if a check fails."""
    plain = run_steps(options, is_compiled=False)
    compiled = run_steps(options, is_compiled=True)
    for kind, a, b in zip(STEP_KINDS, plain, compiled):
        pairs = [*zip(a.losses, b.losses), (a.grad_norm, b.grad_norm)]
        if any(abs(x - y) > COMPILED_TOLERANCE * abs(x) + 1e-4 for x, y in pairs):
            sys.exit(
                f"a step of kind {kind!r} differs, compiled: {b.losses} {b.grad_norm}, not: {a.losses} {a.grad_norm}"
            )
    yield f"{len(STEP_KINDS)} steps, also partial and accumulated ones, within {COMPILED_TOLERANCE:.0%} of uncompiled"
    before = yield from time_steps(options, is_compiled=False)
    after = yield from time_steps(options, is_compiled=True)
    yield f"step {1000 * before:.2f} ms, compiled {1000 * after:.2f} ms: {before / after:.2f} times as fast"


def time_steps(options: argparse.Namespace, *, is_compiled: bool) -> Generator[str, None, float]:
    """Returns seconds per step, in the autocast type of training."""
    take_step = build_step(options.model, images=options.batch_size, device=options.device, compile=is_compiled)
    device = take_step.ctx.device
    step = stepper(take_step, make_batches(2, options.batch_size, options.imgsz, device))
    for _ in range(5):
        step()
    if is_compiled and device.type == "cuda":
        yield check_graphs(step)
    return seconds_of(step, 10, device.type)


def run_steps(options: argparse.Namespace, *, is_compiled: bool) -> list[StepValues]:
    """Returns the results of a step of each of `STEP_KINDS`."""
    settings = {"amp": "off", "compile": is_compiled}
    take_step = build_step(options.model, images=options.batch_size, device=options.device, **settings)
    whole = make_batches(2, options.batch_size, options.imgsz, take_step.ctx.device)
    values = []
    for number, kind in enumerate(STEP_KINDS):
        batches = whole if kind is ACCUMULATED else [whole[number % 2]]
        if kind is PARTIAL:
            batches = [whole[0].shard(0, options.batch_size // 2)]
        take_step(batches, [len(batch.images) for batch in batches], number + 1)
        values += take_step.reader.pop(leave=0)
    return values


def check_graphs(step: Callable[[], None]) -> str:
    """Checks that three steps launch CUDA graphs without a host sync."""
    torch.cuda.set_sync_debug_mode("error")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(3):
            step()
    torch.cuda.set_sync_debug_mode("default")
    launches = sum(event.count for event in trace.key_averages() if event.key == "cudaGraphLaunch")
    if launches < 6:
        sys.exit(f"{launches} CUDA graphs launched in three steps; a forward and a backward pass each make six")
    return f"{launches / 3:g} CUDA graphs a step, no host sync"
