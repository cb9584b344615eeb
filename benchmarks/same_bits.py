"""Checks that the number of processes, or a change to the code, does not change a single bit of a training run.

    python -m benchmarks.same_bits --data bccd.yaml
    git worktree add --detach ../before main && python -m benchmarks.same_bits --data bccd.yaml --against ../before

Trains yolov8n and yolov5n (160 px, global batch 16, 4 virtual ranks, mosaic, mixup, HSV, multi-scale, float32) with SGD
and Muon for three epochs, and compares weights, EMA, optimizer state and batch norm buffers: on 1, 2 and 4 gloo
processes with 0, 1 and 4 workers, or on one process with this checkout and another one. Then trains yolov8n at 320 px
with default settings except for 4 virtual ranks, for ten epochs on 1 and 2 processes, or with both checkouts, and
compares results.csv, except for times, and best.pt. ``--only`` selects one of the two parts.
"""

from __future__ import annotations

import csv
import itertools
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.command import ROOT, parse_flags, run_benchmark, run_process
from utils.errors import UserError
from utils.files.torch_file import read_checkpoint

COMPARED = ("model", "ema", "optimizer")
# Flags of all runs, and additional flags of the runs whose checkpoints are compared.
FLAGS = shlex.split("--batch-size 16 --virtual-ranks 4 --deterministic --device cpu --threads 1 --noplots")
SHORT_RUN = shlex.split(
    "--imgsz 160 --amp off --epochs 3 --multi-scale --val-every 0 --set mixup=0.5 close_mosaic=0 close_scale=0"
)


class Setup(NamedTuple):
    """A way to run a training: processes, workers and checkout."""

    processes: int
    workers: int = 0
    root: Path = ROOT

    def __str__(self) -> str:
        if self.root != ROOT:
            return str(self.root)
        return "1 process" if self.processes == 1 else f"{self.processes} processes"


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the place and the value of each tensor and number in nested plain data."""
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from leaves(item, f"{place}[{number}]")
    else:
        yield place, value


def differences(a: dict, b: dict) -> list[str]:
    """Returns the places at which two checkpoints' model, average and optimizer do not have the same bits."""
    return unequal_places(*({key: content[key] for key in COMPARED} for content in (a, b)))


def unequal_places(a: dict, b: dict) -> list[str]:
    """Returns the places at which nested plain data differs, or at which only one of the two has a value."""
    leaves_a = dict(leaves(a))
    leaves_b = dict(leaves(b))
    if leaves_a.keys() != leaves_b.keys():
        return sorted(leaves_a.keys() ^ leaves_b.keys())
    return [place for place, value in leaves_a.items() if not have_same_bits(value, leaves_b[place])]


def have_same_bits(a: Any, b: Any) -> bool:
    """Returns whether two tensors, or two plain values, have the same type, shape and bits: 0.0 is not -0.0, and nan is
    nan."""
    if not isinstance(a, torch.Tensor):
        return repr(a) == repr(b)
    if not isinstance(b, torch.Tensor) or (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(tensor.cpu().reshape(-1).view(torch.uint8) for tensor in (a, b)))


def train(folder: Path, setup: Setup, *flags: str) -> Path:
    """Runs train.py with one thread per process, 4 virtual ranks and a global batch of 16. Returns the run's folder.

    Raises SystemExit, with train.py's errors, if it fails.
    """
    name = str(len(list(folder.iterdir())))
    command = [sys.executable]
    if setup.processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(setup.processes)]
    command += [str(setup.root / "train.py"), *FLAGS, "--workers", str(setup.workers)]
    command += ["--project", str(folder), "--name", name, *flags]
    # Both checkouts run in the working folder, so that relative paths mean the same files.
    run_process(command, folder=Path.cwd(), OMP_NUM_THREADS="1")
    return folder / name


def compare_bits(data: str, setups: Sequence[Setup]) -> bool:
    """Trains two models with two optimizers in each setup, and prints which checkpoints differ. Returns whether none
    does."""
    are_equal = True
    with tempfile.TemporaryDirectory() as folder:
        for model, optimizer in itertools.product(("yolov8n", "yolov5n"), ("SGD", "Muon")):
            flags = ["--data", data, "--model", model, "--optimizer", optimizer, *SHORT_RUN]
            first, *others = (read_checkpoint(train(Path(folder), setup, *flags) / "last.pt") for setup in setups)
            for setup, content in zip(setups[1:], others):
                places = differences(first, content)
                verdict = f"{len(places)} differ: {places[:3]}" if places else "the same bits"
                steps = content["progress"]["updates"]
                print(f"{model} {optimizer}: {setups[0]} against {setup}, {steps} steps: {verdict}", flush=True)
                are_equal = are_equal and not places
    return are_equal


def compare_runs(data: str, setups: Sequence[Setup]) -> bool:
    """Compares whole runs in the first two setups, scored after each epoch: results.csv and best.pt. Prints what
    differs, and returns whether nothing does."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--data", data, "--model", "yolov8n", "--imgsz", "320", "--epochs", "10"]
        runs = [train(Path(folder), setup, *flags) for setup in setups[:2]]
        rows = [_results_without_times(run) for run in runs]
        first, second = ({key: read_checkpoint(run / "best.pt")[key] for key in ("ema", "progress")} for run in runs)
    places = unequal_places(first, second)
    verdict = f"{len(places)} places differ: {places[:3]}" if places else "the same"
    scores = f"{rows[0][-1]['metrics/AP']} and {rows[1][-1]['metrics/AP']}"
    print(f"10 epochs, {setups[0]} against {setups[1]}: best.pt of epoch {first['progress']['best_epoch']}: {verdict}")
    print(f"results.csv {'the same' if rows[0] == rows[1] else 'differs'}, last AP {scores}", flush=True)
    return rows[0] == rows[1] and not places


def _results_without_times(run: Path) -> list[dict[str, str]]:
    """Reads the rows of a run's results.csv, without the columns that depend on the speed of the machine."""
    with open(run / "results.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{key: row[key] for key in row if not key.startswith(("time", "speed/"))} for row in rows]


def main() -> None:
    options = parse_flags(
        "same_bits",
        __doc__,
        data={"help": "data set of train.py: YAML, folder, or name in configs/data"},
        only={"choices": ("bits", "run"), "help": "short runs, or the whole run; default: both"},
        against={"type": Path, "help": "folder of another checkout to compare with"},
    )
    setups = [Setup(1), Setup(2, 1), Setup(4, 4)]
    if options.against:
        other = Setup(1, root=options.against.absolute())
        if not (other.root / "train.py").is_file():
            raise UserError(f"--against {options.against}: no checkout, it has no train.py")
        setups = [Setup(1), other]
    parts = {"bits": compare_bits, "run": compare_runs}
    same = [part(options.data, setups) for name, part in parts.items() if options.only in (None, name)]
    sys.exit(0 if all(same) else 1)


if __name__ == "__main__":
    run_benchmark(main)
