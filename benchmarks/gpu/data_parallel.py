"""Checks steps of a model with two replicas on one device, which DataParallel runs in two threads."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.speed.training_step import build_step, context_of, make_batches

SAME_LOSS = 0.05  # relative; each replica has the batch statistics of half a batch
SEARCHING = 10  # times a plain step, which takes milliseconds; a search for kernels takes seconds
TWICE = "the model twice on one device"


def compare_replicas(*, device: str, batch_size: int, imgsz: int, model: str = "yolov8n") -> Iterator[str]:
    """Compares plain steps with DataParallel steps that use two replicas on one device: with a single replica, torch
    would call the model directly, without threads. torch may reject two replicas on one device.

    torch starts new threads in each step, in which cuDNN must not search for its kernels: a step with such a search
    takes more than `SEARCHING` times as long.
    """
    results = []
    for name, replicas in (("plain", 1), (TWICE, 2)):
        try:
            losses, dtype, seconds = take_steps(device, batch_size, imgsz, model, replicas=replicas)
        except RuntimeError as error:
            raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
            if replicas == 1 or raised_in.parts[-4:-1] != ("torch", "nn", "parallel"):
                raise  # not by torch's replication
            yield f"{TWICE}: refused, {str(error).splitlines()[0]}"
            return
        shown = [[round(value, 3) for value in step] for step in losses.tolist()]
        yield f"{name}: losses of two steps {shown}, maps {dtype}, {1000 * seconds:.1f} ms a step"
        results.append((losses, dtype, seconds))
    (plain_losses, plain_dtype, plain_seconds), (losses, dtype, seconds) = results
    ratio = seconds / plain_seconds
    yield f"{TWICE}: {ratio:.2f} times the time of a plain step"
    if dtype != plain_dtype:
        yield f"! {TWICE}: the replicas compute in {dtype}, the plain model in {plain_dtype}"
    if not torch.allclose(plain_losses, losses, rtol=SAME_LOSS):
        yield f"! {TWICE}: losses differ by more than {SAME_LOSS:.0%}"
    if ratio > SEARCHING:
        yield f"! {TWICE}: a step takes {ratio:.1f} times as long as a plain one"


def take_steps(
    device: str, batch_size: int, imgsz: int, model: str, *, replicas: int
) -> tuple[Tensor, torch.dtype, float]:
    """Returns the losses of the first two steps (2, P), the type of the model's maps, and the seconds of a step."""
    take_step = build_step(model, images=batch_size, ctx=context_of(device, replicas=replicas))
    dtypes = set()
    take_step.criterion.register_forward_pre_hook(lambda _, arguments: dtypes.add(arguments[0][0].dtype))
    batches = make_batches(2, batch_size, imgsz, take_step.ctx.device)
    losses = []
    seconds = []
    for number in range(10 if device == "cpu" else 50):
        began = time.perf_counter()
        take_step([batches[number % 2]], [batch_size], number + 1)
        (values,) = take_step.reader.pop(leave=0)  # waits for the step
        seconds.append(time.perf_counter() - began)
        losses.append(values.losses)
    (dtype,) = dtypes
    return torch.tensor(losses[:2]), dtype, statistics.median(seconds[2:])
