"""Checks that training steps in float32 on the device equal the host's.

On a CPU (``--device cpu``) steps are compared with steps without oneDNN, whose convolutions add in another order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.speed.training_step import StepBuilder, build_step, make_batches

TOLERANCE = 1e-3  # relative differences of losses, of the gradients' norm, and of the norm of the weights' change
WORST_TOLERANCE = 1e-2  # the same for the worst tensor
# Muon orthogonalizes in bfloat16, and rounding rotates directions of small singular values. Between two kernels of a
# CPU the weights' change differs by 0.03, and the worst tensor's by up to 0.4; unrelated changes differ by 1.4.
MUON_TOLERANCES = {"weights' change": 0.1, "worst tensor": 0.8}
LEARNING_RATE = 0.01


class StepResult(NamedTuple):
    """One optimizer step, on the host."""

    losses: Tensor  # (P,)
    grad_norm: float
    changes: list[Tensor]  # change of each weight tensor, float64


def compare_steps(options: argparse.Namespace, *, build: StepBuilder = build_step) -> Iterator[str]:
    """Yields a line of figures for each model and optimizer. Raises SystemExit if a step on the device differs."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    differing = []
    for model in options.models:
        for optimizer in options.optimizers:
            expected = take_step_on("cpu", options, model, optimizer, build=build)
            with torch.backends.mkldnn.flags(enabled=False) if options.device == "cpu" else nullcontext():
                on_device = take_step_on(options.device, options, model, optimizer, build=build)
            errors = relative_differences(expected, on_device)
            case = f"{model} {optimizer}"
            figures = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
            yield f"{case}: relative differences from the CPU: {figures}"
            differing += [f"{case}: {name}" for name in excessive(errors, optimizer)]
    if differing:
        sys.exit(f"differs too much from the CPU: {'; '.join(differing)}")


def take_step_on(
    device: str, options: argparse.Namespace, model: str, optimizer: str, *, build: StepBuilder
) -> StepResult:
    """Takes the same step on any device, with weights and images made on the host."""
    torch.manual_seed(0)
    take_step = build(model, device=device, amp="off", optimizer=optimizer)
    for group in take_step.optimizer.param_groups:
        group["lr"] = LEARNING_RATE
    (batch,) = make_batches(1, options.batch_size, options.imgsz, take_step.ctx.device)
    before = weights_of(take_step.model)
    take_step([batch], [options.batch_size], 1)
    (values,) = take_step.reader.pop(leave=0)
    changes = [new - old for new, old in zip(weights_of(take_step.model), before)]
    return StepResult(torch.tensor(values.losses), values.grad_norm, changes)


def weights_of(model: torch.nn.Module) -> list[Tensor]:
    return [parameter.detach().double().cpu() for parameter in model.parameters()]


def excessive(errors: dict[str, float], optimizer: str) -> list[str]:
    """Returns the differences that exceed their limit, or are nan."""
    limits = {"worst tensor": WORST_TOLERANCE} | (MUON_TOLERANCES if optimizer == "Muon" else {})
    return [f"{name} {error:.1e}" for name, error in errors.items() if not error <= limits.get(name, TOLERANCE)]


def relative_differences(expected: StepResult, on_device: StepResult) -> dict[str, float]:
    """Returns relative differences; nan where a result is nan."""
    sizes = torch.stack([change.norm() for change in expected.changes])
    errors = torch.stack([(a - b).norm() for a, b in zip(on_device.changes, expected.changes)])
    return {
        "losses": float(((on_device.losses - expected.losses).abs() / expected.losses.abs().clamp(min=1e-6)).max()),
        "gradient norm": abs(on_device.grad_norm - expected.grad_norm) / expected.grad_norm,
        "weights' change": float(errors.norm() / sizes.norm()),
        "worst tensor": float((errors / sizes.clamp(min=float(sizes.median()))).max()),
    }
