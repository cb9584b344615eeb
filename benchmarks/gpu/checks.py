"""The command line of those parts of `benchmarks/gpu.sh` that are more than one command. Each part prints tables and
figures, on lines that begin with "figure:", and the reason if its check fails (exit code 1). Almost all parts also run
on a CPU (``--device cpu``).
"""

from __future__ import annotations

import argparse
import importlib
import platform
import shutil
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

PARTS = {
    "environment": "checks:environment",
    "data": "checks:write_data",
    "equal-steps": "equal:compare_steps",
    "equal-detections": "equal:compare_detections",
    "equal-rendering": "equal:compare_rendering",
    "sync-free": "syncs:waits_of_steps",
    "sync-free-loop": "syncs:waits_of_loop",
    "loss-share": "profile:loss_shares",
    "kernels": "profile:costliest_kernels",
    "render": "profile:rendering",
    "data-parallel": "equal:data_parallel",
    "predictor-threads": "equal:predictor_threads",
    "overflow": "equal:overflow",
    "weights-score": "scripts:score_of_weights",
    "first-steps": "profile:first_steps",
    "ranks": "bits:compare_processes",
    "ranks-ddp": "bits:compare_ddp",
    "feed": "bits:compare_batches",
    "compiled": "equal:compare_compiled",
    "resume": "bits:stop_and_resume",
    "validate": "scripts:validate",
    "detect": "scripts:detect",
    "exported": "scripts:exported",
    "largest-batch": "scripts:largest_batch",
    "train": "scripts:time_training",
}
PACKAGES = (
    "torchvision", "triton", "numpy", "opencv-python", "opencv-python-headless", "tensorboard", "matplotlib", "tqdm",
    "albumentations", "lmdb", "ultralytics",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu.checks", description=__doc__.split("\n\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default="0")
    parser.add_argument("--model", nargs="+", default=["yolov8n"], dest="models")
    parser.add_argument("--optimizer", nargs="+", default=["SGD"], dest="optimizers")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[16], dest="batches")
    parser.add_argument("--boxes", type=int, nargs="+", default=[16, 64, 96], help="an image")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--data", default="")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--layouts", type=int, default=2, help="how many ways to feed the device are timed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", default="")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo", help="what two processes use")
    parser.add_argument("--folder", type=Path, default=Path(), help="of data sets and runs")
    parser.add_argument("--set", choices=("small", "many", "large"), default="small", dest="size")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--times", type=int, default=16)
    options = parser.parse_args(argv)
    options.model, options.batch_size = options.models[0], options.batches[0]
    module, function = PARTS[options.part].split(":")
    for line in getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)(options):
        print(line if line.startswith("|") else f"figure: {line}", flush=True)


def environment(options: argparse.Namespace) -> Iterator[str]:
    """Prints the machine's hardware and packages, and what it lacks."""
    import torch

    from benchmarks.speed.report import commit, machine

    yield f"{machine()}, Python {platform.python_version()}, commit {commit()}"
    installed = {package.name: package.version for package in metadata.distributions()}
    missing = ", ".join(name for name in PACKAGES if name not in installed)
    found = ", ".join(f"{name} {installed[name]}" for name in PACKAGES if name in installed)
    yield f"{found}; not installed: {missing or 'nothing'}"
    yield f"{shutil.disk_usage('/dev/shm').free / 2**30:.1f} GiB of shared memory free"
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        yield f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, NCCL {nccl}"


def write_data(options: argparse.Namespace) -> Iterator[str]:
    """The demo set, written to ``folder``/small, or with each of its images many times to ``folder``/many or /large."""
    from benchmarks.speed.dataset_copy import copy_dataset
    from data.demo import ensure_demo

    size = options.imgsz
    counts = {"train_images": options.images, "val_images": max(options.images // 4, 4)}
    original = ensure_demo(options.folder / f"demo{size}", size=size, **counts)
    times = 1 if options.size == "small" else options.times
    copy_dataset(str(original), options.folder / options.size, times=times)
    yield f"{options.images * times} training images of {size} px"


if __name__ == "__main__":
    main()
