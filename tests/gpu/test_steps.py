"""Training steps on a GPU: gradients are the CPU's, the host waits for nothing, an overflow is skipped, replicas and
compiled models compute the same."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.same_bits import have_same_bits
from benchmarks.speed.training_step import build_step, context_of, make_batches, stepper
from engine.train.step import StepValues
from tests.gpu.machine import Figure, Machine
from tests.gpu.step_checks import LIMITS, HostWaits, differences, state_of, sync_debug_mode, take_step_on
from tests.helpers.tiny import TINY_MODEL

pytestmark = pytest.mark.gpu
quick = pytest.mark.quick
HEADS = ("yolov8", "yolov5", "yolo26", "yolox")
WATCHED_STEPS = 4
MOMENTA = ("momentum_buffer", "exp_avg", "exp_avg_sq")
HEADROOM_STEPS = 8  # steps until the loss scale has come down
REPLICA_LOSS = 0.05  # relative: each replica has the batch statistics of half a batch
SEARCHING = 10  # times a plain step, which takes milliseconds; a search for kernels takes seconds
COMPILED = 0.02  # relative difference of losses and gradient norms in float32, on GPUs with TF32 convolutions


@pytest.fixture
def no_tf32() -> Iterator[None]:
    """Convolutions in float32 multiply in float32, as products of matrices do by default."""
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = allowed


@quick
@pytest.mark.usefixtures("no_tf32")
@pytest.mark.parametrize(("head", "optimizer"), [*((head, "SGD") for head in HEADS), ("yolov8", "Muon")])
def test_a_float32_step_is_the_cpus(machine: Machine, figure: Figure, head: str, optimizer: str):
    """On a CPU, it is compared with a step without oneDNN, whose convolutions add in another order."""
    settings = {"batch_size": machine.batch_size, "imgsz": machine.imgsz}
    expected = take_step_on("cpu", machine.heads[head], optimizer, **settings)
    with torch.backends.mkldnn.flags(enabled=False) if machine.device == "cpu" else nullcontext():
        found = differences(take_step_on(machine.device, machine.heads[head], optimizer, **settings), expected)
    limits = LIMITS[optimizer]
    figure(f"{head} {optimizer}", {name: f"{difference:.1e}" for name, difference in found.items()})
    assert not [name for name, difference in found.items() if not difference <= limits[name]]  # nan is not


@quick
@pytest.mark.parametrize(
    ("head", "optimizer", "amp"),
    [
        *((head, "SGD", "auto") for head in HEADS),
        ("yolov8", "Muon", "auto"),
        ("yolov8", "SGD", "half"),  # with a loss scaler
    ],
)
def test_the_host_waits_for_nothing_in_a_step(machine: Machine, head: str, optimizer: str, amp: str):
    amp = machine.half if amp == "half" else amp
    take_step = build_step(machine.heads[head], device=machine.device, amp=amp, optimizer=optimizer)
    batches = make_batches(2, machine.batch_size, machine.imgsz, take_step.ctx.device, ignore=True)
    step = stepper(take_step, batches)
    for _ in range(3):  # the first one creates states and constants
        step()
    with HostWaits(machine.device) as waits:
        for _ in range(WATCHED_STEPS):
            step()
    assert not waits.places


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    """Fills uninitialized memory with nan, so that it cannot pass for zeros."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@quick
@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("optimizer", ["SGD", "Muon"])
def test_a_first_step_that_overflows_is_skipped(machine: Machine, figure: Figure, optimizer: str):
    """A gradient is made infinite; on a GPU, a loss scaler finds it."""
    amp = "off" if machine.device == "cpu" else machine.half
    take_step = build_step(machine.heads["yolov8"], device=machine.device, amp=amp, optimizer=optimizer)
    batches = make_batches(1, machine.batch_size, machine.imgsz, take_step.ctx.device)
    before = state_of(take_step)
    hook = next(take_step.model.parameters()).register_hook(lambda gradient: gradient * float("inf"))
    take_step(batches, [machine.batch_size], 1)
    hook.remove()
    skipped = state_of(take_step)
    for number in range(HEADROOM_STEPS):
        take_step(batches, [machine.batch_size], number + 2)
    last = state_of(take_step)
    first, *later = take_step.reader.pop(leave=0)
    figure(f"{optimizer}: steps taken after the first one", f"{sum(v.finite for v in later)} of {HEADROOM_STEPS}")
    assert not first.finite
    assert any(values.finite for values in later)
    weights = [key for key in before if not key.startswith("optimizer.") and before[key].is_floating_point()]
    assert all(have_same_bits(before[key], skipped[key]) for key in weights)
    assert not any(skipped[key].any() for key in skipped if key.endswith(MOMENTA))
    assert all(value.isfinite().all() for value in last.values())
    assert any(not have_same_bits(before[key], last[key]) for key in weights)


class TimedSteps(NamedTuple):
    """The losses of the first two steps (2, P), the type of the model's maps, and the median seconds of a step."""

    losses: torch.Tensor
    dtype: torch.dtype
    seconds: float


def timed_steps(machine: Machine, *, replicas: int) -> TimedSteps:
    take_step = build_step(
        machine.heads["yolov8"], images=machine.batch_size, ctx=context_of(machine.device, replicas=replicas)
    )
    dtypes = set()
    take_step.criterion.register_forward_pre_hook(lambda _, arguments: dtypes.add(arguments[0][0].dtype))
    batches = make_batches(2, machine.batch_size, machine.imgsz, take_step.ctx.device)
    losses = []
    seconds = []
    for number in range(10 if machine.device == "cpu" else 50):
        began = time.perf_counter()
        take_step([batches[number % 2]], [machine.batch_size], number + 1)
        (values,) = take_step.reader.pop(leave=0)  # waits for the step
        seconds.append(time.perf_counter() - began)
        losses.append(values.losses)
    (dtype,) = dtypes
    return TimedSteps(torch.tensor(losses[:2]), dtype, statistics.median(seconds[2:]))


@quick
def test_two_replicas_on_one_device_compute_the_plain_step(machine: Machine, figure: Figure):
    """DataParallel starts new threads in each step, in which cuDNN must not search for its kernels. With one replica,
    torch would call the model directly."""
    plain = timed_steps(machine, replicas=1)
    try:
        doubled = timed_steps(machine, replicas=2)
    except RuntimeError as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if raised_in.parts[-4:-1] != ("torch", "nn", "parallel"):
            raise
        pytest.skip(f"torch refuses two replicas on one device: {str(error).splitlines()[0]}")
    figure("ms of a plain step, and of one with two replicas", (1000 * plain.seconds, 1000 * doubled.seconds))
    assert doubled.dtype == plain.dtype
    torch.testing.assert_close(doubled.losses, plain.losses, rtol=REPLICA_LOSS, atol=0)
    assert doubled.seconds < SEARCHING * plain.seconds


STEP_KINDS = ("whole", "whole", "whole", "whole", "partial", "whole", "accumulated", "whole")


def steps_of_all_kinds(machine: Machine, *, compiled: bool) -> list[StepValues]:
    """Takes a float32 step of each of `STEP_KINDS`, with a model that compiles fast."""
    size = machine.batch_size
    take_step = build_step(TINY_MODEL, images=size, device=machine.device, amp="off", compile=compiled)
    batches = make_batches(2, size, machine.imgsz, take_step.ctx.device)
    values = []
    for number, kind in enumerate(STEP_KINDS):
        taken = batches if kind == "accumulated" else [batches[number % 2]]
        if kind == "partial":
            taken = [batches[0].shard(0, size // 2)]
        take_step(taken, [len(batch.images) for batch in taken], number + 1)
        values += take_step.reader.pop(leave=0)
    return values


@pytest.fixture
def compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("compiler")
def test_compiled_steps_equal_uncompiled_ones(machine: Machine):
    plain, compiled = (steps_of_all_kinds(machine, compiled=is_on) for is_on in (False, True))
    for kind, expected, values in zip(STEP_KINDS, plain, compiled, strict=True):
        assert [*values.losses, values.grad_norm] == pytest.approx(
            [*expected.losses, expected.grad_norm], rel=COMPILED, abs=1e-4
        ), kind


@pytest.mark.usefixtures("compiler")
def test_a_compiled_step_replays_cuda_graphs_without_waiting(machine: Machine, figure: Figure):
    """Of the forward and of the backward pass."""
    if machine.device == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    take_step = build_step(machine.heads["yolov8"], images=machine.batch_size, device=machine.device, compile=True)
    step = stepper(take_step, make_batches(2, machine.batch_size, machine.imgsz, take_step.ctx.device))
    for _ in range(5):
        step()
    with sync_debug_mode("error"), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(3):
            step()
    graphs = sum(event.count for event in trace.key_averages() if event.key == "cudaGraphLaunch")
    figure("CUDA graphs in three steps", graphs)
    assert graphs >= 6
