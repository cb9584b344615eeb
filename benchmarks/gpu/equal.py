"""Checks that results on the device equal the host's: training steps in float32, detections after box voting.

On a CPU (``--device cpu``) steps are compared with steps without oneDNN, whose convolutions add in another order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from benchmarks.speed.training_step import StepBuilder, build_step, context_of, make_batches
from tests.helpers.dense_detections import make_detections

if TYPE_CHECKING:
    from models.postprocess.detections import Detections

TOLERANCE = 1e-3  # relative differences of losses, of the gradients' norm, and of the norm of the weights' change
WORST_TOLERANCE = 1e-2  # the same for the worst tensor
# Muon orthogonalizes in bfloat16, and rounding rotates directions of small singular values. Between two kernels of a
# CPU the weights' change differs by 0.03, and the worst tensor's by up to 0.4; unrelated changes differ by 1.4.
MUON_TOLERANCES = {"weights' change": 0.1, "worst tensor": 0.8}
LEARNING_RATE = 0.01
BOX_TOLERANCE_PX = 1e-2  # largest difference of detected boxes, pixels
SCORE_TOLERANCE = 1e-5  # largest difference of their scores


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
            with other_arithmetic(options.device):
                on_device = take_step_on(options.device, options, model, optimizer, build=build)
            errors = relative_differences(expected, on_device)
            case = f"{model} {optimizer}"
            figures = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
            yield f"{case}: relative differences from the CPU: {figures}"
            differing += [f"{case}: {name}" for name in excessive(errors, optimizer)]
    if differing:
        sys.exit(f"differs too much from the CPU: {'; '.join(differing)}")


def other_arithmetic(device: str) -> AbstractContextManager:
    return torch.backends.mkldnn.flags(enabled=False) if device == "cpu" else nullcontext()


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


def compare_detections(options: argparse.Namespace) -> Iterator[str]:
    """Compares NMS with box voting on the device with the host, for a crowded batch."""
    from models.postprocess.detections import select_detections
    from models.postprocess.selection import PostprocessSettings

    content = make_detections(options.batch_size, 2100, 80, 30)
    device = context_of(options.device).device

    def detect(on: torch.device) -> Detections:
        boxes_and_scores = (content[name].to(on) for name in ("boxes_xyxy", "scores"))
        return select_detections(*boxes_and_scores, PostprocessSettings(conf_thres=0.001, iou_thres=0.7))

    expected = detect(torch.device("cpu"))
    on_device = detect(device)
    problems = unequal_detections(expected, on_device)
    yield f"{int(expected.counts.sum())} boxes of {options.batch_size} images after box voting"
    if problems:
        sys.exit("; ".join(problems))


def unequal_detections(expected: Detections, on_device: Detections) -> list[str]:
    """Describes how two `Detections` differ by more than rounding."""
    if not torch.equal(expected.counts, on_device.counts.cpu()):
        return [f"counts differ: {expected.counts.tolist()}, on the device {on_device.counts.tolist()}"]
    moved = float((on_device.boxes_xyxy.cpu() - expected.boxes_xyxy).abs().max())
    scores = float((on_device.scores.cpu() - expected.scores).abs().max())
    problems = []
    if not moved <= BOX_TOLERANCE_PX:  # also for nan
        problems.append(f"boxes differ by {moved:.4f} px")
    if not scores <= SCORE_TOLERANCE:
        problems.append(f"scores differ by {scores:.1e}")
    if not torch.equal(expected.classes, on_device.classes.cpu()):
        problems.append("classes differ")
    return problems
