"""Whole trainings on a GPU: with a process that only validates, with a batch size that train.py finds, and their speed,
relative to the step alone and to the peer with the same optimizer.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.gpu.run_script import ScriptRunner, run_script
from benchmarks.peer import PEER_SIDE
from benchmarks.processes import end_of, run_process
from benchmarks.speed.step import StepProcesses, step_flags
from data.dataset.yaml_file import load_dataset_spec
from data.listing.listing import list_split

OPTIMIZER = "SGD"  # optimizer of timed trainings, on both sides
# Flags of a timed training by its cache; the second one is timed only if the first one fails.
TIMED_CACHES = {"cache ram": ["--cache", "ram"], "no cache": []}


def validate_elsewhere(options: argparse.Namespace, *, run: ScriptRunner = run_script) -> Iterator[str]:
    """Trains in one process while another one validates (``--eval-ranks``), and yields train.py's log lines about the
    latter. Raises SystemExit if the validating process ended early: training then goes on and validates itself."""
    output = run(
        options, "train.py", "--data", options.data, "--model", options.model, "--imgsz", str(options.imgsz),
        "--batch-size", str(options.batch_size), "--epochs", str(options.epochs), "--amp", options.amp, "--spawn", "2",
        "--eval-ranks", "1", "--workers", "2", "--noplots", "--project", str(options.folder / "runs"), "--name",
        "validated-elsewhere", "--exist-ok",
    )  # fmt: skip
    lines = [line for line in output.splitlines() if "--eval-ranks" in line]
    yield from lines
    failures = [line for line in lines if "validate from now on" in line]
    if failures:
        sys.exit(failures[0])


def largest_batch(options: argparse.Namespace) -> Iterator[str]:
    """Trains with ``--batch-size -1``, and times the step at the found batch size in a new process."""
    project = options.folder / "runs"
    run_script(options, "train.py", "--data", options.data, "--model", options.model, "--imgsz", str(options.imgsz),
        "--batch-size", "-1", "--epochs", "1", "--val-every", "0", "--noplots", "--project", str(project), "--name",
        "largest", "--exist-ok")  # fmt: skip
    options.batch_size = yaml.safe_load((project / "largest" / "settings.yaml").read_text())["config"]["batch_size"]
    yield f"batch {options.batch_size}: the step in a new process {step_rate(options):.0f} images/s"


@dataclass(frozen=True)
class Rates:
    """The functions with which `time_training` measures images per second."""

    step: Callable[[argparse.Namespace], float]  # speed of the step alone
    ours: Callable[[argparse.Namespace, Sequence[str]], tuple[float, float]]  # speed, and the fraction of waiting
    peer: Callable[[argparse.Namespace], float]


def time_training(options: argparse.Namespace, rates: Rates | None = None) -> Iterator[str]:
    """Yields images per second of the step alone, of a training on ``--data``, and of the peer's training, and their
    ratios. Raises SystemExit if one of them fails."""
    case = f"{options.model} batch {options.batch_size} {OPTIMIZER}"
    measure = rates or Rates(step_rate, our_speed, peer_speed)
    alone = measure.step(options)
    yield f"{case}: step alone, in a run too short for cuDNN's search, {alone:.0f} images/s"
    ours: list[float] = []
    problems: list[str] = []
    for cache, flags in TIMED_CACHES.items():
        try:
            rate, waiting = measure.ours(options, flags)
        except SystemExit as error:  # the others' figures are still worth having
            problems.append(f"{cache}: {end_of(error)}")
            continue
        ours.append(rate)
        share = f"{rate / alone:.2f} of the step alone"
        yield f"{case}, {cache}: {rate:.0f} images/s, {share}; waits for data {waiting:.0%}"
        break
    if options.peer:
        try:
            peer = measure.peer(options)
        except SystemExit as error:
            problems.append(f"Ultralytics: {end_of(error)}")
        else:
            ratio = f"; ours is {ours[0] / peer:.2f} times as fast" if ours else ""
            yield f"{case}, Ultralytics, cache ram: {peer:.0f} images/s{ratio}"
    if problems:
        sys.exit("; ".join(problems))


def step_rate(options: argparse.Namespace) -> float:
    """Returns images per second of the step alone, in a process of its own.

    cuDNN does not search for the fastest kernels, because the trainings here have too few batches for that.
    """
    steps = 1 if options.device == "cpu" else 20
    flags = step_flags(imgsz=options.imgsz, device=options.device, steps=steps)
    with StepProcesses(["auto"], flags, own_flags=["--short-run"]) as sides:
        turn = sides.measure("auto", model=options.model, batch_size=options.batch_size, optimizer=OPTIMIZER)
    if "error" in turn:
        sys.exit(turn["error"])
    return options.batch_size / turn["seconds"]


def our_speed(
    options: argparse.Namespace, source_flags: Sequence[str], *, run: ScriptRunner = run_script
) -> tuple[float, float]:
    """Returns images per second (`epoch_rate`), and the fraction of the time in which the loop waits for data.

    ``source_flags``: flags of train.py that choose the source of images.
    """
    with tempfile.TemporaryDirectory() as folder:
        run(options, "train.py", "--data", options.data, "--model", options.model, "--imgsz", str(options.imgsz),
            "--batch-size", str(options.batch_size), "--epochs", str(options.epochs + 1), "--optimizer", OPTIMIZER,
            "--workers", str(worker_count()), "--val-every", "0", "--noplots", "--project", folder, "--name", "exp",
            "--cache-dir", str(Path(folder, "index")), *source_flags,
            "--set", "close_mosaic=0", "close_scale=0")  # fmt: skip
        rows = read_csv(Path(folder, "exp", "results.csv"))
    waiting = statistics.median(float(row["speed/data_wait"]) for row in rows[1:-1])
    return epoch_rate(training_images(options.data), [float(row["time"]) for row in rows]), waiting


def peer_speed(options: argparse.Namespace) -> float:
    """Returns images per second of the peer's training (`epoch_rate`)."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            options.peer, str(PEER_SIDE), "train", "--data", options.data, "--model", f"{options.model}.yaml",
            "--imgsz", str(options.imgsz), "--batch-size", str(options.batch_size), "--workers", str(worker_count()),
            "--device", options.device, "--epochs", str(options.epochs + 1), "--cache", "ram", "--no-val",
            "--project", folder, "--set", f'optimizer="{OPTIMIZER}"', "close_mosaic=0",
        ]  # fmt: skip
        run_process(command)
        rows = read_csv(next(Path(folder).rglob("results.csv")))
    return epoch_rate(training_images(options.data), [float(row["time"]) for row in rows])


def epoch_rate(images: int, times: Sequence[float]) -> float:
    """Returns images per second without the first epoch, which includes startup, and the last, which ends with a
    validation.

    Args:
        images: number of images per epoch.
        times: seconds from the start of a run to the end of each epoch, at least three.
    """
    return images * (len(times) - 2) / (times[-2] - times[0])


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return [{name.strip(): cell for name, cell in row.items()} for row in csv.DictReader(file)]


def worker_count() -> int:
    return max(1, min((os.cpu_count() or 2) - 2, 14))


def training_images(data: str) -> int:
    return len(list_split(load_dataset_spec(data), "train").images)
