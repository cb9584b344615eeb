"""What the checks of training steps measure: differences between devices, and waits of the host."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.speed.training_step import build_step, make_batches
from engine.train.step import TrainStep
from models.modules import unwrap
from tests.helpers.kernel_count import is_indexed_by_mask
from tests.helpers.repository import ROOT

# Largest relative differences of a step in float32 from the CPU's, by optimizer.
LIMITS = {
    "SGD": {"losses": 1e-3, "gradient norm": 1e-3, "change of the weights": 1e-3, "change of the worst tensor": 1e-2},
    # Muon orthogonalizes in bfloat16, and rounding rotates directions of small singular values. Between two kernels of
    # a CPU the change of the weights differs by 0.03, of the worst tensor by 0.4; unrelated changes differ by 1.4.
    "Muon": {"losses": 1e-3, "gradient norm": 1e-3, "change of the weights": 0.1, "change of the worst tensor": 0.8},
}
LEARNING_RATE = 0.01

SYNCHRONIZING = "called a synchronizing CUDA operation"  # torch's message
READING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero", "unique_dim", "equal")
SHOWN_LINES = 3


class StepResult(NamedTuple):
    """A step's losses (P,), the norm of its gradients, and the change of each weight tensor in float64, on the host."""

    losses: Tensor
    grad_norm: float
    changes: list[Tensor]


def take_step_on(device: str, model: str | dict, optimizer: str, *, batch_size: int, imgsz: int) -> StepResult:
    """Takes a step in float32, the same on any device: weights and images are made on the host."""
    torch.manual_seed(0)
    take_step = build_step(model, device=device, amp="off", optimizer=optimizer)
    for group in take_step.optimizer.param_groups:
        group["lr"] = LEARNING_RATE
    before = _weights(take_step)
    take_step(make_batches(1, batch_size, imgsz, take_step.ctx.device), [batch_size], 1)
    (values,) = take_step.reader.pop(leave=0)
    changes = [new - old for new, old in zip(_weights(take_step), before)]
    return StepResult(torch.tensor(values.losses), values.grad_norm, changes)


def _weights(take_step: TrainStep) -> list[Tensor]:
    return [parameter.detach().double().cpu() for parameter in take_step.model.parameters()]


def differences(step: StepResult, expected: StepResult) -> dict[str, float]:
    """Returns the relative differences of a step from the expected one, by the names in `LIMITS`."""
    sizes = torch.stack([change.norm() for change in expected.changes])
    errors = torch.stack([(a - b).norm() for a, b in zip(step.changes, expected.changes)])
    losses = (step.losses - expected.losses).abs() / expected.losses.abs().clamp(min=1e-6)
    return {
        "losses": float(losses.max()),
        "gradient norm": abs(step.grad_norm - expected.grad_norm) / expected.grad_norm,
        "change of the weights": float(errors.norm() / sizes.norm()),
        "change of the worst tensor": float((errors / sizes.clamp(min=float(sizes.median()))).max()),
    }


def state_of(take_step: TrainStep) -> dict[str, Tensor]:
    """Returns copies of every tensor that a step changes, on the host."""
    state = {f"model.{key}": value for key, value in unwrap(take_step.model).state_dict().items()}
    state |= {f"ema.{key}": value for key, value in take_step.ema.module.state_dict().items()}
    for place, rule in enumerate(take_step.optimizer.state_dict()["optimizers"]):
        for number, values in rule["state"].items():
            tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
            state |= {f"optimizer.{place}.{number}.{key}": value for key, value in tensors.items()}
    return {key: value.to("cpu", copy=True) for key, value in state.items()}


@contextmanager
def sync_debug_mode(mode: str) -> Iterator[None]:
    """Lets torch raise an "error" at operations that wait for the GPU."""
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class HostWaits(TorchDispatchMode):
    """Counts the operations for which the host waits for the GPU: by name, and lines of the program, the innermost
    first. What waits in a backward pass appears at the line that started it.

    Copies from memory that is not page-locked count, too. On a CPU, operations count that read a value, or whose
    result's shape depends on values.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._is_on_gpu = device != "cpu"
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.name().removeprefix("aten::")
        if self._is_on_gpu:
            result, waits = _run_watched(function, args, kwargs)
            waits = waits or _copies_from_pageable_memory(name, args, result)
        else:
            result = function(*args, **kwargs)
            waits = name.split(".")[0] in READING or is_indexed_by_mask(name.split(".")[0], args)
        if waits:
            self.places[f"{name} at {_place()}"] += 1
        return result


def _run_watched(function, args: tuple, kwargs: dict) -> tuple[object, bool]:
    """Runs an operation. Returns its result, and whether the host has waited for it."""
    try:
        with sync_debug_mode("error"):
            return function(*args, **kwargs), False
    except RuntimeError as error:
        if SYNCHRONIZING not in str(error):
            raise
    return function(*args, **kwargs), True


def _copies_from_pageable_memory(name: str, args: tuple, result: object) -> bool:
    if name.split(".")[0] not in ("_to_copy", "copy_") or not isinstance(result, Tensor):
        return False
    source = args[0] if name.startswith("_to_copy") else args[1]
    if not isinstance(source, Tensor) or source.device.type != "cpu" or source.numel() == 0:
        return False
    return result.device.type == "cuda" and not source.is_pinned()


def _place() -> str:
    lines = []
    for frame, number in traceback.walk_stack(None):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts and path != Path(__file__):
            lines.append(f"{path.relative_to(ROOT)}:{number}")
    return " from ".join(lines[:SHOWN_LINES])
