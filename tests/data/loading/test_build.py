"""The settings of a run's loaders: workers, batches, canvases, and what processes must agree on."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from data.loading.build import data_facts, loader_workers, warn_of_many_workers
from tests.data.loading.small_loader import SINGLE
from tests.helpers.messages import refused
from utils.config.settings import TrainConfig, ValConfig


@pytest.mark.parametrize(("device", "cores", "processes", "expected"), [
    ("cpu", 2, 1, 2), ("cpu", 2, 4, 1), ("cpu", 16, 1, 8), ("cpu", 7, 2, 3), ("mps", 8, 1, 8),
    ("cuda", 16, 1, 14), ("cuda", 16, 4, 3), ("cuda", 1, 2, 1), ("cuda", 128, 1, 16), ("cuda", 128, 8, 15),
])  # fmt: skip
def test_the_default_number_of_workers_is_an_equal_part_of_the_cores(monkeypatch, device, cores, processes, expected):
    monkeypatch.setattr("data.loading.build.available_cores", lambda: cores)
    ctx = replace(SINGLE, local_world_size=processes, device=torch.device(device))
    assert loader_workers(-1, ctx) == expected
    assert loader_workers(5, ctx) == 5


def test_more_workers_than_cores_are_our_warning_and_not_torchs(open_loader, caplog, monkeypatch):
    monkeypatch.setattr("data.loading.build.available_cores", lambda: 2)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_loader(workers=9)
    assert [record.levelname for record in caplog.records if "--workers 9" in record.message] == ["WARNING"]
    caplog.clear()
    warn_of_many_workers(2, SINGLE, "val")
    assert not caplog.records


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"imgsz": 100}, "--imgsz 100: not a multiple of the model's stride 32; use 96 or 128"),
        ({"imgsz": 640_000_000}, "--imgsz 640000000: too large; use 65536 or less"),
        (
            {"batch_size": 1, "ctx": replace(SINGLE, world_size=2)},
            "--batch-size 1: is the total over 2 processes, and each needs at least one image; use 2 or more",
        ),
        ({"quad": True, "batch_size": 6}, "--quad with --batch-size 6 on 1 process: needs a multiple of 4"),
        (
            {"quad": True, "ctx": replace(SINGLE, world_size=4), "batch_size": 8},
            "--quad with --batch-size 8 on 4 processes: needs a multiple of 16",
        ),
        (
            {"image_weights": True, "repeat_factor": 0.1},
            "--image-weights and --repeat-factor both choose how often images are seen; remove one",
        ),
    ],
)
def test_impossible_loader_settings_are_one_line(open_loader, options, message):
    with refused(message):
        open_loader(**options)


@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("config", [TrainConfig, ValConfig])
def test_images_of_a_validation_are_padded_to_squares_if_the_head_wants_them(open_loader, squares, config):
    loader = open_loader(training=False, imgsz=160, squares=squares, config=config)
    assert all(batch.images.shape[2] == batch.images.shape[3] for batch in loader) == squares


def test_a_validation_batch_fits_one_process(open_loader, monkeypatch):
    monkeypatch.setattr("data.loading.build.MAX_VALIDATION_BATCH", 10)
    assert max(len(batch.images) for batch in open_loader(training=False, batch_size=512, squares=True)) == 10


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("classes", lambda classes: classes[::-1]),
        ("incomplete", lambda incomplete: ~incomplete),  # tiles without objects of these images never occur
        ("names", lambda names: (*names, "other")),
        ("image_hw", lambda image_hw: image_hw + 1),
    ],
)
def test_copies_of_a_data_set_that_lead_to_other_epochs_have_other_facts(index, field, change):
    changed = replace(index, **{field: change(getattr(index, field))})
    facts, other = data_facts("train", index), data_facts("train", changed)
    assert facts == data_facts("train", replace(index))
    assert len({name for name in facts if facts[name] != other[name]}) == 1
