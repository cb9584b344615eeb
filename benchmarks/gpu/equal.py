"""Checks that training steps in float32 on the device equal the CPU's.

On a CPU they are compared with steps without oneDNN, whose convolutions add in another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import product

import torch
from torch import Tensor

from benchmarks.speed.training_step import build_step, make_batches

# Relative differences: of losses, of the gradients' norm, of the norm of the weights' change, and of the change of the
# worst tensor.
LIMITS = {"losses": 1e-3, "gradient norm": 1e-3, "weights' change": 1e-3, "worst tensor": 1e-2}
# Muon orthogonalizes in bfloat16, and rounding rotates directions of small singular values. Between two kernels of a
# CPU the weights' change differs by 0.03, and the worst tensor's by up to 0.4; unrelated changes differ by 1.4.
MUON_LIMITS = LIMITS | {"weights' change": 0.1, "worst tensor": 0.8}
LEARNING_RATE = 0.01


def compare_steps(
    *, device: str, models: Sequence[str], optimizers: Sequence[str], batch_size: int, imgsz: int
) -> Iterator[str]:
    """Yields the differences of one step of each model and optimizer from the CPU's."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for model, optimizer in product(models, optimizers):
        losses, grad_norm, changes = take_step_on("cpu", model, optimizer, batch_size, imgsz)
        with torch.backends.mkldnn.flags(enabled=False) if device == "cpu" else nullcontext():
            device_losses, device_norm, device_changes = take_step_on(device, model, optimizer, batch_size, imgsz)
        sizes = torch.stack([change.norm() for change in changes])
        errors = torch.stack([(a - b).norm() for a, b in zip(device_changes, changes)])
        differences = {
            "losses": float(((device_losses - losses).abs() / losses.abs().clamp(min=1e-6)).max()),
            "gradient norm": abs(device_norm - grad_norm) / grad_norm,
            "weights' change": float(errors.norm() / sizes.norm()),
            "worst tensor": float((errors / sizes.clamp(min=float(sizes.median()))).max()),
        }
        figures = ", ".join(f"{name} {difference:.1e}" for name, difference in differences.items())
        yield f"{model} {optimizer}: relative differences from the CPU: {figures}"
        limits = MUON_LIMITS if optimizer == "Muon" else LIMITS
        for name, difference in differences.items():
            if not difference <= limits[name]:  # also nan
                yield f"! {model} {optimizer} differs too much from the CPU: {name} {difference:.1e}"


def take_step_on(
    device: str, model: str, optimizer: str, batch_size: int, imgsz: int
) -> tuple[Tensor, float, list[Tensor]]:
    """Takes the same step on any device, with weights and images made on the host. Returns, on the host, the losses
    (P,), the norm of the gradients, and the change of each weight tensor in float64."""
    torch.manual_seed(0)
    take_step = build_step(model, device=device, amp="off", optimizer=optimizer)
    for group in take_step.optimizer.param_groups:
        group["lr"] = LEARNING_RATE

    def weights() -> list[Tensor]:
        return [parameter.detach().double().cpu() for parameter in take_step.model.parameters()]

    before = weights()
    take_step(make_batches(1, batch_size, imgsz, take_step.ctx.device), [batch_size], 1)
    (values,) = take_step.reader.pop(leave=0)
    return torch.tensor(values.losses), values.grad_norm, [new - old for new, old in zip(weights(), before)]
