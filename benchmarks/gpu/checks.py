"""The checks that parts of `benchmarks/gpu.sh` run, as one command.

Each prints tables, figures on lines that begin with "figure:", and the reason if it fails (exit code 1). Almost all
also run on a CPU (``--device cpu``). The flags are those of all checks; a check reads those that it needs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from utils.machine.resources import available_cores

CHECKS = {  # module in this folder and function, by the name of a check
    "environment": "checks:environment",
    "data": "checks:write_data",
    "equal-steps": "equal:compare_steps",
    "sync-free": "syncs:waits_of_steps",
    "sync-free-loop": "syncs:waits_of_loop",
    "kernels": "profile:costliest_kernels",
    "data-parallel": "data_parallel:data_parallel",
    "overflow": "overflow:check_overflow",
    "ranks": "ranks:compare_processes",
    "ranks-ddp": "ranks:compare_ddp",
    "pinned-batches": "batches:compare_batches",
    "compiled": "compiled:compare_compiled",
    "resume": "interruptions:stop_and_resume",
    "validate": "scripts:validate",
    "validate-elsewhere": "scripts:validate_elsewhere",
    "detect": "scripts:detect",
    "exported": "scripts:exported",
    "largest-batch": "scripts:largest_batch",
    "train": "scripts:time_training",
}
PACKAGES = (
    "torch", "torchvision", "triton", "numpy", "opencv-python", "opencv-python-headless", "pyyaml", "pillow",
    "safetensors", "jinja2", "tensorboard", "matplotlib", "tqdm", "onnx", "onnxscript", "onnxruntime", "psutil",
    "albumentations", "lmdb", "openvino", "pycocotools", "polars", "ultralytics",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu.checks", description=__doc__.split("\n\n")[0])
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--device", default="0")
    parser.add_argument("--model", nargs="+", default=["yolov8n"], dest="models")
    parser.add_argument("--optimizer", nargs="+", default=["SGD"], dest="optimizers")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--case", nargs="+", default=["yolov8n:16:SGD"], dest="cases", help="MODEL:BATCH:OPTIMIZER")
    parser.add_argument("--amp", default="auto")
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--data", default="")
    parser.add_argument("--weights", type=Path, default=Path(), help="checkpoint that was trained on --data")
    parser.add_argument("--at-least", type=float, default=0.0, help="minimum AP of the weights")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--interruption", nargs="+", default=["sigterm", "torchrun", "sigkill"], dest="interruptions")
    parser.add_argument("--peer", default="")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo", help="backend of the two processes")
    parser.add_argument("--folder", type=Path, default=Path(), help="folder of data sets and runs")
    parser.add_argument("--size", choices=("small", "many", "large"), default="small", help="data set to write")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--times", type=int, default=16)
    options = parser.parse_args()
    options.model = options.models[0]
    module, function = CHECKS[options.check].split(":")
    for line in getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)(options):
        print(line if line.startswith("|") else f"figure: {line}", flush=True)


def environment(options: argparse.Namespace) -> Iterator[str]:
    """Yields OpenCV's version, other packages, the machine and the commit, each as soon as it is known. Raises
    SystemExit if images cannot be decoded because OpenCV is missing or too old."""
    version, problem = opencv()
    yield f"OpenCV {version}{f'; {problem}' if problem else ''}, Python {platform.python_version()}"
    installed: dict[str, str] = {}
    for package in metadata.distributions():
        installed.setdefault(package.name.lower(), package.version)  # the first one on the path is imported
    present = [f"{name} {installed[name]}" for name in PACKAGES if name in installed]
    missing = [name for name in PACKAGES if name not in installed]
    yield f"{', '.join(present)}; not installed: {', '.join(missing) or 'nothing'}"

    import torch

    from benchmarks.command import commit

    yield machine()
    yield f"{shutil.disk_usage('/dev/shm').free / 2**30:.1f} GiB of shared memory free"
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        yield f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, NCCL {nccl}"
    yield f"commit {commit()}"
    if problem:
        sys.exit(f"OpenCV {version}: {problem}")


def machine() -> str:
    """Describes the machine: CPU, cores this process may use, memory, GPU if torch sees one, torch's version."""
    import torch

    cpu = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"
    return f"{available_cores()} cores of {cpu}, {memory:.0f} GiB{gpu}, torch {torch.__version__}"


def opencv() -> tuple[str, str]:
    """Returns OpenCV's version, and why images cannot be decoded with it, or an empty string."""
    try:
        import cv2
    except ImportError as error:
        return "unknown", f"cannot be imported ({error}); put a wheel of opencv-python-headless into WHEELS"
    if not hasattr(cv2, "imdecodeWithMetadata"):
        problem = "no imdecodeWithMetadata; put a wheel of opencv-python-headless, 4.12 or newer, into WHEELS"
        return cv2.__version__, problem
    return cv2.__version__, ""


def write_data(options: argparse.Namespace) -> Iterator[str]:
    """Writes the demo set to ``folder``/small, or many copies of each of its images to ``folder``/many or /large."""
    from benchmarks.dataset_copy import copy_dataset
    from data.dataset.demo import ensure_demo

    size = options.imgsz
    counts = {"train_images": options.images, "val_images": max(options.images // 4, 4)}
    original = ensure_demo(options.folder / f"demo{size}", size=size, **counts)
    times = 1 if options.size == "small" else options.times
    copy_dataset(str(original), options.folder / options.size, times=times)
    yield f"{options.images * times} training images of {size} px"


if __name__ == "__main__":
    main()
