"""``--batch-size -1``: the search in a memory that ends, and its steps, which must not change the run."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import yaml

import train
from engine.assembly.batch_size import BOXES, MAX_SHARD_IMAGES, BatchSearch, batch_that_fits, prepare_step
from engine.assembly.starting_model import freeze_layers
from engine.optim.schedule import step_plan
from models.detector import Detector, build_detector
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import SMALL, call, error_of
from tests.helpers.tiny import TINY_ANCHOR_MODEL, TINY_MODEL, write_dataset, write_model
from utils.config.settings import Hyperparameters, RunSettings, TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.torch_file import read_checkpoint

CPU = DistributedContext.single("cpu")


def search_on_cpu(*, ctx: DistributedContext = CPU, spec: dict = TINY_MODEL, **settings) -> BatchSearch:
    model = build_detector(spec, 2, seed=1)
    config = TrainConfig(**{"batch_size": -1, "imgsz": 64, "amp": "off", **settings})
    return BatchSearch(
        ctx=ctx,
        settings=RunSettings(config, Hyperparameters()),
        model=model,
        criterion=model.head.build_loss(Hyperparameters()),
        plan_steps=lambda config: step_plan(config, epoch_batches=2_000),
    )


def limit_memory(patch: pytest.MonkeyPatch, pixels: int) -> list[torch.Size]:
    """Makes memory run out in training steps with more than ``pixels``. Returns a list of the shapes of the others."""
    shapes = []
    forward = Detector.forward

    def limited(self: Detector, images: torch.Tensor, *arguments: object) -> object:
        if self.training and images.shape[0] * images.shape[2] * images.shape[3] > pixels:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        shapes.append(images.shape)
        return forward(self, images, *arguments)

    patch.setattr(Detector, "forward", limited)
    return shapes


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 15, 16, 17, 100, 511, MAX_SHARD_IMAGES, 9_999])
@pytest.mark.parametrize("epoch_samples", [100, 250, 3_000, 100_000])
def test_the_largest_batch_that_fits_and_suits_the_data_is_found(monkeypatch, limit, epoch_samples):
    """Otherwise 100 images are one step an epoch on a large GPU."""
    tried = []

    def prepare(_: BatchSearch, *, images: int) -> Callable[[], None]:
        tried.append(images)
        if images > limit:
            raise RuntimeError("FIND was unable to find an engine to execute this computation")
        return lambda: None

    monkeypatch.setattr("engine.assembly.batch_size.prepare_step", prepare)
    allowed = min(limit, MAX_SHARD_IMAGES, max(epoch_samples // 10, 16))
    expected = allowed if allowed <= 16 else allowed - allowed % 8
    if expected == 0:
        with pytest.raises(UserError, match="not even one image of 64 px"):
            batch_that_fits(search_on_cpu(), epoch_samples=epoch_samples)
    else:
        assert batch_that_fits(search_on_cpu(), epoch_samples=epoch_samples) == expected
    assert len(tried) <= 16


@pytest.mark.parametrize(
    ("settings", "shape", "batch"),
    [
        ({}, (3, 64), 3),
        ({"multi_scale": 0.5}, (1, 96), 1),
        ({"quad": True}, (1, 128), 4),  # each image of four samples
        ({"virtual_ranks": 4}, (3, 64), 12),  # one shard after another
        ({"nominal_batch": 64}, (3, 64), 3),  # one micro-batch after another
    ],
)
def test_the_steps_have_the_largest_images_of_the_run_and_many_boxes(monkeypatch, settings, shape, batch):
    shapes = limit_memory(monkeypatch, 4 * 64 * 64 if "quad" in settings else 3 * 64 * 64 + 64)
    search = search_on_cpu(**settings)
    boxes = set()
    search.criterion.register_forward_pre_hook(lambda _, arguments: boxes.add(arguments[1].max_targets))
    assert batch_that_fits(search, epoch_samples=100_000) == batch
    assert (max(size[0] for size in shapes), shapes[0][-1]) == shape
    assert boxes == {BOXES * (4 if "quad" in settings else 1)}


def test_an_error_besides_missing_memory_is_raised(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr("engine.assembly.batch_size.prepare_step", fail)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        batch_that_fits(search_on_cpu(), epoch_samples=100)


def _search_on_rank(ctx: DistributedContext, settings: dict, limits: list[int]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        limit_memory(patch, limits[ctx.rank] * 64 * 64)
        return batch_that_fits(search_on_cpu(ctx=ctx, **settings), epoch_samples=100_000)


@pytest.mark.parametrize(
    ("settings", "batch"), [({"virtual_ranks": 4}, 8), pytest.param({"sync_bn": -1}, 4, marks=pytest.mark.slow)]
)
def test_the_processes_agree_on_the_smallest_result(settings, batch):
    assert run_ranks(2, _search_on_rank, settings, [3, 2]) == [batch] * 2


@pytest.mark.parametrize("spec", [TINY_MODEL, TINY_ANCHOR_MODEL])
@pytest.mark.parametrize(
    "settings", [{}, {"optimizer": "Adam", "amp": "bf16"}, {"virtual_ranks": 2}, {"nominal_batch": 60, "quad": True}]
)
def test_a_step_of_the_search_does_not_change_the_run(spec, settings):
    search = search_on_cpu(spec=spec, **settings)
    freeze_layers(search.model, {1})
    for number, parameter in enumerate(search.model.parameters()):
        parameter.grad = torch.full_like(parameter, number) if number % 2 else None

    def state() -> list:
        gradients = [parameter.grad for parameter in search.model.parameters()]
        values = [*search.model.state_dict().values(), *search.criterion.state_dict().values()]
        tensors = [None if value is None else value.tolist() for value in [*gradients, *values]]
        modes = [module.training for module in search.model.modules()]
        generators = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # noqa: NPY002
        return [tensors, modes, generators]

    before = state()
    take_step = prepare_step(search, images=2)
    take_step()
    take_step()
    assert state() == before


@pytest.mark.parametrize("limit", [3, 12])
def test_the_found_batch_size_is_stored_and_kept_on_resume(tmp_path, monkeypatch, capsys, limit):
    """It may be larger than the number of images. torchrun repeats the flags when it starts processes again."""
    model = write_model(tmp_path / "tiny.yaml")
    common = ["--model", str(model), *SMALL, "--project", str(tmp_path), "--optimizer", "SGD"]
    flags = ["--data", str(write_dataset(tmp_path / "set")), *common, "--batch-size", "-1"]
    assert "--batch-size -1: " in error_of(capsys, train.main, *flags)  # there is no GPU
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.assembly.run_checks.check_batch_search", lambda ctx: None)
        limit_memory(patch, limit * 64 * 64)
        call(train.main, *flags, "--epochs", "1")
    stored = yaml.safe_load((tmp_path / "exp" / "settings.yaml").read_text())["config"]["batch_size"]
    content = read_checkpoint(tmp_path / "exp" / "last.pt")
    assert stored == content["config"]["batch_size"] == limit
    assert content["progress"]["step"] == -(-10 // limit)
    monkeypatch.setattr("engine.assembly.run_checks.check_batch_search", lambda ctx: None)
    call(train.main, *flags, "--epochs", "2", "--resume", tmp_path / "exp" / "last.pt")
    content = read_checkpoint(tmp_path / "exp" / "last.pt")
    assert (content["config"]["batch_size"], content["progress"]["epoch"]) == (limit, 2)
