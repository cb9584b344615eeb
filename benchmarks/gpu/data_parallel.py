"""Checks steps of a model with two replicas on one device, which DataParallel runs in two threads."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.speed.training_step import build_step, context_of, make_batches

MANY_STEPS = 50
SAME_LOSS = 0.05  # relative; each replica has the batch statistics of half a batch
SEARCHING = 10  # times a plain step, which takes milliseconds; a search for kernels takes seconds


class StepSeries(NamedTuple):
    """Results of a few steps with the model in one or several replicas."""

    losses: Tensor  # (2, P), of the first two steps
    dtype: torch.dtype  # dtype of the model's maps
    seconds: float  # seconds per step


def data_parallel(options: argparse.Namespace) -> Iterator[str]:
    """Compares plain steps with DataParallel steps that use two replicas on one device: with a single replica, torch
    would call the model directly, without threads. torch may reject two replicas on one device.

    Raises SystemExit if losses or types differ, or if a step takes more than `SEARCHING` times as long: torch starts
    new threads in each step, in which cuDNN must not search for its kernels.
    """
    plain = series_of_steps(options, replicas=1)
    yield described_series("plain", plain)
    try:
        twice = series_of_steps(options, replicas=2)
    except RuntimeError as error:
        if not is_refused_by_torch(error):
            raise
        yield f"the model twice on one device: refused, {str(error).splitlines()[0]}"
        return
    yield described_series("the model twice on one device", twice)
    ratio = twice.seconds / plain.seconds
    yield f"the model twice on one device: {ratio:.2f} times the time of a plain step"
    problems = []
    if twice.dtype != plain.dtype:
        problems.append(f"the replicas compute in {twice.dtype}, the plain model in {plain.dtype}")
    if not torch.allclose(plain.losses, twice.losses, rtol=SAME_LOSS):
        problems.append(f"losses differ by more than {SAME_LOSS:.0%}")
    if ratio > SEARCHING:
        problems.append(f"a step takes {ratio:.1f} times as long as a plain one")
    if problems:
        sys.exit(f"the model twice on one device: {'; '.join(problems)}")


def is_refused_by_torch(error: RuntimeError) -> bool:
    """Returns whether ``error`` comes from torch's replication, not from code that runs in the replicas."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    return Path(raised_in).parts[-4:-1] == ("torch", "nn", "parallel")


def series_of_steps(options: argparse.Namespace, *, replicas: int) -> StepSeries:
    take_step = build_step(options.model, images=options.batch_size, ctx=context_of(options.device, replicas=replicas))
    dtypes = set()
    take_step.criterion.register_forward_pre_hook(lambda _, arguments: dtypes.add(arguments[0][0].dtype))
    batches = make_batches(2, options.batch_size, options.imgsz, take_step.ctx.device)
    losses = []
    seconds = []
    for number in range(10 if options.device == "cpu" else MANY_STEPS):
        began = time.perf_counter()
        take_step([batches[number % 2]], [options.batch_size], number + 1)
        (values,) = take_step.reader.pop(leave=0)  # waits for the step
        seconds.append(time.perf_counter() - began)
        losses.append(values.losses)
    (dtype,) = dtypes
    return StepSeries(torch.tensor(losses[:2]), dtype, statistics.median(seconds[2:]))


def described_series(name: str, series: StepSeries) -> str:
    losses = [[round(value, 3) for value in step] for step in series.losses.tolist()]
    return f"{name}: losses of two steps {losses}, maps {series.dtype}, {1000 * series.seconds:.1f} ms a step"
