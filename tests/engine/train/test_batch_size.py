"""``--batch-size -1``: a step of the search does not change the run. tests/gpu searches on a GPU."""

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
from engine.run.sources import freeze_layers
from engine.train.batch_size import prepare_step
from models.detector import build_detector
from tests.helpers.tiny import TINY_MODEL, write_dataset
from utils.config.settings import Hyperparameters, RunSettings, TrainConfig
from utils.distributed.context import DistributedContext


@pytest.mark.parametrize("settings", [{"optimizer": "Adam", "amp": "bf16"}, {"virtual_ranks": 2}])
def test_a_step_of_the_search_does_not_change_the_run(tmp_path, settings):
    model = build_detector(TINY_MODEL, 2, seed=1)
    config = TrainConfig(**{"batch_size": -1, "imgsz": 64, "amp": "off", **settings})
    data = load_dataset_spec(write_dataset(tmp_path / "set", train=12))
    index = load_index(data, "train", IndexSettings(cache_dir=str(tmp_path), progress=False))
    samples = AugmentedImages(ImageReader(index, imgsz=64))
    criterion = model.head.build_loss(Hyperparameters())
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
    run_settings = RunSettings(config, Hyperparameters())
    take_step = prepare_step(DistributedContext.single("cpu"), run_settings, model, criterion, samples, images=2)
    take_step()
    take_step()
    assert state() == before
