"""Images per second of a whole training with images cached in memory, compared with Ultralytics and the step alone.

    python -m tools.demo demo/data
    python -m benchmarks.speed.train --data demo/data/data.yaml --copies 32 --workers 14 --device 0 --peer PYTHON

The first epoch, which includes startup, and the last one, which ends with a validation, do not count. The training is
too short for cuDNN's search for the fastest kernels, so the step alone is timed without it, in a process of its own.
The optimizer is SGD on both sides.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.command import parse_flags, positive, run_benchmark, run_process
from benchmarks.dataset_copy import copy_dataset
from benchmarks.speed.compare import Comparison, Sides, our_command, peer_command, show
from data.pairing import list_split
from data.read_spec import load_dataset_spec

OPTIMIZER = "SGD"


def main() -> None:
    options = parse_flags(
        "speed.train",
        __doc__,
        data={},
        copies={"type": positive, "default": 1, "help": "copies of each training image, for a longer epoch"},
        model={"default": "yolov8n", "help": "name of a model, trained from random weights"},
        imgsz={},
        batch_size={"default": 64},
        epochs={"type": positive, "default": 2, "help": "timed epochs"},
        workers={},
        device={},
        peer={},
    )
    with tempfile.TemporaryDirectory(prefix="lockstep-train-") as folder:
        data = copy_dataset(options.data, Path(folder, "data"), times=options.copies)
        case = f"{options.model} batch {options.batch_size} {OPTIMIZER}"
        ours = train_ours(options, data, Path(folder))
        rates = [epoch_rate(data, ours)]
        print(f"{case}: {rates[0]:.0f} images/s", flush=True)  # should the peer fail
        waits = [100 * statistics.median(float(row["speed/data_wait"]) for row in ours[1:-1])]
        peer_rates = [epoch_rate(data, train_peer(options, data, Path(folder)))] if options.peer else []
        rows = [
            Comparison(f"{case}: training", "images/s", rates, peer_rates, higher_is_better=True),
            Comparison(f"{case}: step alone", "images/s", [step_rate(options)], higher_is_better=True),
            Comparison(f"{case}: training waits for data", "%", waits),
        ]
    show(f"Training on {Path(options.data).stem}, {options.imgsz} px, device {options.device}", rows)


def train_ours(options: argparse.Namespace, data: Path, folder: Path) -> list[dict[str, str]]:
    """Trains with train.py. Returns the rows of results.csv."""
    run_process(
        [
            sys.executable, "train.py", "--data", data, "--model", options.model, "--imgsz", options.imgsz,
            "--batch-size", options.batch_size, "--epochs", options.epochs + 2, "--workers", options.workers,
            "--device", options.device, "--optimizer", OPTIMIZER, "--val-every", 0, "--noplots",
            "--cache", "ram", "--cache-dir", folder / "index", "--project", folder, "--name", "ours",
            "--set", "close_mosaic=0", "close_scale=0",
        ]
    )  # fmt: skip
    return read_csv(folder / "ours" / "results.csv")


def train_peer(options: argparse.Namespace, data: Path, folder: Path) -> list[dict[str, str]]:
    """Trains with Ultralytics. Returns the rows of its results.csv."""
    command = peer_command(
        options.peer, "train", data=data, model=f"{options.model}.yaml", imgsz=options.imgsz,
        batch_size=options.batch_size, workers=options.workers, device=options.device, epochs=options.epochs + 2,
        cache="ram", project=folder / "peer", optimizer=OPTIMIZER, close_mosaic=0,
    )  # fmt: skip
    run_process(command)
    return read_csv(next((folder / "peer").rglob("results.csv")))


def step_rate(options: argparse.Namespace) -> float:
    """Returns images per second of our step alone. Raises SystemExit if it fails."""
    steps = 1 if options.device == "cpu" else 20
    command = our_command(
        "step", imgsz=options.imgsz, device=options.device, steps=steps, optimizer=OPTIMIZER, is_short=True
    )
    with Sides({"ours": command}) as sides:
        turn = sides.measure("ours", model=options.model, batch_size=options.batch_size)
    if "error" in turn:
        sys.exit(turn["error"])
    return options.batch_size / turn["seconds"]


def epoch_rate(data: Path, rows: list[dict[str, str]]) -> float:
    """Returns training images per second without the first and the last epoch.

    Args:
        data: YAML of the data set.
        rows: at least three rows of a results.csv, whose time is that from the start of the run.
    """
    images = len(list_split(load_dataset_spec(data), "train").images)
    times = [float(row["time"]) for row in rows]
    return images * (len(times) - 2) / (times[-2] - times[0])


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return [{name.strip(): cell for name, cell in row.items()} for row in csv.DictReader(file)]


if __name__ == "__main__":
    run_benchmark(main)
