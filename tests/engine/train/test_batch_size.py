"""``--batch-size -1``: the search in a memory that ends, and its steps, which must not change the run."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from data.index import IndexSettings
from data.load import load_index
from data.read_spec import load_dataset_spec
from data.samples.dataset import AugmentedImages
from data.samples.readers import ImageReader
from engine.train import batch_size
from engine.train.batch_size import find_batch_size, prepare_step
from engine.train.starting_model import freeze_layers
from models.detector import Detector, build_detector
from tests.helpers.tiny import TINY_MODEL, write_dataset
from utils.config.settings import Hyperparameters, RunSettings, TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError

CPU = DistributedContext.single("cpu")


def parts(tmp_path, **settings) -> tuple:
    """Returns the arguments of `find_batch_size` and `prepare_step`."""
    model = build_detector(TINY_MODEL, 2, seed=1)
    config = TrainConfig(**{"batch_size": -1, "imgsz": 64, "amp": "off", **settings})
    data = load_dataset_spec(write_dataset(tmp_path / "set", train=12))
    index = load_index(data, "train", IndexSettings(cache_dir=str(tmp_path), progress=False))
    samples = AugmentedImages(ImageReader(index, imgsz=64))
    run_settings = RunSettings(config, Hyperparameters())
    return CPU, run_settings, model, model.head.build_loss(Hyperparameters()), samples


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


@pytest.fixture
def gpu(monkeypatch):
    """The memory of a GPU that is not there."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10, 10))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    for name in ("set_per_process_memory_fraction", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)


@pytest.mark.parametrize(
    ("settings", "memory", "batch"),
    [
        ({"multi_scale": 0.5}, 3, 1),
        ({"virtual_ranks": 2}, 2, 4),  # one shard after another
    ],
)
@pytest.mark.usefixtures("gpu")
def test_the_batch_doubles_until_memory_ends(tmp_path, monkeypatch, settings, memory, batch):
    limit_memory(monkeypatch, memory * 64 * 64)
    assert find_batch_size(*parts(tmp_path, **settings)) == batch


@pytest.mark.usefixtures("gpu")
def test_a_model_that_does_not_fit_at_all_is_refused_and_other_errors_are_raised(tmp_path, monkeypatch):
    given = parts(tmp_path)
    limit_memory(monkeypatch, 0)
    with pytest.raises(UserError, match="not even one image of 64 px"):
        find_batch_size(*given)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(batch_size, "prepare_step", fail)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        find_batch_size(*given)


@pytest.mark.parametrize("settings", [{"optimizer": "Adam", "amp": "bf16"}, {"virtual_ranks": 2}])
def test_a_step_of_the_search_does_not_change_the_run(tmp_path, settings):
    given = parts(tmp_path, **settings)
    _, _, model, criterion, _ = given
    freeze_layers(model, {1})
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number) if number % 2 else None

    def state() -> list:
        gradients = [parameter.grad for parameter in model.parameters()]
        values = [*model.state_dict().values(), *criterion.state_dict().values()]
        tensors = [None if value is None else value.tolist() for value in [*gradients, *values]]
        modes = [module.training for module in model.modules()]
        generators = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # noqa: NPY002
        return [tensors, modes, generators]

    before = state()
    take_step = prepare_step(*given, images=2)
    take_step()
    take_step()
    assert state() == before
