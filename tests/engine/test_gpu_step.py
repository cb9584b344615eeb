"""The step as a GPU runs it, on machines without one: no operation mixes devices, and the host waits for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from engine.optim.build import build_optimizer
from engine.optim.ema import ModelEma
from engine.parallel.sync_bn import convert_sync_bn
from engine.train_step import TrainStep
from models.detector import build_detector
from tests.engine.test_train_step import _NoSync
from tests.helpers.fake_gpu import fake_gpu
from tests.helpers.tiny import TINY_ANCHOR_MODEL, TINY_MODEL, make_batch
from utils.config.settings import Hyperparameters
from utils.distributed.context import DistributedContext
from utils.structures import Batch

CUDA = torch.device("cuda", 0)
# Strides 8, 16 and 32 as in TINY_MODEL, with the blocks of each family.
MODELS = {
    "yolov8": TINY_MODEL,
    "yolov5": TINY_ANCHOR_MODEL,
    "yolo26": {
        **TINY_MODEL,
        "end2end": True,
        "reg_max": 1,
        "head": [[4, 1, "C3k2", [32, True, 0.5, True]], [[2, 3, 5], 1, "Detect", ["nc"]]],
    },
    "yolox": {**TINY_MODEL, "head": [[[2, 3, 4], 1, "YOLOXDetect", ["nc", 16]]]},
    "yolov9": {
        **TINY_MODEL,
        "head": [
            [2, 1, "RepNCSPELAN4", [16, 16, 8, 1]],
            [-1, 1, "ADown", [32]],
            [4, 1, "SPPELAN", [32, 16]],
            [[5, 6, 7], 1, "Detect", ["nc"]],
        ],
    },
}


class _NoBlockingCopy(_NoSync):
    """Also fails on copies between devices for which the host waits."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_x() -> None:
    with fake_gpu():
        model = build_detector(MODELS["yolov8"], 2, seed=1).to(CUDA)
