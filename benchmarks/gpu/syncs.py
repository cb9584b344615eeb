"""Finds every line at which the host waits for the device in a step and in the training loop, and counts the waits.

On a GPU, torch warns about each operation that waits (`torch.cuda.set_sync_debug_mode`), with the Python stack of the
warning. Waits in the backward pass appear at the line that started it. Therefore the operations are examined a second
time, one by one, for the names of waiting operations and for copies from memory that is not page-locked, which block
the host. On a CPU, the counted operations are those that read a value or whose result's shape depends on values.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.command import ROOT
from benchmarks.speed.training_step import build_step, make_batches, stepper
from engine.train.step import TrainStep

WARM = 3  # steps before the observed ones; the first step creates states and constants
STEPS = 4  # number of steps that a watcher observes
WAITING = "called a synchronizing CUDA operation"
READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero", "unique_dim", "equal")
SHOWN_CALLERS = 2


def waits_of_steps(
    *, device: str, models: Sequence[str], optimizers: Sequence[str], batch_size: int, imgsz: int
) -> Iterator[str]:
    """Yields how often steps of each model and optimizer wait, and where."""
    cases = [(model, optimizer, "auto") for model in models for optimizer in optimizers]
    if device != "cpu":
        cases.append((models[0], optimizers[0], "fp16"))  # with a loss scaler
    for model, optimizer, amp in cases:
        take_step = build_step(model, device=device, amp=amp, optimizer=optimizer)
        step = stepper(take_step, make_batches(2, batch_size, imgsz, take_step.ctx.device, ignore=True))
        for _ in range(WARM):
            step()
        for counted, watch in watchers(device).items():
            places: Counter[str] = Counter()
            with watch(places):
                for _ in range(STEPS):
                    step()
            yield from describe(f"{model} {optimizer}{'' if amp == 'auto' else f' {amp}'}", counted, places)


def waits_of_loop(*, device: str, data: str, imgsz: int, batch_size: int, model: str = "yolov8n") -> Iterator[str]:
    """Yields the same about a training by train.py in this process: loader, prefetcher, step and the rest of the loop.

    Each watcher observes the training from the beginning of a step to that of the step `STEPS` later.
    """
    import train

    places: dict[str, Counter[str]] = {counted: Counter() for counted in watchers(device)}
    starts = {WARM + STEPS * n: watch(places[counted]) for n, (counted, watch) in enumerate(watchers(device).items())}
    end = WARM + STEPS * len(starts)
    begun = itertools.count()
    observing = ExitStack()
    take_step = TrainStep.__call__

    def take_observed_step(self: TrainStep, *args, **kwargs) -> None:
        number = next(begun)
        if number in starts or number == end:
            observing.close()
        if number in starts:
            observing.enter_context(starts[number])
        take_step(self, *args, **kwargs)

    with tempfile.TemporaryDirectory() as folder, observing, patch.object(TrainStep, "__call__", take_observed_step):
        train.main(
            ["--data", data, "--model", model, "--imgsz", str(imgsz), "--batch-size", str(batch_size), "--epochs", "1",
             "--device", device, "--workers", "2", "--noplots", "--val-every", "0", "--project", folder,
             "--cache-dir", folder]
        )  # fmt: skip
    steps = next(begun)
    if steps <= end:
        yield f"! an epoch of {steps} steps is too short to look at"
    for counted, found in places.items():
        yield from describe("a training", counted, found)


def describe(case: str, counted: str, places: Counter[str]) -> Iterator[str]:
    yield f"{case}: {places.total() / STEPS:g} {counted} a step"
    for line, number in places.most_common():
        yield f"{case}: {number / STEPS:g} a step: {line}"
    if places:
        yield f"! the host waits: {case}"


def watchers(device: str) -> dict[str, Callable[[Counter[str]], AbstractContextManager]]:
    """Returns, by what they count, context managers that count in a `Counter` by place."""
    if device == "cpu":
        return {"reads of values": ValueReads}
    return {"waits": warned_waits, "waiting operations, one by one": WaitingOperations}


@contextmanager
def sync_debug_mode(mode: str) -> Iterator[None]:
    """Lets torch "warn" of operations that wait for the device, or raise an "error"."""
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def warned_waits(places: Counter[str]) -> Iterator[None]:
    """Counts torch's warnings of operations that wait."""
    with warnings.catch_warnings(), sync_debug_mode("warn"):
        warnings.simplefilter("always")
        shown = warnings.showwarning

        def note(message, *others, **named) -> None:
            if WAITING in str(message):
                places[place()] += 1
            else:
                shown(message, *others, **named)

        warnings.showwarning = note
        yield


class WaitingOperations(TorchDispatchMode):
    """Counts operations that wait on a GPU, by name and place."""

    def __init__(self, places: Counter[str]) -> None:
        super().__init__()
        self.places = places

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::")
        try:
            with sync_debug_mode("error"):
                result = function(*args, **kwargs or {})
        except RuntimeError as error:
            if WAITING not in str(error):
                raise
            self.places[f"{name} at {place()}"] += 1
            return function(*args, **kwargs or {})
        if copies_from_pageable_memory(name, args, result):
            self.places[f"{name} from memory that is not page-locked at {place()}"] += 1
        return result


class ValueReads(TorchDispatchMode):
    """Counts operations on a CPU that would wait on a GPU, by name and place."""

    def __init__(self, places: Counter[str]) -> None:
        super().__init__()
        self.places = places

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::")
        if name.split(".")[0] in READS or is_masked(name, args):
            self.places[f"{name} at {place()}"] += 1
        return function(*args, **kwargs or {})


def is_masked(name: str, args: tuple) -> bool:
    """Returns whether an operation indexes by a mask."""
    if name.split(".")[0] not in ("index", "index_put", "index_put_"):
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def copies_from_pageable_memory(name: str, args: tuple, result: object) -> bool:
    if name.split(".")[0] not in ("_to_copy", "copy_") or not isinstance(result, torch.Tensor):
        return False
    source = args[0] if name.startswith("_to_copy") else args[1]
    if not isinstance(source, torch.Tensor) or source.device.type != "cpu" or source.numel() == 0:
        return False
    return result.device.type == "cuda" and not source.is_pinned()


def place() -> str:
    """Returns the innermost line of this program on the stack, and the lines that called it."""
    lines = []
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts:
            module = path.relative_to(ROOT)
            if module.parts[0] != "benchmarks":
                lines.append(f"{module}:{frame.f_lineno}")
        frame = frame.f_back
    if not lines:
        return "no line of the program"
    return " from ".join(lines[: SHOWN_CALLERS + 1])
