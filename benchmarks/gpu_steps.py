"""Steps in situations that only occur on a GPU: a model that is on it twice, and float16 with a loss scale."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from benchmarks.training_step import build_step, make_batches
from engine.train.step import TrainStep

MOMENTA = ("momentum_buffer", "exp_avg", "exp_avg_sq")
HEADROOM_STEPS = 8  # until a loss scale that is far too high has come down


def data_parallel(options: argparse.Namespace) -> Iterator[str]:
    """Two steps through DataParallel are two plain steps; with the model twice on one device, where torch lets it be
    there, but for batch statistics, which are then of halves."""
    plain, dtype = losses(options, lambda model: model)
    wrapped, _ = losses(options, wrap_once(options.device))
    yield f"losses of two steps: plain {rounded(plain)}, DataParallel {rounded(wrapped)}"
    if not torch.allclose(plain, wrapped, rtol=1e-2):
        sys.exit("the losses differ by more than 1 %")
    try:
        twice, dtype_twice = losses(options, lambda model: model, replicas=2)
    except RuntimeError as error:
        yield f"the model twice on one device: {str(error).splitlines()[0]}"
        return
    yield f"the model twice on one device: {rounded(twice)}; maps {dtype_twice}, of the plain model {dtype}"
    if dtype_twice != dtype:
        sys.exit("the model twice on one device: the replicas compute in another type")
    if not torch.allclose(plain, twice, rtol=0.2):
        sys.exit("the model twice on one device: losses differ by more than 20 %")


def wrap_once(device: str) -> Callable[[nn.Module], nn.Module]:
    return lambda model: nn.DataParallel(model, None if device == "cpu" else [int(device)])


def rounded(values: Tensor) -> list[list[float]]:
    return [[round(value, 3) for value in row] for row in values.tolist()]


def losses(
    options: argparse.Namespace, wrap: Callable[[nn.Module], nn.Module], replicas: int = 1
) -> tuple[Tensor, torch.dtype]:
    """(2, P) of two steps, and the type of the maps."""
    take_step = build_step(options.model, device=options.device, replicas=replicas)
    take_step.model = wrap(take_step.model)
    criterion, dtypes = take_step.criterion, []

    def noting(raw: Sequence[Tensor], *others):
        dtypes.append(raw[0].dtype)
        return criterion(raw, *others)

    take_step.criterion = noting
    for number, batch in enumerate(make_batches(2, options.batch_size, options.imgsz, take_step.ctx.device)):
        take_step([batch], [options.batch_size], number + 1)
    return torch.tensor([values.losses for values in take_step.reader.pop(leave=0)]), dtypes[-1]


def overflow(options: argparse.Namespace) -> Iterator[str]:
    """A first step that overflows (float16 with far too high a loss scale; on a CPU a gradient that is made infinite)
    leaves weights and averaged weights alone and momenta at zero, and training goes on."""
    # Memory that has not been written to is then filled with NaN, so that it cannot pass for zeros.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    wrong = []
    for optimizer in options.optimizers:
        take_step = build_step(
            options.model, device=options.device, amp="off" if options.device == "cpu" else "fp16", optimizer=optimizer
        )
        (batch,) = make_batches(1, options.batch_size, options.imgsz, take_step.ctx.device)
        before = weights_of(take_step)
        with overflowing(take_step):
            take_step([batch], [options.batch_size], 1)
        skipped, momenta = weights_of(take_step), momenta_of(take_step)
        for number in range(HEADROOM_STEPS):
            take_step([batch], [options.batch_size], number + 2)
        after, steps = weights_of(take_step), take_step.reader.pop(leave=0)
        taken = sum(values.finite for values in steps)
        yield f"{options.model} {optimizer}: {taken} of {len(steps)} steps taken"
        checks = {
            "the first step was not skipped": not steps[0].finite,
            "the skipped step changed weights": torch.equal(before, skipped),
            "momenta are not zero after the skipped step": bool((momenta == 0).all()),
            "no later step was taken": taken > 0,
            "the steps after it left weights that are not finite": bool(after.isfinite().all()),
            "the steps after it left momenta that are not finite": bool(momenta_of(take_step).isfinite().all()),
            "the steps after it changed nothing": not torch.equal(before, after),
        }
        wrong += [f"{optimizer}: {text}" for text, is_right in checks.items() if not is_right]
    if wrong:
        sys.exit("; ".join(wrong))


@contextmanager
def overflowing(take_step: TrainStep) -> Iterator[None]:
    """Steps overflow; on a GPU the loss scale then comes down by and by."""
    if take_step.ctx.device.type == "cuda":
        take_step.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, backoff_factor=2.0**-12)
        yield
        return
    hook = next(take_step.model.parameters()).register_hook(lambda gradient: gradient * float("inf"))
    yield
    hook.remove()


def weights_of(take_step: TrainStep) -> Tensor:
    """All floating-point values of the model and of its average, concatenated on the host."""
    states = [module.state_dict() for module in (take_step.model, take_step.ema.module)]
    values = [value for state in states for value in state.values() if value.is_floating_point()]
    return torch.cat([value.reshape(-1) for value in values]).cpu()


def momenta_of(take_step: TrainStep) -> Tensor:
    """The optimizer's momenta, concatenated likewise; empty if there are none yet."""
    rules = take_step.optimizer.state_dict()["optimizers"]
    states = [state for rule in rules for state in rule["state"].values()]
    values = [state[name].reshape(-1) for state in states for name in MOMENTA if name in state]
    return torch.cat(values).cpu() if values else torch.zeros(0)
