"""Proves that the numbers of processes and workers do not change a single bit of a training.

    python -m benchmarks.same_bits --data bccd.yaml

Trains yolov8n and yolov5n (160 px, global batch 16, 4 virtual ranks, mosaic, mixup, HSV, multi-scale, float32) with SGD
and Muon for three epochs on 1, 2 and 4 gloo processes with 0, 1 and 4 workers, and compares weights, EMA, optimizer
state and batch norm buffers. Then yolov8n at 320 px with default settings except for 4 virtual ranks, ten epochs on 1
and on 2 processes: the same results.csv except for times, the same best.pt. ``--only`` selects one of the two.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from utils.files.checkpoint import read_checkpoint

ROOT = Path(__file__).parents[1]
COMPARED = ("model", "ema", "optimizer")
LAYOUTS = ((1, 0), (2, 1), (4, 4))  # processes, workers


def leaves(value, where: str = ""):
    """Tensors and numbers of nested plain data, with their places."""
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from leaves(item, f"{where}[{number}]")
    else:
        yield where, value


def differences(a: dict, b: dict) -> list[str]:
    """Paths at which two checkpoints are not bitwise equal."""
    ours, theirs = (dict(leaves({key: content[key] for key in COMPARED})) for content in (a, b))
    if ours.keys() != theirs.keys():
        return sorted(ours.keys() ^ theirs.keys())
    same = (torch.equal(v, theirs[k]) if isinstance(v, torch.Tensor) else v == theirs[k] for k, v in ours.items())
    return [key for key, equal in zip(ours, same) if not equal]


def train(folder: Path, processes: int, *flags: str) -> Path:
    """The folder of a run of train.py, one thread a process, of 4 virtual ranks and a global batch of 16."""
    name = f"{len(list(folder.iterdir()))}-{processes}"
    launch = [sys.executable]
    if processes > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [
        *launch, "train.py", "--batch-size", "16", "--virtual-ranks", "4", "--deterministic", "--device", "cpu",
        "--threads", "1",
        "--noplots", "--project", str(folder), "--name", name, *flags,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return folder / name


def compare_layouts(data: str, epochs: int) -> bool:
    every = True
    with tempfile.TemporaryDirectory() as folder:
        for model in ("yolov8n", "yolov5n"):
            for optimizer in ("SGD", "Muon"):
                flags = ["--data", data, "--model", model, "--optimizer", optimizer, "--imgsz", "160", "--amp", "off",
                         "--epochs", str(epochs), "--multi-scale", "--val-every", "0",
                         "--set", "mixup=0.5", "close_mosaic=0", "close_scale=0"]  # fmt: skip
                runs = [
                    read_checkpoint(train(Path(folder), processes, *flags, "--workers", str(workers)) / "last.pt")
                    for processes, workers in LAYOUTS
                ]
                for layout, content in zip(LAYOUTS[1:], runs[1:]):
                    differing = differences(runs[0], content)
                    verdict = "the same bits" if not differing else f"{len(differing)} differ: {differing[:3]}"
                    steps = content["progress"]["step"]
                    print(f"{model} {optimizer}: 1 process against {layout[0]}, {steps} steps: {verdict}", flush=True)
                    every &= not differing
    return every


def compare_runs(data: str, epochs: int = 10) -> bool:
    """A run as users see it: scored after each epoch, on one process and on two."""

    def table(run: Path) -> list[dict[str, str]]:
        with open(run / "results.csv", encoding="utf-8", newline="") as file:
            return [
                {k: v for k, v in row.items() if not k.startswith(("time", "speed/"))} for row in csv.DictReader(file)
            ]

    with tempfile.TemporaryDirectory() as folder:
        flags = ["--data", data, "--model", "yolov8n", "--imgsz", "320", "--epochs", str(epochs)]
        one, two = (train(Path(folder), processes, *flags) for processes in (1, 2))
        rows = table(one) == table(two)
        best = [read_checkpoint(run / "best.pt") for run in (one, two)]
        differing = [name for name, value in best[0]["ema"].items() if not torch.equal(value, best[1]["ema"][name])]
        verdict, epoch = "the same" if rows else "differs", best[0]["progress"]["best_epoch"]
        ap = [table(run)[-1]["metrics/AP"] for run in (one, two)]
        print(f"{epochs} epochs, 1 process against 2: results.csv {verdict}, last AP {ap[0]} and {ap[1]}; best.pt of "
              f"epoch {epoch}: {len(differing)} of {len(best[0]['ema'])} tensors differ", flush=True)  # fmt: skip
        return rows and not differing and best[0]["progress"] == best[1]["progress"]


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.same_bits", description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="data set YAML")
    parser.add_argument("--only", choices=("bits", "run"))
    options = parser.parse_args()
    parts = {
        "bits": lambda: compare_layouts(options.data, epochs=3),
        "run": lambda: compare_runs(options.data),
    }
    same = [part() for name, part in parts.items() if options.only in (None, name)]
    sys.exit(0 if all(same) else 1)


if __name__ == "__main__":
    main()
