"""Checks that a first step that overflows is skipped, and that training goes on."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from benchmarks.speed.training_step import build_step, make_batches, state_of
from engine.train.step import StepValues, TrainStep

MOMENTA = ("momentum_buffer", "exp_avg", "exp_avg_sq")
HEADROOM_STEPS = 8  # steps until a far too high loss scale has come down


def check_overflow(options: argparse.Namespace) -> Iterator[str]:
    """Checks that a first step that overflows does not change weights and averaged weights, leaves momenta at zero, and
    does not stop training. Yields a line of figures for each optimizer. Raises SystemExit if a check fails.

    The step overflows because of a far too high loss scale in float16; on a CPU a gradient is made infinite.
    """
    # Fills uninitialized memory with nan, so that it cannot pass for zeros.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    problems = []
    for optimizer in options.optimizers:
        steps, failed = steps_after_overflow(options, optimizer)
        taken = sum(values.finite for values in steps)
        yield f"{options.model} {optimizer}: {taken} of {len(steps)} steps taken"
        problems += [f"{optimizer}: {problem}" for problem in failed]
    if problems:
        sys.exit("; ".join(problems))


def steps_after_overflow(options: argparse.Namespace, optimizer: str) -> tuple[list[StepValues], list[str]]:
    """Takes a step that overflows and `HEADROOM_STEPS` others. Returns the values of all steps, and failed checks."""
    amp = "off" if options.device == "cpu" else "fp16"
    take_step = build_step(options.model, device=options.device, amp=amp, optimizer=optimizer)
    (batch,) = make_batches(1, options.batch_size, options.imgsz, take_step.ctx.device)
    before = values_of(state_of(take_step))
    with overflowing(take_step):
        take_step([batch], [options.batch_size], 1)
    skipped = state_of(take_step)
    for number in range(HEADROOM_STEPS):
        take_step([batch], [options.batch_size], number + 2)
    last = state_of(take_step)
    after = values_of(last)
    steps = take_step.reader.pop(leave=0)
    checks = {
        "the first step was not skipped": not steps[0].finite,
        "the skipped step changed weights": torch.equal(before, values_of(skipped)),
        "momenta are not zero after the skipped step": bool((momenta_of(skipped) == 0).all()),
        "no later step was taken": any(values.finite for values in steps[1:]),
        "the steps after it left weights that are not finite": bool(after.isfinite().all()),
        "the steps after it left momenta that are not finite": bool(momenta_of(last).isfinite().all()),
        "the steps after it changed nothing": not torch.equal(before, after),
    }
    return steps, [problem for problem, holds in checks.items() if not holds]


@contextmanager
def overflowing(take_step: TrainStep) -> Iterator[None]:
    """Takes steps that overflow; on a GPU each lowers the loss scale."""
    if take_step.ctx.device.type == "cuda":
        take_step.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, backoff_factor=2.0**-12)
        yield
        return
    hook = next(take_step.model.parameters()).register_hook(lambda gradient: gradient * float("inf"))
    try:
        yield
    finally:
        hook.remove()


def values_of(state: dict[str, Tensor]) -> Tensor:
    """Returns all floating-point values of the model and of its average, concatenated."""
    keys = (key for key, value in state.items() if not key.startswith("optimizer.") and value.is_floating_point())
    return torch.cat([state[key].reshape(-1) for key in keys])


def momenta_of(state: dict[str, Tensor]) -> Tensor:
    """Returns the optimizer's momenta, concatenated; empty if there are none yet."""
    return torch.cat([torch.zeros(0), *(value.reshape(-1) for key, value in state.items() if key.endswith(MOMENTA))])
