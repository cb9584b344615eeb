"""Checks that need an NVIDIA GPU. They are skipped without one. One GPU is enough: where there are two processes, they
share it.

    python -m pytest tests/gpu -vv -m "gpu and quick"
    python -m pytest tests/gpu -vv -m "gpu and not quick"

On an H100 or H200 with 16 cores, the first call is planned to take five minutes, and both nine. They need torch,
OpenCV, NumPy, PyYAML and pytest; the checks of ONNX files are skipped without their packages.

LOCKSTEP_GPU_TESTS=cpu runs the checks on the CPU with tiny models (`make test-gpu-dry`), to see that they work.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from benchmarks.dataset_copy import copy_dataset
from data.demo import ensure_demo
from tests.gpu.commands import run
from tests.gpu.machine import DRY_RUN, GPU, Figure, Machine
from tests.helpers.tiny import write_model
from utils.machine.resources import available_cores


@pytest.fixture(scope="session")
def machine(request: pytest.FixtureRequest) -> Machine:
    """The machine, which is described in the log first of all. Skips the tests without a GPU."""
    if os.environ.get("LOCKSTEP_GPU_TESTS") != "cpu":
        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        _print(request, f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, NCCL {nccl}")
        _print(request, f"cuDNN {torch.backends.cudnn.version()}, {available_cores()} cores")
    _print(request, f"Python {platform.python_version()}, torch {torch.__version__}, OpenCV {cv2.__version__}")
    _print(request, f"NumPy {np.__version__}")
    return DRY_RUN if os.environ.get("LOCKSTEP_GPU_TESTS") == "cpu" else GPU


@pytest.fixture
def figure(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Figure:
    """Records a named figure, and prints it at once, so that a machine that is lost has not measured in vain."""

    def note(name: str, value: object) -> None:
        record_property(name, value)
        _print(request, f"{name}: {value}")

    return note


def _print(request: pytest.FixtureRequest, line: str) -> None:
    plugins = request.config.pluginmanager
    with plugins.getplugin("capturemanager").global_and_fixture_disabled():
        plugins.getplugin("terminalreporter").write_line(line)
        plugins.getplugin("terminalreporter").flush()


@pytest.fixture(scope="session")
def data(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML of a demo data set."""
    folder = tmp_path_factory.mktemp("gpu") / "demo"
    images = machine.demo_images
    return ensure_demo(folder, size=machine.imgsz, train_images=images, val_images=images // 4)


@pytest.fixture(scope="session")
def many_images(machine: Machine, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML of a data set that is large enough for any batch."""
    return copy_dataset(str(data), tmp_path_factory.mktemp("gpu") / "many", times=32)


@pytest.fixture(scope="session")
def train_flags(machine: Machine, data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """The script and the flags of all trainings."""
    model = machine.heads["yolov8"]
    if isinstance(model, dict):
        model = str(write_model(tmp_path_factory.mktemp("gpu") / "tiny.yaml", model))
    return [
        "train.py", "--data", data, "--model", model, "--imgsz", machine.imgsz, "--batch-size", machine.batch_size,
        "--epochs", 1, "--device", machine.device, "--workers", 2, "--noplots",
    ]  # fmt: skip


@pytest.fixture(scope="session")
def weights(machine: Machine, train_flags: list[object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of a training with default settings."""
    folder = tmp_path_factory.mktemp("gpu")
    run(*train_flags, "--batch-size", 16, "--epochs", machine.epochs, "--val-every", 10, "--project", folder)
    return folder / "exp" / "last.pt"
