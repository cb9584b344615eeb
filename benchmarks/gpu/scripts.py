"""Runs train.py, val.py, detect.py and export.py on a GPU as a user would: scores, which must be those of the CPU, a
process that only validates, the largest batch, and the speed of a training."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from benchmarks.command import end_of, run_process
from benchmarks.speed.compare import Sides, our_command, peer_command
from data.dataset.yaml_file import load_dataset_spec
from data.listing.listing import list_split

SAME_SCORE = 0.01  # AP over few images changes if a single box falls on the other side of a threshold
SUFFIXES = {"onnx": ".onnx", "torchscript": ".torchscript", "pt2": ".pt2"}  # suffixes of exported files, by format
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
OPTIMIZER = "SGD"  # optimizer of timed trainings, on both sides


def run_script(options: argparse.Namespace, *command: object, device: str = "") -> str:
    """Runs a script, prints its output and returns it. ``device`` overrides the device of the options. Raises
    SystemExit if the script fails."""
    output = run_process([sys.executable, *command, "--device", device or options.device])
    print(output, flush=True)
    return output


def run_train(options: argparse.Namespace, project: Path, name: str, *flags: object) -> str:
    """Trains (`run_script`) with the data, the model and the image size of the options."""
    return run_script(
        options, "train.py", "--data", options.data, "--model", options.model, "--imgsz", options.imgsz, "--noplots",
        "--project", project, "--name", name, "--exist-ok", *flags,
    )  # fmt: skip


def scores(options: argparse.Namespace, weights: Path, *flags: str, device: str = "") -> dict:
    """Returns the content of val.py's results.json."""
    project = options.folder / "val"
    command = ["val.py", "--weights", weights, "--project", project, "--name", "exp", "--exist-ok", "--noplots"]
    run_script(options, *command, *flags, device=device)
    return json.loads((project / "exp" / "results.json").read_text())


def describe_scores(found: dict) -> str:
    """Returns the scores of a results.json; the precision of a model that detects nothing is undefined (null)."""
    shown = {name: found[name] for name in ("precision", "recall", "ap50", "ap")}
    return ", ".join(f"{name} {'undefined' if score is None else f'{score:.4f}'}" for name, score in shown.items())


def validate(options: argparse.Namespace) -> Iterator[str]:
    """Yields val.py's scores. Raises SystemExit if a GPU's scores differ from the CPU's, or if the AP is below
    ``--at-least``."""
    on_device = scores(options, options.weights)
    yield f"val.py: {describe_scores(on_device)}"
    if options.device != "cpu":
        expected = scores(options, options.weights, device="cpu")
        yield f"val.py on the CPU: {describe_scores(expected)}"
        if any(abs(on_device[name] - expected[name]) > SAME_SCORE for name in ("ap50", "ap")):
            sys.exit(f"scores differ by more than {SAME_SCORE} from the CPU's")
    if on_device["ap"] < options.at_least:
        sys.exit(f"AP {on_device['ap']:.4f} after training on the device, at least {options.at_least} expected")


def detect(options: argparse.Namespace) -> Iterator[str]:
    """Yields the number of validation images in which detect.py finds objects."""
    source = Path(options.data).parent / "images" / "val"
    project = options.folder / "detect"
    run_script(options, "detect.py", "--weights", options.weights, "--source", source, "--conf-thres", "0.01",
               "--save-txt", "--project", project, "--name", "exp", "--exist-ok")  # fmt: skip
    yield f"detections in {len(list(project.rglob('exp/labels/*.txt')))} of {len(list(source.iterdir()))} images"


def exported(options: argparse.Namespace) -> Iterator[str]:
    """Exports a trained model on the CPU and yields the AP of each file on the device. Raises SystemExit if an AP
    differs from the checkpoint's, or if the latter is below ``--at-least``: equal scores would then prove nothing."""
    formats = list(SUFFIXES)
    absent = [package for package in ONNX_PACKAGES if importlib.util.find_spec(package) is None]
    if absent:
        formats.remove("onnx")
        yield f"no ONNX file: {', '.join(absent)} not installed"
    run_script(options, "export.py", "--weights", options.weights, "--format", *formats, "--no-check", device="cpu")
    expected = scores(options, options.weights)["ap"]
    yield f"checkpoint: AP {expected:.4f}"
    problems = []
    if expected < options.at_least:
        problems.append(f"the checkpoint's AP is {expected:.4f}, at least {options.at_least} expected")
    for name in formats:
        try:
            ap = scores(options, options.weights.with_suffix(SUFFIXES[name]), "--trust")["ap"]
        except SystemExit as error:  # the other files are still worth scoring
            problems.append(f"{name}: {end_of(error)}")
            continue
        yield f"{name}: AP {ap:.4f}"
        if abs(ap - expected) > SAME_SCORE:
            problems.append(f"{name}: AP {ap:.4f}, the checkpoint's is {expected:.4f}")
    if problems:
        sys.exit("; ".join(problems))


def validate_elsewhere(options: argparse.Namespace) -> Iterator[str]:
    """Trains in one process while another one validates (``--eval-ranks``), and yields train.py's log lines about the
    latter. Raises SystemExit if the validating process ended early: training then goes on and validates itself."""
    output = run_train(
        options, options.folder / "runs", "validated-elsewhere", "--batch-size", options.batch_size, "--epochs",
        options.epochs, "--amp", options.amp, "--spawn", "2", "--eval-ranks", "1", "--workers", "2",
    )  # fmt: skip
    lines = [line for line in output.splitlines() if "--eval-ranks" in line]
    yield from lines
    failures = [line for line in lines if "validate from now on" in line]
    if failures:
        sys.exit(failures[0])


def largest_batch(options: argparse.Namespace) -> Iterator[str]:
    """Trains with ``--batch-size -1``, and times the step at the found batch size in a new process."""
    project = options.folder / "runs"
    run_train(options, project, "largest", "--batch-size", "-1", "--epochs", "1", "--val-every", "0")
    options.batch_size = yaml.safe_load((project / "largest" / "settings.yaml").read_text())["config"]["batch_size"]
    yield f"batch {options.batch_size}: the step in a new process {step_rate(options):.0f} images/s"


def time_training(options: argparse.Namespace) -> Iterator[str]:
    """Yields images per second of the step alone, of a training on ``--data`` with images cached in memory, and of the
    peer's training, and their ratios. Raises SystemExit if one of them fails."""
    case = f"{options.model} batch {options.batch_size} {OPTIMIZER}"
    alone = step_rate(options)
    yield f"{case}: step alone, in a run too short for cuDNN's search, {alone:.0f} images/s"
    ratio = ""
    problems = []
    try:
        rate, waiting = our_speed(options)
        yield f"{case}: {rate:.0f} images/s, {rate / alone:.2f} of the step alone; waits for data {waiting:.0%}"
    except SystemExit as error:  # the peer's figure is still worth having
        rate = 0.0
        problems.append(end_of(error))
    if options.peer:
        try:
            peer = peer_speed(options)
            ratio = f"; ours is {rate / peer:.2f} times as fast" if rate else ""
            yield f"{case}, Ultralytics: {peer:.0f} images/s{ratio}"
        except SystemExit as error:
            problems.append(f"Ultralytics: {end_of(error)}")
    if problems:
        sys.exit("; ".join(problems))


def step_rate(options: argparse.Namespace) -> float:
    """Returns images per second of the step alone, in a process of its own.

    cuDNN does not search for the fastest kernels, because the trainings here have too few batches for that.
    """
    steps = 1 if options.device == "cpu" else 20
    command = our_command(
        "step", imgsz=options.imgsz, device=options.device, steps=steps, optimizer=OPTIMIZER, is_short=True
    )
    with Sides({"ours": command}) as sides:
        turn = sides.measure("ours", model=options.model, batch_size=options.batch_size)
    if "error" in turn:
        sys.exit(turn["error"])
    return options.batch_size / turn["seconds"]


def our_speed(options: argparse.Namespace) -> tuple[float, float]:
    """Returns images per second (`epoch_rate`), and the fraction of the time in which the loop waits for data."""
    with tempfile.TemporaryDirectory() as folder:
        run_train(
            options, Path(folder), "exp", "--batch-size", options.batch_size, "--epochs", options.epochs + 1,
            "--optimizer", OPTIMIZER, "--workers", worker_count(), "--val-every", "0", "--cache", "ram", "--cache-dir",
            Path(folder, "index"), "--set", "close_mosaic=0", "close_scale=0",
        )  # fmt: skip
        rows = read_csv(Path(folder, "exp", "results.csv"))
    waiting = statistics.median(float(row["speed/data_wait"]) for row in rows[1:-1])
    return epoch_rate(options.data, rows), waiting


def peer_speed(options: argparse.Namespace) -> float:
    """Returns images per second of the peer's training (`epoch_rate`)."""
    with tempfile.TemporaryDirectory() as folder:
        command = peer_command(
            options.peer, "train", data=options.data, model=f"{options.model}.yaml", imgsz=options.imgsz,
            batch_size=options.batch_size, workers=worker_count(), device=options.device, epochs=options.epochs + 1,
            cache="ram", project=folder, optimizer=OPTIMIZER, close_mosaic=0,
        )  # fmt: skip
        print(run_process(command), flush=True)
        return epoch_rate(options.data, read_csv(next(Path(folder).rglob("results.csv"))))


def epoch_rate(data: str, rows: list[dict[str, str]]) -> float:
    """Returns images per second without the first epoch, which includes startup, and the last, which ends with a
    validation.

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


def worker_count() -> int:
    return max(1, min((os.cpu_count() or 2) - 2, 14))
