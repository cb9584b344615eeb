"""Runs a check of `benchmarks/gpu.sh`, and has its first two: the machine, and the data sets.

    python -m benchmarks.gpu.checks equal.compare_steps '{"device": "0", "models": ["yolov8n"], ...}'

A check is a function of this folder, whose keyword arguments follow as JSON; gpu.log has the commands of a run. It
yields lines: figures, rows of tables, which begin with "|", and why it fails, which begin with "!". Here a figure is
printed after "figure:", and the exit code is 1 if the check fails. Almost all also run with the device "cpu".
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from utils.machine.resources import available_cores

PACKAGES = (
    "torch", "torchvision", "triton", "numpy", "opencv-python", "opencv-python-headless", "pyyaml", "pillow",
    "safetensors", "jinja2", "tensorboard", "matplotlib", "tqdm", "onnx", "onnxscript", "onnxruntime", "psutil",
    "albumentations", "lmdb", "openvino", "pycocotools", "polars", "ultralytics",
)  # fmt: skip


def main() -> None:
    name, arguments = sys.argv[1:]
    module, function = name.split(".")
    check = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
    problems = []
    for line in check(**json.loads(arguments)):
        if line.startswith("!"):
            problems.append(line.removeprefix("! "))
        else:
            print(line if line.startswith("|") else f"figure: {line}", flush=True)
    if problems:
        sys.exit("; ".join(problems))


def environment() -> Iterator[str]:
    """Yields OpenCV's version, other packages, the machine and the commit, each as soon as it is known. Fails if images
    cannot be decoded because OpenCV is missing or too old."""
    problem = ""
    opencv = "unknown"
    try:
        import cv2

        opencv = cv2.__version__
        if not hasattr(cv2, "imdecodeWithMetadata"):
            problem = "no imdecodeWithMetadata; put a wheel of opencv-python-headless, 4.12 or newer, into WHEELS"
    except ImportError as error:
        problem = f"cannot be imported ({error}); put a wheel of opencv-python-headless into WHEELS"
    yield f"OpenCV {opencv}{f'; {problem}' if problem else ''}, Python {platform.python_version()}"
    installed: dict[str, str] = {}
    for package in metadata.distributions():
        installed.setdefault(package.name.lower(), package.version)  # the first one on the path is imported
    present = [f"{name} {installed[name]}" for name in PACKAGES if name in installed]
    missing = [name for name in PACKAGES if name not in installed]
    yield f"{', '.join(present)}; not installed: {', '.join(missing) or 'nothing'}"

    import torch

    from benchmarks.command import commit

    cpu = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"
    yield f"{available_cores()} cores of {cpu}, {memory:.0f} GiB{gpu}, torch {torch.__version__}"
    yield f"{shutil.disk_usage('/dev/shm').free / 2**30:.1f} GiB of shared memory free"
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        yield f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, NCCL {nccl}"
    yield f"commit {commit()}"
    if problem:
        yield f"! OpenCV {opencv}: {problem}"


def write_data(*, folder: str, imgsz: int, images: int, copies: int) -> Iterator[str]:
    """Writes ``copies`` of each image of a demo set into ``folder``."""
    from benchmarks.dataset_copy import copy_dataset
    from data.dataset.demo import ensure_demo

    demo = Path(folder).with_name(f"demo{imgsz}")
    original = ensure_demo(demo, size=imgsz, train_images=images, val_images=max(images // 4, 4))
    copy_dataset(str(original), Path(folder), times=copies)
    yield f"{images * copies} training images of {imgsz} px"


if __name__ == "__main__":
    main()
