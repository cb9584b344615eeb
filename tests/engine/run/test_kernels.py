"""``--deterministic`` refuses a model whose gradient has no deterministic kernel on a GPU, before training."""

from __future__ import annotations

import pytest
import torch

from engine.run.sources import check_kernels
from models.detector import build_detector
from tests.engine.gpu_cases import CUDA
from tests.helpers.tiny import TINY_MODEL
from utils.config.settings import TrainConfig
from utils.errors import UserError


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
