"""Checks that the number of processes, or a change of the code, does not change a single bit of a training.

    python -m benchmarks.same_bits --data bccd.yaml
    git worktree add ../before main && python -m benchmarks.same_bits --data bccd.yaml --against ../before

Trains yolov8n and yolov5n (160 px, global batch 16, 4 virtual ranks, mosaic, mixup, HSV, multi-scale, float32) with SGD
and Muon for three epochs, and compares weights, EMA, optimizer state and batch norm buffers: on 1, 2 and 4 gloo
processes with 0, 1 and 4 workers, or on one process with this checkout and with another one. Then yolov8n at 320 px
with default settings except for 4 virtual ranks, ten epochs on 1 and on 2 processes, or with both checkouts: the same
results.csv except for times, the same best.pt. ``--only`` selects one of the two parts.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from utils.files.checkpoint_file import read_checkpoint

ROOT = Path(__file__).parents[1]
COMPARED = ("model", "ema", "optimizer")


class Side(NamedTuple):
    """A way to run a training: processes, workers and checkout."""

    processes: int
    workers: int = 0
    root: Path = ROOT

    def __str__(self) -> str:
        return str(self.root) if self.root != ROOT else f"{self.processes} processes"


def leaves(value, where: str = ""):
    """Yields tensors and numbers of nested plain data, with their places."""
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from leaves(item, f"{where}[{number}]")
    else:
        yield where, value


def differences(a: dict, b: dict) -> list[str]:
    """Returns the paths at which two checkpoints are not bitwise equal."""
    ours, theirs = (dict(leaves({key: content[key] for key in COMPARED})) for content in (a, b))
    if ours.keys() != theirs.keys():
        return sorted(ours.keys() ^ theirs.keys())
    same = (torch.equal(v, theirs[k]) if isinstance(v, torch.Tensor) else v == theirs[k] for k, v in ours.items())
    return [key for key, equal in zip(ours, same) if not equal]


def train(folder: Path, side: Side, *flags: str) -> Path:
    """Runs train.py, one thread a process, with 4 virtual ranks and a global batch of 16. Returns the run's folder."""
    name = str(len(list(folder.iterdir())))
    launch = [sys.executable]
    if side.processes > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(side.processes)]
    command = [
        *launch, "train.py", "--batch-size", "16", "--virtual-ranks", "4", "--deterministic", "--device", "cpu",
        "--threads", "1", "--workers", str(side.workers), "--noplots", "--project", str(folder), "--name", name, *flags,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=side.root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return folder / name


def compare_bits(data: str, sides: Sequence[Side], epochs: int = 3) -> bool:
    every = True
    with tempfile.TemporaryDirectory() as folder:
        for model in ("yolov8n", "yolov5n"):
            for optimizer in ("SGD", "Muon"):
                flags = ["--data", data, "--model", model, "--optimizer", optimizer, "--imgsz", "160", "--amp", "off",
                         "--epochs", str(epochs), "--multi-scale", "--val-every", "0",
                         "--set", "mixup=0.5", "close_mosaic=0", "close_scale=0"]  # fmt: skip
                runs = [read_checkpoint(train(Path(folder), side, *flags) / "last.pt") for side in sides]
                for side, content in zip(sides[1:], runs[1:]):
                    differing = differences(runs[0], content)
                    verdict = "the same bits" if not differing else f"{len(differing)} differ: {differing[:3]}"
                    steps = content["progress"]["step"]
                    print(f"{model} {optimizer}: 1 process against {side}, {steps} steps: {verdict}", flush=True)
                    every &= not differing
    return every


def compare_runs(data: str, sides: Sequence[Side], epochs: int = 10) -> bool:
    """Compares runs as users see them: scored after each epoch."""

    def table(run: Path) -> list[dict[str, str]]:
        with open(run / "results.csv", encoding="utf-8", newline="") as file:
            return [
                {k: v for k, v in row.items() if not k.startswith(("time", "speed/"))} for row in csv.DictReader(file)
            ]

    with tempfile.TemporaryDirectory() as folder:
        flags = ["--data", data, "--model", "yolov8n", "--imgsz", "320", "--epochs", str(epochs)]
        one, two = (train(Path(folder), side, *flags) for side in sides[:2])
        rows = table(one) == table(two)
        best = [read_checkpoint(run / "best.pt") for run in (one, two)]
        differing = [name for name, value in best[0]["ema"].items() if not torch.equal(value, best[1]["ema"][name])]
        verdict, epoch = "the same" if rows else "differs", best[0]["progress"]["best_epoch"]
        ap = [table(run)[-1]["metrics/AP"] for run in (one, two)]
        print(f"{epochs} epochs, 1 process against {sides[1]}: results.csv {verdict}, last AP {ap[0]} and {ap[1]}; "
              f"best.pt of epoch {epoch}: {len(differing)} of {len(best[0]['ema'])} tensors differ",
              flush=True)  # fmt: skip
        return rows and not differing and best[0]["progress"] == best[1]["progress"]


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.same_bits", description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="data set YAML")
    parser.add_argument("--only", choices=("bits", "run"))
    parser.add_argument("--against", type=Path, help="folder of another checkout, to compare this one with")
    options = parser.parse_args()
    sides = [Side(1), Side(2, 1), Side(4, 4)]
    if options.against:
        sides = [Side(1), Side(1, root=options.against.absolute())]
    parts = {"bits": compare_bits, "run": compare_runs}
    same = [part(options.data, sides) for name, part in parts.items() if options.only in (None, name)]
    sys.exit(0 if all(same) else 1)


if __name__ == "__main__":
    main()
