"""Checks that results on the device equal the host's: training steps in float32, detections after box voting, rendered
images. Also checks compiled steps against uncompiled ones, a model with two replicas on one device, and a first step
that overflows.

On a CPU (``--device cpu``) steps are compared with steps without oneDNN, whose convolutions add in another order.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.speed.training_step import StepBuilder, build_step, context_of, make_batches, stepper
from benchmarks.speed.turns import seconds_of
from engine.inference.predictor import load
from engine.parallel.step_values import StepValues
from engine.train.step import TrainStep
from tests.helpers.dense_detections import make_detections
from tests.helpers.tiny import write_weights

if TYPE_CHECKING:
    from models.postprocess.detections import Detections

TOLERANCE = 1e-3  # relative differences of losses, of the gradients' norm, and of the norm of the weights' change
WORST_TOLERANCE = 1e-2  # the same for the worst tensor
# Muon orthogonalizes in bfloat16, and rounding rotates directions of small singular values. Between two kernels of a
# CPU the weights' change differs by 0.03, and the worst tensor's by up to 0.4; unrelated changes differ by 1.4.
MUON = {"weights' change": 0.1, "worst tensor": 0.8}
LEARNING_RATE = 0.01
BOX_PX = 1e-2  # largest difference of detected boxes, pixels
SCORE = 1e-5  # largest difference of their scores
GRAY = 2  # levels of 255 by which rendered pixels may differ
GRAY_SHARE = 1e-3  # fraction of pixels that may differ by more


class Result(NamedTuple):
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
            errors = differences(expected, on_device)
            case = f"{model} {optimizer}"
            figures = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
            yield f"{case}: relative differences from the CPU: {figures}"
            differing += [f"{case}: {name}" for name in excessive(errors, optimizer)]
    if differing:
        sys.exit(f"differs too much from the CPU: {'; '.join(differing)}")


def other_arithmetic(device: str) -> AbstractContextManager:
    return torch.backends.mkldnn.flags(enabled=False) if device == "cpu" else nullcontext()


def take_step_on(device: str, options: argparse.Namespace, model: str, optimizer: str, *, build: StepBuilder) -> Result:
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
    return Result(torch.tensor(values.losses), values.grad_norm, changes)


def weights_of(model: torch.nn.Module) -> list[Tensor]:
    return [parameter.detach().double().cpu() for parameter in model.parameters()]


def excessive(errors: dict[str, float], optimizer: str) -> list[str]:
    """Returns the differences that exceed their limit, or are nan."""
    limits = {"worst tensor": WORST_TOLERANCE} | (MUON if optimizer == "Muon" else {})
    return [f"{name} {error:.1e}" for name, error in errors.items() if not error <= limits.get(name, TOLERANCE)]


def differences(expected: Result, found: Result) -> dict[str, float]:
    """Returns relative differences; nan where a result is nan."""
    sizes = torch.stack([change.norm() for change in expected.changes])
    errors = torch.stack([(a - b).norm() for a, b in zip(found.changes, expected.changes)])
    return {
        "losses": float(((found.losses - expected.losses).abs() / expected.losses.abs().clamp(min=1e-6)).max()),
        "gradient norm": abs(found.grad_norm - expected.grad_norm) / expected.grad_norm,
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


def unequal_detections(expected: Detections, found: Detections) -> list[str]:
    """Describes how two `Detections` differ by more than rounding."""
    if not torch.equal(expected.counts, found.counts.cpu()):
        return [f"counts differ: {expected.counts.tolist()}, on the device {found.counts.tolist()}"]
    moved = float((found.boxes_xyxy.cpu() - expected.boxes_xyxy).abs().max())
    scores = float((found.scores.cpu() - expected.scores).abs().max())
    problems = []
    if not moved <= BOX_PX:  # also for nan
        problems.append(f"boxes differ by {moved:.4f} px")
    if not scores <= SCORE:
        problems.append(f"scores differ by {scores:.1e}")
    if not torch.equal(expected.classes, found.classes.cpu()):
        problems.append("classes differ")
    return problems


def compare_rendering(options: argparse.Namespace) -> Iterator[str]:
    """Compares images of the torch renderer, eager and compiled, on the device and on the host."""
    from benchmarks.gpu.profile import Scene
    from data.render.device import paint_layers, render_table
    from utils.batches import map_tensors

    scene = Scene(options.imgsz, images=16)
    table = scene.table(options.batch_size)
    pixels = scene.pixels
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
        if share > GRAY_SHARE:
            problems.append(f"renderer, {name}: {share:.2e} differ, {GRAY_SHARE:g} is the limit")
    if problems:
        sys.exit("; ".join(problems))


def differing_share(expected: Tensor, found: Tensor) -> float:
    """Returns the fraction of uint8 values that differ by more than `GRAY`."""
    return float(((found.int() - expected.int()).abs() > GRAY).float().mean())


WHOLE = "whole"
ACCUMULATED = "accumulated"
PARTIAL = "partial"
COURSE = (WHOLE, WHOLE, WHOLE, WHOLE, PARTIAL, WHOLE, ACCUMULATED, WHOLE)
COMPILED_TOLERANCE = 0.02  # relative, of losses and gradient norms in float32 (on GPUs with TF32 convolutions)


def compare_compiled(options: argparse.Namespace) -> Iterator[str]:
    """Yields lines of figures. Raises SystemExit if a check fails."""
    plain, compiled = (taken(options, is_compiled) for is_compiled in (False, True))
    for kind, a, b in zip(COURSE, plain, compiled):
        pairs = [*zip(a.losses, b.losses), (a.grad_norm, b.grad_norm)]
        if any(abs(x - y) > COMPILED_TOLERANCE * abs(x) + 1e-4 for x, y in pairs):
            sys.exit(
                f"a step of kind {kind!r} differs, compiled: {b.losses} {b.grad_norm}, not: {a.losses} {a.grad_norm}"
            )
    yield f"{len(COURSE)} steps, also partial and accumulated ones, within {COMPILED_TOLERANCE:.0%} of uncompiled ones"
    before = yield from time_steps(options, False)
    after = yield from time_steps(options, True)
    yield f"step {1000 * before:.2f} ms, compiled {1000 * after:.2f} ms: {before / after:.2f} times as fast"


def time_steps(
    options: argparse.Namespace, is_compiled: bool, *, build: StepBuilder = build_step
) -> Generator[str, None, float]:
    """Returns seconds per step, in the autocast type of training."""
    take_step = step_of(options, is_compiled, amp="auto", build=build)
    device = take_step.ctx.device
    step = stepper(take_step, make_batches(2, options.batch_size, options.imgsz, device))
    for _ in range(5):
        step()
    if is_compiled and device.type == "cuda":
        yield check_graphs(step)
    return seconds_of(step, 10, device.type)


def step_of(options: argparse.Namespace, is_compiled: bool, *, amp: str, build: StepBuilder = build_step) -> TrainStep:
    return build(options.model, images=options.batch_size, device=options.device, amp=amp, compile=is_compiled)


def taken(options: argparse.Namespace, is_compiled: bool) -> list[StepValues]:
    """Returns the results of the steps of `COURSE`."""
    take_step = step_of(options, is_compiled, amp="off")
    whole = make_batches(2, options.batch_size, options.imgsz, take_step.ctx.device)
    values = []
    for number, kind in enumerate(COURSE):
        batches = whole if kind is ACCUMULATED else [whole[number % 2]]
        if kind is PARTIAL:
            batches = [whole[0].shard(0, options.batch_size // 2)]
        take_step(batches, [len(batch.images) for batch in batches], number + 1)
        values += take_step.reader.pop(leave=0)
    return values


def check_graphs(step: Callable[[], None]) -> str:
    """Checks that three steps launch CUDA graphs without a host sync."""
    torch.cuda.set_sync_debug_mode("error")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(3):
            step()
    torch.cuda.set_sync_debug_mode("default")
    launches = sum(event.count for event in trace.key_averages() if event.key == "cudaGraphLaunch")
    if launches < 6:
        sys.exit(f"{launches} CUDA graphs launched in three steps; a forward and a backward pass each make six")
    return f"{launches / 3:g} CUDA graphs a step, no host sync"


MOMENTA = ("momentum_buffer", "exp_avg", "exp_avg_sq")
MANY_STEPS = 50
MANY_CALLS = 200
SAME_LOSS = 0.05  # relative; each replica has the batch statistics of half a batch
SEARCHING = 10  # times a plain step, which takes milliseconds; a search for kernels takes seconds
HEADROOM_STEPS = 8  # steps until a far too high loss scale has come down


class StepSeries(NamedTuple):
    """Results of a few steps with the model in one or several replicas."""

    losses: Tensor  # (2, P), of the first two steps
    dtype: torch.dtype  # dtype of the model's maps
    seconds: float  # seconds per step
    grown_mb: float  # growth of the process's memory from the 8th step to the last


def data_parallel(
    options: argparse.Namespace, *, build: StepBuilder = build_step, max_ratio: float = SEARCHING
) -> Iterator[str]:
    """Compares plain steps with DataParallel steps that use two replicas on one device: with a single replica, torch
    would call the model directly, without threads. torch may reject two replicas on one device.

    Raises SystemExit if losses or types differ, or if a step takes more than ``max_ratio`` times as long: with new
    threads in each step, cuDNN would search for its kernels again and again.
    """
    plain = series_of_steps(options, replicas=1, build=build)
    yield described_series("plain", plain)
    try:
        twice = series_of_steps(options, replicas=2, build=build)
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
    if ratio > max_ratio:
        problems.append(f"a step takes {ratio:.1f} times as long as a plain one")
    if problems:
        sys.exit(f"the model twice on one device: {'; '.join(problems)}")


def is_refused_by_torch(error: RuntimeError) -> bool:
    """Returns whether ``error`` comes from torch's replication, not from code that runs in the replicas."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    return Path(raised_in).parts[-4:-1] == ("torch", "nn", "parallel")


def series_of_steps(options: argparse.Namespace, *, replicas: int, build: StepBuilder) -> StepSeries:
    take_step = build(options.model, images=options.batch_size, ctx=context_of(options.device, replicas=replicas))
    dtypes = set()
    take_step.criterion.register_forward_pre_hook(lambda _, arguments: dtypes.add(arguments[0][0].dtype))
    batches = make_batches(2, options.batch_size, options.imgsz, take_step.ctx.device)
    losses = []
    seconds = []
    resident = []
    for number in range(10 if options.device == "cpu" else MANY_STEPS):
        began = time.perf_counter()
        take_step([batches[number % 2]], [options.batch_size], number + 1)
        (values,) = take_step.reader.pop(leave=0)  # waits for the step
        seconds.append(time.perf_counter() - began)
        losses.append(values.losses)
        resident.append(resident_mb())
    (dtype,) = dtypes
    return StepSeries(torch.tensor(losses[:2]), dtype, statistics.median(seconds[2:]), resident[-1] - resident[7])


def described_series(name: str, series: StepSeries) -> str:
    losses = [[round(value, 3) for value in step] for step in series.losses.tolist()]
    return (
        f"{name}: losses of two steps {losses}, maps {series.dtype}, {1000 * series.seconds:.1f} ms a step, "
        f"{series.grown_mb:+.0f} MB after the 8th step"
    )


def resident_mb() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def predictor_threads(options: argparse.Namespace) -> Iterator[str]:
    """Measures the time and memory growth of 200 calls of a `Predictor`: all from one thread, then each from a new
    thread."""
    with tempfile.TemporaryDirectory() as folder:
        predictor = load(write_weights(Path(folder) / "best.pt", ("a", "b")), device=options.device, conf=0.0)
    image = np.random.default_rng(0).integers(0, 256, (options.imgsz, options.imgsz, 3), np.uint8)
    expected = predictor(image, color="rgb")[0].boxes.data
    seconds = {}
    for name, start in {"one thread": lambda call: call(), "a thread each": in_a_thread}.items():
        before = resident_mb()
        began = time.perf_counter()
        results: list[torch.Tensor] = []
        for _ in range(MANY_CALLS):
            start(lambda: results.append(predictor(image, color="rgb")[0].boxes.data))  # noqa: B023
        seconds[name] = (time.perf_counter() - began) / MANY_CALLS
        yield f"{name}: {seconds[name] * 1e3:.1f} ms a call, {resident_mb() - before:+.0f} MB in {MANY_CALLS} calls"
        if not all(torch.equal(boxes, expected) for boxes in results):
            sys.exit(f"{name}: detections differ")
    # On a CPU each new thread starts threads of OpenMP, which takes milliseconds.
    if options.device != "cpu" and seconds["a thread each"] > 2 * seconds["one thread"]:
        sys.exit("calls from new threads take more than twice as long")


def in_a_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def overflow(options: argparse.Namespace) -> Iterator[str]:
    """Checks that a first step that overflows does not change weights and averaged weights, leaves momenta at zero, and
    does not stop training.

    The step overflows because of a far too high loss scale in float16; on a CPU a gradient is made infinite.
    """
    # Fills uninitialized memory with nan, so that it cannot pass for zeros.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    wrong = []
    for optimizer in options.optimizers:
        take_step = build_step(
            options.model, device=options.device, amp="off" if options.device == "cpu" else "fp16", optimizer=optimizer
        )
        (batch,) = make_batches(1, options.batch_size, options.imgsz, take_step.ctx.device)
        before = values_of(take_step)
        with overflowing(take_step):
            take_step([batch], [options.batch_size], 1)
        skipped = values_of(take_step)
        momenta = momenta_of(take_step)
        for number in range(HEADROOM_STEPS):
            take_step([batch], [options.batch_size], number + 2)
        after = values_of(take_step)
        steps = take_step.reader.pop(leave=0)
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
    """Takes steps that overflow; on a GPU each lowers the loss scale."""
    if take_step.ctx.device.type == "cuda":
        take_step.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, backoff_factor=2.0**-12)
        yield
        return
    hook = next(take_step.model.parameters()).register_hook(lambda gradient: gradient * float("inf"))
    yield
    hook.remove()


def values_of(take_step: TrainStep) -> Tensor:
    """Returns all floating-point values of the model and of its average, concatenated on the host."""
    states = [module.state_dict() for module in (take_step.model, take_step.ema.module)]
    values = [value for state in states for value in state.values() if value.is_floating_point()]
    return torch.cat([value.reshape(-1) for value in values]).cpu()


def momenta_of(take_step: TrainStep) -> Tensor:
    """Returns the optimizer's momenta, concatenated in the same way; empty if there are none yet."""
    rules = take_step.optimizer.state_dict()["optimizers"]
    states = [state for rule in rules for state in rule["state"].values()]
    values = [state[name].reshape(-1) for state in states for name in MOMENTA if name in state]
    return torch.cat(values).cpu() if values else torch.zeros(0)
