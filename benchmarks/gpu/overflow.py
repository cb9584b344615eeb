"""Checks that a first step that overflows is skipped, and that training goes on."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from benchmarks.speed.training_step import build_step, make_batches
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
    before = values_of(take_step)
    with overflowing(take_step):
        take_step([batch], [options.batch_size], 1)
    skipped = values_of(take_step)
    momenta = momenta_of(take_step)
    for number in range(HEADROOM_STEPS):
        take_step([batch], [options.batch_size], number + 2)
    after = values_of(take_step)
    steps = take_step.reader.pop(leave=0)
    checks = {
        "the first step was not skipped": not steps[0].finite,
        "the skipped step changed weights": torch.equal(before, skipped),
        "momenta are not zero after the skipped step": bool((momenta == 0).all()),
        "no later step was taken": any(values.finite for values in steps[1:]),
        "the steps after it left weights that are not finite": bool(after.isfinite().all()),
        "the steps after it left momenta that are not finite": bool(momenta_of(take_step).isfinite().all()),
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


def values_of(take_step: TrainStep) -> Tensor:
    """Returns all floating-point values of the model and of its average, concatenated on the host."""
    states = [module.state_dict() for module in (take_step.model, take_step.ema.module)]
    values = [value for state in states for value in state.values() if value.is_floating_point()]
    return torch.cat([value.reshape(-1) for value in values]).cpu()


def momenta_of(take_step: TrainStep) -> Tensor:
    """Returns the optimizer's momenta, concatenated in the same way; empty if there are none yet."""
    rules = take_step.optimizer.state_dict()["optimizers"]
    states = [state for rule in rules for state in rule["state"].values()]
    values = [state[name].reshape(-1) for state in states for name in MOMENTA if name in state]
    return torch.cat(values).cpu() if values else torch.zeros(0)
