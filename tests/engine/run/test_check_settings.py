"""Settings that exclude each other are refused, and those without an effect on a run are logged."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import train
from engine.run.check_settings import check_settings, unused_settings_of_run
from engine.run.sources import check_kernels
from models.detector import build_detector
from models.heads.yolox import YOLOXHead
from tests.engine.gpu_cases import CUDA
from tests.helpers.scripts import SMALL
from tests.helpers.tiny import TINY_MODEL, write_dataset, write_model
from utils.config.recipes import with_overrides
from utils.config.settings import Hyperparameters, RunSettings, TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.process.main import run_main

ONE = DistributedContext.single()
LEVELS = ((8, 8), (8, 16), 2)
FOUR = replace(ONE, world_size=4, local_rank=0, local_world_size=4)


TWO_GPUS = replace(ONE, devices=(torch.device("cuda:0"), torch.device("cuda:1")))


@pytest.mark.parametrize(
    ("processes", "settings", "flags"),
    [
        (1, {"image_weights": True, "repeat_factor": 0.1}, ["--image-weights", "--repeat-factor"]),
        (1, {"keep_old": True}, ["--keep-old", "--weights"]),
        (1, {"virtual_ranks": 3}, ["--virtual-ranks 3"]),
        (4, {"quad": True, "batch_size": 8}, ["--quad", "multiple of 16"]),
        (2, {"batch_size": 1}, ["--batch-size 1", "use 2"]),
        (3, {"sync_bn": 2}, ["--sync-bn 2"]),
        (3, {"deterministic": True}, ["--deterministic on 3"]),
        (4, {"virtual_ranks": 2}, ["--virtual-ranks 2"]),
        (2, {"sync_bn": 2, "deterministic": True}, ["--deterministic and --sync-bn"]),
        (2, {"compile": True, "sync_bn": -1, "rect": True}, ["--compile", "--rect"]),
        (3, {"pipeline": 2}, ["--pipeline 2"]),
        (2, {"pipeline": 2, "virtual_ranks": 2, "compile": True}, ["and --virtual-ranks", "and --compile"]),
        (0, {"compile": True}, ["--device 0,1 and --compile"]),
        (6, {"pipeline": 2, "deterministic": True, "zero": True}, []),
    ],
)
def test_settings_that_exclude_each_other_are_refused_in_one_line(processes, settings, flags):
    """``processes`` 0: one process with two GPUs."""
    ctx = {0: TWO_GPUS, 1: ONE}.get(processes) or replace(ONE, local_rank=0, world_size=processes)
    run = RunSettings(TrainConfig(**{"plots": False, **settings}), Hyperparameters())
    if not flags:
        check_settings(ctx, run)
        return
    with pytest.raises(UserError) as error:
        check_settings(ctx, run)
    assert all(flag in str(error.value) for flag in flags), error.value
    assert "\n" not in str(error.value)


def lines(ctx: DistributedContext, *override: str, **settings) -> list[str]:
    config = TrainConfig(override=list(override), **settings)
    model: Any = SimpleNamespace(head=YOLOXHead(*LEVELS, 8), channels=3)  # its loss changes in the last epochs
    run = RunSettings(config, with_overrides(Hyperparameters(), override))
    return unused_settings_of_run(ctx, run, model, tile=0)


@pytest.mark.parametrize(
    ("ctx", "override", "settings", "expected"),
    [
        (ONE, "", {"zero": True}, "--zero does nothing"),
        (ONE, "", {"sync_bn": -1}, "--sync-bn does nothing"),
        (ONE, "", {"patience": 4, "epochs": 5}, "--patience 4 does nothing"),
        (ONE, "anchor_t=3 box=5", {}, "--set anchor_t does nothing: the model's loss does not use it"),
        (ONE, "", {"autoanchor": False}, "--no-autoanchor does nothing: the model has no anchors"),
        (ONE, "distill=2", {"weights": "a.pt"}, "--set distill does nothing: there is no --teacher or --keep-old"),
        (ONE, "distill=2", {"weights": "a.pt", "keep_old": True}, None),
        (ONE, "mosaic=0.5", {"rect": True}, "--set mosaic does nothing"),
        (ONE, "lr_mult=0.1", {}, "--set lr_mult does nothing"),
        (ONE, "scale=0 close_scale=3", {}, "--set close_scale does nothing: scale is 0"),
        (ONE, "warmup_epochs=0 warmup_momentum=0.5", {}, "--set warmup_momentum does nothing: warmup_epochs is 0"),
        # With an effect:
        (ONE, "", {}, None),
        (ONE, "mosaic=0.5 lr_mult=0.1", {"multi_scale": 0.5, "weights": "a.pt"}, None),
        (ONE, "", {"virtual_ranks": 4, "nominal_batch": 32, "rect": True, "multi_scale": 0.5, "cos_lr": True}, None),
        (ONE, "", {"nominal_batch": 64, "patience": 5, "save_period": 5, "epochs": 11}, None),
        (ONE, "", {"patience": 3, "epochs": 5}, None),
        (FOUR, "", {"zero": True, "sync_bn": -1}, None),
    ],
)  # fmt: skip
def test_each_setting_without_effect_gets_one_line(ctx, override, settings, expected):
    messages = lines(ctx, *override.split(), **settings)
    assert len(messages) == (expected is not None)
    assert "".join(messages).startswith(expected or "")


def test_lines_about_unused_settings_are_logged(tmp_path, capsys):
    data = write_dataset(tmp_path / "set", train=4, val=2)
    model = write_model(tmp_path / "tiny.yaml")
    given = ["--data", data, "--model", model, *SMALL, "--epochs", "1", "--project", tmp_path, "--zero", "--sync-bn"]
    given += ["--set", "lr_mult=0.5"]
    run_main(train.main, [str(g) for g in given])
    out = capsys.readouterr().out
    for start in ("--sync-bn and --zero do", "--set lr_mult does"):
        assert len([line for line in out.splitlines() if line.startswith(f"warning: {start} nothing")]) == 1, out
    assert "warning: --sync-bn and --zero do nothing" in (tmp_path / "exp" / "train.log").read_text()


def upsampled(mode: str) -> dict:
    return {**TINY_MODEL, "head": [[4, 1, "nn.Upsample", [None, 2, mode]], [[2, 5, 4], 1, "Detect", ["nc"]]]}


def test_upsampling_without_a_deterministic_gradient_is_refused():
    config = TrainConfig(deterministic=True)
    detector = build_detector(upsampled("bicubic"), 2)
    with pytest.raises(UserError, match=r"--deterministic: layer model\.5 \(Upsample, bicubic\)"):
        check_kernels(config, detector, CUDA)
    check_kernels(config, detector, torch.device("cpu"))
    check_kernels(TrainConfig(), detector, CUDA)
    for mode in ("nearest", "bilinear", "nearest-exact"):
        check_kernels(config, build_detector(upsampled(mode), 2), CUDA)
