"""Checks that a first step that overflows is skipped, and that training goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.same_bits import have_same_bits
from benchmarks.speed.training_step import build_step, make_batches, state_of

MOMENTA = ("momentum_buffer", "exp_avg", "exp_avg_sq")
HEADROOM_STEPS = 8  # steps until a far too high loss scale has come down


def check_overflow(
    *, device: str, optimizers: Sequence[str], batch_size: int, imgsz: int, model: str = "yolov8n"
) -> Iterator[str]:
    """Yields how many steps of each optimizer were taken after a first one that overflowed: because of a far too high
    loss scale in float16, which each such step lowers; on a CPU because a gradient is made infinite."""
    # Fills uninitialized memory with nan, so that it cannot pass for zeros.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    for optimizer in optimizers:
        take_step = build_step(model, device=device, amp="off" if device == "cpu" else "fp16", optimizer=optimizer)
        batches = make_batches(1, batch_size, imgsz, take_step.ctx.device)
        before = state_of(take_step)
        hook = None
        if device == "cpu":
            hook = next(take_step.model.parameters()).register_hook(lambda gradient: gradient * float("inf"))
        else:
            take_step.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, backoff_factor=2.0**-12)
        take_step(batches, [batch_size], 1)
        if hook is not None:
            hook.remove()
        skipped = state_of(take_step)
        for number in range(HEADROOM_STEPS):
            take_step(batches, [batch_size], number + 2)
        last = state_of(take_step)
        first, *later = take_step.reader.pop(leave=0)
        taken = sum(values.finite for values in (first, *later))
        yield f"{model} {optimizer}: {taken} of {1 + HEADROOM_STEPS} steps taken"
        checks = {
            "the first step was not skipped": not first.finite,
            "the skipped step changed weights": have_same_bits(weights_of(before), weights_of(skipped)),
            "momenta are not zero after the skipped step": not momenta_of(skipped).any(),
            "no later step was taken": any(values.finite for values in later),
            "the steps after it left weights that are not finite": weights_of(last).isfinite().all(),
            "the steps after it left momenta that are not finite": momenta_of(last).isfinite().all(),
            "the steps after it changed nothing": not have_same_bits(weights_of(before), weights_of(last)),
        }
        yield from (f"! {optimizer}: {problem}" for problem, holds in checks.items() if not holds)


def weights_of(state: dict[str, Tensor]) -> Tensor:
    """Returns all floating-point values of the model and of its average, concatenated."""
    keys = (key for key, value in state.items() if not key.startswith("optimizer.") and value.is_floating_point())
    return torch.cat([state[key].reshape(-1) for key in keys])


def momenta_of(state: dict[str, Tensor]) -> Tensor:
    """Returns the optimizer's momenta, concatenated; empty if there are none yet."""
    return torch.cat([torch.zeros(0), *(value.reshape(-1) for key, value in state.items() if key.endswith(MOMENTA))])
