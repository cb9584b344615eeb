"""Settings that exclude each other are refused, and those without an effect on a run are logged."""

from __future__ import annotations

from contextlib import nullcontext
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
TWO_GPUS = replace(ONE, devices=(torch.device("cuda:0"), torch.device("cuda:1")))


@pytest.mark.parametrize(
    ("processes", "settings", "flags"),
    [
        (1, {"image_weights": True, "repeat_factor": 0.1}, ["--image-weights", "--repeat-factor"]),
        (1, {"virtual_ranks": 3}, ["--virtual-ranks 3"]),
        (4, {"quad": True, "batch_size": 8}, ["--quad", "multiple of 16"]),
        (2, {"batch_size": 1}, ["--batch-size 1", "use 2"]),
        (3, {"sync_bn": 2}, ["--sync-bn 2"]),
        (2, {"sync_bn": 2, "deterministic": True}, ["--deterministic and --sync-bn"]),
        (2, {"pipeline": 2, "virtual_ranks": 2, "compile": True}, ["and --virtual-ranks", "and --compile"]),
        (0, {"compile": True}, ["--device 0,1 and --compile"]),
        (6, {"pipeline": 2, "deterministic": True, "zero": True}, []),
    ],
)
def test_settings_that_exclude_each_other_are_refused_in_one_line(processes, settings, flags):
    """``processes`` 0: one process with two GPUs."""
    ctx = replace(ONE, local_rank=0, world_size=processes) if processes else TWO_GPUS
    run = RunSettings(TrainConfig(**{"plots": False, **settings}), Hyperparameters())
    with pytest.raises(UserError) if flags else nullcontext() as error:
        check_settings(ctx, run)
    assert all(flag in str(error.value) for flag in flags)


@pytest.mark.parametrize(
    ("override", "settings", "expected"),
    [
        ("", {"zero": True}, "--zero does nothing"),
        ("", {"patience": 4, "epochs": 5}, "--patience 4 does nothing"),
        ("anchor_t=3 box=5", {}, "--set anchor_t does nothing: the model's loss does not use it"),
        ("distill=2", {"weights": "a.pt"}, "--set distill does nothing: there is no --teacher or --keep-old"),
        ("mosaic=0.5", {"rect": True}, "--set mosaic does nothing"),
        ("warmup_epochs=0 warmup_momentum=0.5", {}, "--set warmup_momentum does nothing: warmup_epochs is 0"),
        # With an effect:
        ("distill=2", {"weights": "a.pt", "keep_old": True}, None),
        ("mosaic=0.5 lr_mult=0.1", {"multi_scale": 0.5, "weights": "a.pt"}, None),
        ("", {"patience": 3, "epochs": 5}, None),
    ],
)
def test_each_setting_without_effect_gets_one_line(override, settings, expected):
    words = override.split()
    run = RunSettings(TrainConfig(override=words, **settings), with_overrides(Hyperparameters(), words))
    model: Any = SimpleNamespace(
        head=YOLOXHead((8, 8), (8, 16), 2, 8), channels=3
    )  # its loss changes in the last epochs
    messages = unused_settings_of_run(ONE, run, model, tile=0)
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


def test_upsampling_without_a_deterministic_gradient_is_refused():
    config = TrainConfig(deterministic=True)
    bicubic, nearest = (
        build_detector(
            {**TINY_MODEL, "head": [[4, 1, "nn.Upsample", [None, 2, mode]], [[2, 5, 4], 1, "Detect", ["nc"]]]}, 2
        )
        for mode in ("bicubic", "nearest")
    )
    with pytest.raises(UserError, match=r"--deterministic: layer model\.5 \(Upsample, bicubic\)"):
        check_kernels(config, bicubic, CUDA)
    check_kernels(config, bicubic, torch.device("cpu"))
    check_kernels(config, nearest, CUDA)
