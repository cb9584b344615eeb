"""``--batch-size -1``: the search in simulated memories, and the measured step, which must not change the run."""

from __future__ import annotations

import gc
import itertools
import random
import re
import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml

import engine.assembly.batch_size
import engine.assembly.run_checks
import train
from engine.assembly.batch_size import (
    BOXES,
    MAX_SHARD_IMAGES,
    BatchSearch,
    CudaMemory,
    batch_that_fits,
    check_batch_search,
    largest_that_fits,
    prepare_step,
)
from engine.assembly.starting_model import freeze_layers
from engine.optim.build import SHORT_RUN
from engine.optim.schedule import StepPlan, step_plan
from engine.run.run import RunSettings
from models.detector import build_detector
from tests.helpers.messages import refused
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import SMALL
from tests.helpers.tiny import TINY_ANCHOR_MODEL, TINY_MODEL, write_dataset, write_model
from utils.config.settings import Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext
from utils.files.torch_file import read_checkpoint
from utils.process.entrypoint import run_main

CPU = DistributedContext.single("cpu")
SIZES = [*range(1, 16), *range(16, MAX_SHARD_IMAGES + 1, 8)]
GIB = 2**30


def line(base: float, each: float, at: int = 0, more: float = 0.0) -> Callable[[int], int]:
    """Memory that jumps by ``more`` at ``at`` images, as with another kernel."""
    return lambda n: int((base + each * n + (more if n >= at else 0)) * GIB)


@pytest.mark.parametrize("runs_out_at", [None, 80.0, 71.0, 60.0])
@pytest.mark.parametrize("peak", [
    line(0.3, 0.25), line(2.0, 0.01), line(1.0, 3.3), line(0.0, 70.0), line(69.9, 0.2), line(5.0, 0.0),
    line(1, 0.5, 4, 10.0), line(1, 0.5, 100, 12.0), line(99.0, 0.1),
    lambda n: int((1 + 0.02 * n**1.5) * GIB), lambda n: int((1 + 6 * n**0.5) * GIB),
])  # fmt: skip
def test_the_largest_batch_that_fits_is_found_and_measured(peak, runs_out_at):
    limit = 70 * GIB
    measured = {}

    def peak_bytes_of(number: int) -> int | None:
        assert number not in measured
        measured[number] = peak(number)
        return None if runs_out_at is not None and peak(number) > runs_out_at * GIB else peak(number)

    most = min(limit, limit if runs_out_at is None else int(runs_out_at * GIB))
    expected = max((n for n in SIZES if peak(n) <= most), default=0)
    assert largest_that_fits(peak_bytes_of, limit) == expected
    assert not expected or measured[expected] <= most
    assert len(measured) <= 12


class SavedTensor:
    """A tensor that the backward pass needs."""

    def __init__(self, tensor: torch.Tensor, memory: FakeCudaMemory) -> None:
        self.tensor = tensor
        memory.kept += tensor.nbytes
        memory.peaks[-1] = max(memory.peaks[-1], memory.kept)
        weakref.finalize(self, memory.give_back, tensor.nbytes)


class FakeCudaMemory:
    """Stands in for `CudaMemory`: counts the bytes that are saved for the backward pass at the same time."""

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        self.kept = 0
        self.peaks = []

    def limit(self) -> int:
        return self._limit

    def give_back(self, nbytes: int) -> None:
        self.kept -= nbytes

    def peak_of(self, prepare: Callable) -> int:
        self.peaks.append(0)
        take_step = prepare()
        take_step()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: SavedTensor(tensor, self), lambda kept: kept.tensor
        ):
            take_step()
        return self.peaks[-1]


def settings_of(**settings) -> RunSettings:
    config = TrainConfig(**{"batch_size": -1, "imgsz": 64, "amp": "off", **settings})
    return RunSettings(config, Hyperparameters())


def long_run(config: TrainConfig) -> StepPlan:
    return step_plan(config, epoch_batches=2_000)


def model_and_loss(spec: dict = TINY_MODEL):
    model = build_detector(spec, 2, seed=1)
    return model, model.head.build_loss(Hyperparameters())


def search_on_cpu(*, plan_steps=None, ctx: DistributedContext = CPU, run: tuple = (), **settings) -> BatchSearch:
    """Returns the search of a run with ``settings``; ``run``: its model and loss."""
    model, criterion = run or model_and_loss()
    return BatchSearch(
        ctx=ctx, settings=settings_of(**settings), model=model, criterion=criterion, plan_steps=plan_steps or long_run
    )


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict(keep_vars=False).items()}


def global_generators() -> list:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # noqa: NPY002


@pytest.mark.parametrize("spec", [TINY_MODEL, TINY_ANCHOR_MODEL])
@pytest.mark.parametrize(
    "settings", [{}, {"optimizer": "Adam", "amp": "bf16"}, {"virtual_ranks": 2}, {"nominal_batch": 60, "quad": True}]
)
def test_a_measured_step_does_not_change_the_run(spec, settings):
    model, criterion = model_and_loss(spec)
    freeze_layers(model, {1})
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number) if number % 2 else None
    gradients = {name: p.grad for name, p in model.named_parameters()}
    values = [None if g is None else g.clone() for g in gradients.values()]
    modes = [module.training for module in model.modules()]
    state = state_of(model)
    loss_state = state_of(criterion)
    drawn = global_generators()

    take_step = prepare_step(search_on_cpu(run=(model, criterion), **settings), images=2)
    take_step()
    take_step()

    for before, now in ((state, state_of(model)), (loss_state, state_of(criterion))):
        assert before.keys() == now.keys()
        assert all(torch.equal(before[name], now[name]) for name in before)
    for (name, parameter), value in zip(model.named_parameters(), values):
        assert parameter.grad is gradients[name]
        assert value is None or torch.equal(parameter.grad, value)
    assert [module.training for module in model.modules()] == modes
    assert global_generators() == drawn


@pytest.mark.parametrize(
    ("settings", "images", "side", "boxes"),
    [
        ({}, 3, 64, BOXES),
        ({"multi_scale": 0.5}, 3, 96, BOXES),
        ({"quad": True}, 3, 128, 4 * BOXES),
        ({"virtual_ranks": 4}, 3, 64, BOXES),
        ({"nominal_batch": 12}, 3, 64, BOXES),
    ],
)
def test_the_measured_step_has_the_largest_images_and_most_boxes(settings, images, side, boxes):
    model, criterion = model_and_loss()
    seen = []

    def note(_, arguments):
        raw, targets, _ = arguments
        seen.append((len(raw[0]), 8 * raw[0].shape[-1], len(targets.rows), targets.max_targets))

    criterion.register_forward_pre_hook(note)
    prepare_step(search_on_cpu(run=(model, criterion), **settings), images=3)()
    shards = max(settings.get("virtual_ranks", 1), 1 + ("nominal_batch" in settings))
    assert seen == [(images, side, images * boxes, boxes)] * shards


@pytest.mark.parametrize(("steps", "optimizer"), [(SHORT_RUN, "Muon"), (SHORT_RUN + 1, "SGD")])
def test_the_measured_step_has_the_optimizer_of_the_run(monkeypatch, steps, optimizer):
    """``--optimizer auto`` chooses by the number of steps, which depends on the batch size."""
    built = []
    build_step = engine.assembly.batch_size.build_step

    def build_and_note(*arguments, **options):
        built.append(build_step(*arguments, **options))
        return built[-1]

    monkeypatch.setattr(engine.assembly.batch_size, "build_step", build_and_note)
    plans = []

    def plan_steps(config: TrainConfig) -> StepPlan:
        plans.append(config.batch_size)
        return StepPlan(accumulate=1, per_epoch=1, epochs=steps)

    prepare_step(search_on_cpu(plan_steps=plan_steps, optimizer="auto"), images=3)
    assert (plans, built[0].optimizer.name) == ([3], optimizer)


def peak_bytes(images: int) -> int:
    search = search_on_cpu()
    return FakeCudaMemory().peak_of(lambda: prepare_step(search, images=images))


def search(ctx: DistributedContext, settings: dict, limit: int, epoch_samples: int = 100_000) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.assembly.batch_size, "CudaMemory", lambda device: FakeCudaMemory(limit))
        return batch_that_fits(search_on_cpu(ctx=ctx, **settings), epoch_samples=epoch_samples)


@pytest.mark.parametrize(
    ("settings", "images", "batch"),
    [
        ({}, 3, 3),
        ({"virtual_ranks": 4}, 3, 12),  # one shard after another
        ({"nominal_batch": 64}, 3, 3),  # one micro-batch after another
        ({"quad": True}, 1, 4),
    ],
)
def test_the_run_uses_the_batch_that_fits(settings, images, batch, caplog):
    measured = search_on_cpu(quad=settings.get("quad", False))
    limit = FakeCudaMemory().peak_of(lambda: prepare_step(measured, images=images)) + 100
    with caplog.at_level("INFO", logger="lockstep"):
        found = search(CPU, settings, limit)
    shards = settings.get("virtual_ranks", 1)
    assert found == batch
    assert re.search(rf"--batch-size -1: {batch} \({shards} shards? of", caplog.text)


@pytest.mark.parametrize(
    ("epoch_samples", "processes", "settings", "batch"),
    [
        (100, 1, {}, 16),
        (199, 1, {}, 16),
        (250, 1, {}, 24),
        (100, 4, {}, 16),
        (100, 32, {}, 32),  # each process has at least one image
        (100, 1, {"virtual_ranks": 4}, 16),
        (100, 1, {"quad": True}, 16),
    ],
)
def test_a_small_data_set_limits_the_batch(monkeypatch, caplog, epoch_samples, processes, settings, batch):
    """Otherwise 100 images are one step an epoch on a large GPU."""
    monkeypatch.setattr(engine.assembly.batch_size, "prepare_step", lambda *_, **__: lambda: None)
    with caplog.at_level("INFO", logger="lockstep"):
        ctx = replace(CPU, world_size=processes)
        assert search(ctx, settings, limit=GIB, epoch_samples=epoch_samples) == batch
    assert f"--batch-size -1: more may fit, but an epoch has only {epoch_samples} samples" in caplog.text


def test_a_single_image_that_does_not_fit_is_one_line():
    with refused(
        "--batch-size -1: not even one image of 64 px fits in the 0.0 GiB of memory that cpu has left; "
        "use a smaller --imgsz or model"
    ):
        search(CPU, {}, 1000)


def _search_on_rank(ctx: DistributedContext, settings: dict, limits: list[int]) -> int:
    return search(ctx, settings, limits[ctx.rank])


@pytest.mark.parametrize(
    ("settings", "batch"), [({"virtual_ranks": 4}, 8), pytest.param({"sync_bn": -1}, 4, marks=pytest.mark.slow)]
)
def test_the_processes_agree_on_the_smallest_result(settings, batch):
    limits = [peak_bytes(3) + 100, peak_bytes(2) + 100]
    assert run_ranks(2, _search_on_rank, settings, limits) == [batch] * 2


GPU = replace(CPU, device=torch.device("cuda", 0), devices=(torch.device("cuda", 0),))
MPS = replace(CPU, device=torch.device("mps"))


@pytest.mark.parametrize("ctx", [CPU, MPS])
def test_a_batch_size_search_that_cannot_run_is_refused(ctx):
    check_batch_search(GPU)
    with refused(f"--batch-size -1: searches on a GPU only, and this run is on {ctx.device}; use a number"):
        check_batch_search(ctx)


class Cuda:
    """The functions of torch.cuda that `CudaMemory` uses, for machines without a GPU."""

    reserved = 3 * GIB
    free = 40 * GIB

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable:
        results = {"mem_get_info": (self.free, 2 * self.free), "memory_reserved": self.reserved}
        results["max_memory_reserved"] = 7 * GIB
        return lambda *_: (self.calls.append(name), results.get(name))[1]


@pytest.fixture
def cuda(monkeypatch) -> Cuda:
    stand_in = Cuda()
    monkeypatch.setattr(engine.assembly.batch_size.torch, "cuda", stand_in)
    return stand_in


def test_the_second_step_is_measured_and_a_tenth_of_the_free_memory_stays_free(cuda):
    memory = CudaMemory(torch.device("cuda", 0))
    assert memory.peak_of(lambda: lambda: cuda.calls.append("step")) == 7 * GIB
    wanted = [name for name in cuda.calls if name in ("step", "reset_peak_memory_stats", "max_memory_reserved")]
    assert wanted[:4] == ["step", "reset_peak_memory_stats", "step", "max_memory_reserved"]
    assert cuda.calls[-2:] == ["empty_cache", "reset_peak_memory_stats"]
    assert memory.limit() == 39 * GIB


OUT_OF_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("FIND was unable to find an engine to execute this computation"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
)


def test_running_out_of_memory_is_not_an_error_and_frees_everything(cuda):
    memory = CudaMemory(torch.device("cuda", 0))
    made = []

    def failing(error: Exception, at: int) -> Callable:
        """Raises ``error`` while the step is prepared (0), or when it is taken for the first or second time."""

        def prepare() -> Callable:
            taken = itertools.count(1)

            def take_step() -> None:
                if next(taken) == at:
                    raise error

            made.append(weakref.ref(take_step))
            if at == 0:
                raise error
            return take_step

        return prepare

    for error, at in itertools.product(OUT_OF_MEMORY, range(3)):
        assert memory.peak_of(failing(error, at)) is None
        assert cuda.calls[-2:] == ["empty_cache", "reset_peak_memory_stats"]
        error.__traceback__ = None  # which the test itself holds
    gc.collect()
    assert [step() for step in made] == [None] * 9
    for at in range(3):
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            memory.peak_of(failing(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), at))


@pytest.mark.parametrize("limit_of", [3, 12])
def test_the_found_batch_size_is_stored_and_kept_on_resume(tmp_path, monkeypatch, limit_of):
    """It may be larger than the number of images."""
    model = write_model(tmp_path / "tiny.yaml")
    common = ["--model", str(model), *SMALL, "--project", str(tmp_path), "--optimizer", "SGD"]
    flags = ["--data", str(write_dataset(tmp_path / "set")), *common, "--batch-size", "-1"]
    limit = peak_bytes(limit_of) + 100
    monkeypatch.setattr(engine.assembly.batch_size, "CudaMemory", lambda device: FakeCudaMemory(limit))
    monkeypatch.setattr(engine.assembly.run_checks, "check_batch_search", lambda ctx: None)
    run_main(train.main, [*flags, "--epochs", "1"])
    stored = yaml.safe_load((tmp_path / "exp" / "settings.yaml").read_text())["config"]["batch_size"]
    content = read_checkpoint(tmp_path / "exp" / "last.pt")
    assert stored == content["config"]["batch_size"] == limit_of
    assert content["progress"]["step"] == -(-10 // limit_of)
    # torchrun repeats the flags when it starts a run's processes again.
    monkeypatch.setattr(engine.assembly.batch_size, "CudaMemory", None)
    run_main(train.main, [*flags, "--epochs", "2", "--resume", str(tmp_path / "exp" / "last.pt")])
    content = read_checkpoint(tmp_path / "exp" / "last.pt")
    assert (content["config"]["batch_size"], content["progress"]["epoch"]) == (limit_of, 2)
