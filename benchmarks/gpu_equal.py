"""Results on the device compared with the host's: training steps in float32, detections after box voting, rendered
images.

On a CPU (``--device cpu``) steps are compared with those without oneDNN, whose convolutions add in another order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from benchmarks.nms import make_input
from benchmarks.training_step import build_step, context_of, make_batches

if TYPE_CHECKING:
    from models.postprocess.detections import Detections

TOLERANCE = 1e-3  # relative: of losses, of the gradients' norm, and of the norm of the weights' change
WORST_TOLERANCE = 1e-2  # the same for the worst tensor
# Muon orthogonalizes in bfloat16, and rounding turns directions of small singular values. Between two kernels of a CPU
# the weights' change differs by 0.03, that of the worst tensor by up to 0.4; unrelated changes differ by 1.4.
MUON = {"weights' change": 0.1, "worst tensor": 0.8}
LEARNING_RATE = 0.01
BOX_PX, SCORE = 1e-2, 1e-5  # largest differences of detections
GRAY, GRAY_SHARE = 2, 1e-3  # levels of 255, and the fraction of pixels that may differ by more


class Result(NamedTuple):
    """One optimizer step, on the host."""

    losses: Tensor  # (P,)
    grad_norm: float
    changes: list[Tensor]  # of each weight tensor, float64


def compare_steps(options: argparse.Namespace) -> Iterator[str]:
    """A line of figures for each model and optimizer. SystemExit if a step on the device is not the host's."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    differing = []
    for model in options.models:
        for optimizer in options.optimizers:
            expected = take_step_on("cpu", options, model, optimizer)
            with other_arithmetic(options.device):
                found = take_step_on(options.device, options, model, optimizer)
            errors = differences(expected, found)
            what = f"{model} {optimizer}"
            text = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
            yield f"{what}: relative differences from the CPU: {text}"
            differing += [f"{what}: {name}" for name in excessive(errors, optimizer)]
    if differing:
        sys.exit(f"differs too much from the CPU: {'; '.join(differing)}")


def other_arithmetic(device: str) -> AbstractContextManager:
    return torch.backends.mkldnn.flags(enabled=False) if device == "cpu" else nullcontext()


def take_step_on(device: str, options: argparse.Namespace, model: str, optimizer: str) -> Result:
    """The same step on any device: the weights and images are made on the host."""
    torch.manual_seed(0)
    take_step = build_step(model, device=device, amp="off", optimizer=optimizer)
    for group in take_step.optimizer.param_groups:
        group["lr"] = LEARNING_RATE
    (batch,) = make_batches(1, options.batch_size, options.imgsz, take_step.ctx.device)
    before = weights_of(take_step.model)
    take_step([batch], [options.batch_size], 1)
    (values,) = take_step.reader.pop(leave=0)
    changes = [new - old for new, old in zip(weights_of(take_step.model), before)]
    return Result(torch.tensor(values.losses), values.grad_norm, changes)


def weights_of(model: torch.nn.Module) -> list[Tensor]:
    return [parameter.detach().double().cpu() for parameter in model.parameters()]


def excessive(errors: dict[str, float], optimizer: str) -> list[str]:
    """Those differences that are above their limit, or not a number."""
    limits = {"worst tensor": WORST_TOLERANCE} | (MUON if optimizer == "Muon" else {})
    return [f"{name} {error:.1e}" for name, error in errors.items() if not error <= limits.get(name, TOLERANCE)]


def differences(expected: Result, found: Result) -> dict[str, float]:
    """Relative differences; not a number where a result is not."""
    sizes = torch.stack([change.norm() for change in expected.changes])
    errors = torch.stack([(a - b).norm() for a, b in zip(found.changes, expected.changes)])
    return {
        "losses": float(((found.losses - expected.losses).abs() / expected.losses.abs().clamp(min=1e-6)).max()),
        "gradient norm": abs(found.grad_norm - expected.grad_norm) / expected.grad_norm,
        "weights' change": float(errors.norm() / sizes.norm()),
        "worst tensor": float((errors / sizes.clamp(min=float(sizes.median()))).max()),
    }


def compare_detections(options: argparse.Namespace) -> Iterator[str]:
    """NMS with box voting of a crowded batch, on the device and on the host."""
    from models.postprocess.detections import select_detections

    content = make_input(options.batch_size, 2100, 80, 30)
    device = context_of(options.device).device

    def detect(on: torch.device) -> Detections:
        given = (content[name].to(on) for name in ("boxes_xyxy", "scores"))
        return select_detections(*given, conf_thres=0.001, iou_thres=0.7, max_det=300, box_voting=True)

    expected, found = detect(torch.device("cpu")), detect(device)
    problems = unequal_detections(expected, found)
    yield f"{int(expected.counts.sum())} boxes of {options.batch_size} images after box voting"
    if problems:
        sys.exit("; ".join(problems))


def unequal_detections(expected: Detections, found: Detections) -> list[str]:
    """How two `Detections` differ by more than rounding."""
    if not torch.equal(expected.counts, found.counts.cpu()):
        return [f"counts differ: {expected.counts.tolist()}, on the device {found.counts.tolist()}"]
    moved = float((found.boxes_xyxy.cpu() - expected.boxes_xyxy).abs().max())
    scores = float((found.scores.cpu() - expected.scores).abs().max())
    problems = [f"boxes differ by {moved:.4f} px"] * (not moved <= BOX_PX)
    problems += [f"scores differ by {scores:.1e}"] * (not scores <= SCORE)
    is_same = torch.equal(expected.classes, found.classes.cpu())
    return problems + ["classes differ"] * (not is_same)


def compare_rendering(options: argparse.Namespace) -> Iterator[str]:
    """Images of the torch renderer, operation by operation and compiled, on the device and on the host."""
    from benchmarks.device_render import Scene
    from data.render.device import paint_layers, render_table
    from utils.structures import map_tensors

    scene = Scene(options.imgsz, images=16)
    table, pixels = scene.table(options.batch_size), scene.pixels
    device = context_of(options.device).device

    def render(on: torch.device, paint: Callable) -> Tensor:
        return render_table(map_tensors(table, lambda t: t.to(on)), pixels.to(on), paint).cpu()

    expected = render(torch.device("cpu"), paint_layers)
    painters: dict[str, Callable] = {"operation by operation": paint_layers}
    if device.type != "cpu":
        painters["compiled"] = torch.compile(paint_layers, dynamic=True)
    problems: list[str] = []
    for name, paint in painters.items():
        share = differing_share(expected, render(device, paint))
        yield f"renderer, {name}: {share:.2e} of the values differ from the CPU's by more than {GRAY}"
        problems += [f"renderer, {name}: {share:.2e} differ, {GRAY_SHARE:g} is the limit"] * (share > GRAY_SHARE)
    if problems:
        sys.exit("; ".join(problems))


def differing_share(expected: Tensor, found: Tensor) -> float:
    """The fraction of uint8 values that differ by more than `GRAY`."""
    return float(((found.int() - expected.int()).abs() > GRAY).float().mean())
