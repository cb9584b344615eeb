"""Compares a compiled step with an uncompiled one: equal results, CUDA graphs that really run, and no host sync."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING

from benchmarks.our_side import seconds_of
from benchmarks.training_step import build_step, make_batches

if TYPE_CHECKING:
    from engine.train.step import StepValues, TrainStep

WHOLE, ACCUMULATED, PARTIAL = "whole", "accumulated", "partial"
COURSE = (WHOLE, WHOLE, WHOLE, WHOLE, PARTIAL, WHOLE, ACCUMULATED, WHOLE)
TOLERANCE = 0.02  # relative, of losses and gradient norms in float32 (on GPUs with TF32 convolutions)


def compare_steps(options: argparse.Namespace) -> Iterator[str]:
    """Lines with figures; SystemExit if a check fails."""
    plain, compiled = (taken(options, is_compiled) for is_compiled in (False, True))
    for kind, a, b in zip(COURSE, plain, compiled):
        pairs = [*zip(a.losses, b.losses), (a.grad_norm, b.grad_norm)]
        if any(abs(x - y) > TOLERANCE * abs(x) + 1e-4 for x, y in pairs):
            sys.exit(
                f"a step of kind {kind!r} differs, compiled: {b.losses} {b.grad_norm}, not: {a.losses} {a.grad_norm}"
            )
    yield f"{len(COURSE)} steps, last batches and accumulation among them, within {TOLERANCE:.0%} of uncompiled ones"
    before = yield from time_steps(options, False)
    after = yield from time_steps(options, True)
    yield f"step {1000 * before:.2f} ms, compiled {1000 * after:.2f} ms: {before / after:.2f} times as fast"


def time_steps(options: argparse.Namespace, is_compiled: bool) -> Generator[str, None, float]:
    """Seconds per step, in the autocast type of training."""
    take_step = step_of(options, is_compiled, amp="auto")
    device = take_step.ctx.device
    batches = make_batches(2, options.batch_size, options.imgsz, device)
    numbers = count()
    for _ in range(5):
        one_step(take_step, batches, next(numbers))
    if is_compiled and device.type == "cuda":
        yield check_graphs(take_step, batches)
    return seconds_of(lambda: one_step(take_step, batches, next(numbers)), 10, device.type)


def step_of(options: argparse.Namespace, is_compiled: bool, *, amp: str) -> TrainStep:
    pictures = options.batch_size if is_compiled else 0
    return build_step(options.model, device=options.device, amp=amp, compiled_for=pictures)


def one_step(take_step: TrainStep, batches: Sequence, number: int) -> None:
    batch = batches[number % len(batches)]
    take_step([batch], [len(batch.images)], number + 1)
    take_step.reader.pop()


def taken(options: argparse.Namespace, is_compiled: bool) -> list[StepValues]:
    """The results of the steps of `COURSE`."""
    take_step = step_of(options, is_compiled, amp="off")
    whole = make_batches(2, options.batch_size, options.imgsz, take_step.ctx.device)
    values = []
    for number, kind in enumerate(COURSE):
        batches = whole if kind is ACCUMULATED else [whole[number % 2]]
        if kind is PARTIAL:
            batches = [whole[0].shard(0, options.batch_size // 2)]
        take_step(batches, [len(batch.images) for batch in batches], number + 1)
        values += take_step.reader.pop(leave=0)
    return values


def check_graphs(take_step: TrainStep, batches: Sequence) -> str:
    """Checks that three steps launch CUDA graphs without a host sync."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.set_sync_debug_mode("error")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for number in range(3):
            one_step(take_step, batches, number)
    torch.cuda.set_sync_debug_mode("default")
    launches = sum(event.count for event in trace.key_averages() if event.key == "cudaGraphLaunch")
    if launches < 6:
        sys.exit(f"{launches} CUDA graphs launched in three steps; a forward and a backward pass each make six")
    return f"{launches / 3:g} CUDA graphs a step, no host sync"
