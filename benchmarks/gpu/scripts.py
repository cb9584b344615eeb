"""Runs the scripts on a GPU as a user would: scores of validation, detection and exported files; a batch size found by
train.py; scores from a process that only validates; and the speed of whole trainings, relative to the step alone and to
the peer with the same optimizer.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from benchmarks.speed.step import ERROR_WIDTH, Sides
from benchmarks.speed.training_step import context_of
from benchmarks.speed.turns import PEER_SIDE, ROOT

SAME_SCORE = 0.01  # AP over few images changes if a single box falls on the other side of a threshold
SUFFIXES = {"onnx": ".onnx", "torchscript": ".torchscript", "pt2": ".pt2"}  # of exported files, by format
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
OPTIMIZER = "SGD"  # optimizer of timed trainings, on both sides
# Flags by the way in which timed trainings get their images; `FALLBACK` is timed only if no other way works.
FEEDS = {
    "images from workers, cache ram": ["--cache", "ram"],
    "images rendered on the device, cache device": ["--render-on", "device", "--cache", "device"],
}
FALLBACK = "images from workers, no cache"


def run(options: argparse.Namespace, *command: str, device: str = "") -> str:
    """Runs a script, prints its output and returns it. ``device`` overrides the device of the options. Raises
    SystemExit if the script fails."""
    done = subprocess.run(
        [sys.executable, *command, "--device", device or options.device],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    print(done.stdout, flush=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}")
    return done.stdout


def end_of(error: SystemExit) -> str:
    """Returns the end of an error's message, on one line."""
    return " ".join(str(error).split())[-ERROR_WIDTH:]


def scores(options: argparse.Namespace, weights: Path, *flags: str, device: str = "") -> dict:
    """Returns the content of val.py's results.json."""
    project = options.folder / "val"
    run(options, "val.py", "--weights", str(weights), "--project", str(project), "--name", "exp", "--exist-ok",
        "--noplots", *flags, device=device)  # fmt: skip
    return json.loads((project / "exp" / "results.json").read_text())


def described(found: dict) -> str:
    return ", ".join(f"{name} {found[name]:.4f}" for name in ("precision", "recall", "ap50", "ap"))


def validate(options: argparse.Namespace) -> Iterator[str]:
    """Yields val.py's scores in float32, with ``--variants`` also in the type of ``--amp auto`` and with test-time
    augmentation. Raises SystemExit if a GPU's scores differ from the CPU's, or if the AP is below ``--at-least``."""
    found = scores(options, options.weights)
    yield f"val.py: {described(found)}"
    if options.variants:
        yield f"val.py --amp auto: {described(scores(options, options.weights, '--amp', 'auto'))}"
        yield f"val.py --tta: {described(scores(options, options.weights, '--tta'))}"
    if options.device != "cpu":
        expected = scores(options, options.weights, device="cpu")
        yield f"val.py on the CPU: {described(expected)}"
        if any(abs(found[name] - expected[name]) > SAME_SCORE for name in ("ap50", "ap")):
            sys.exit(f"scores differ by more than {SAME_SCORE} from the CPU's")
    if found["ap"] < options.at_least:
        sys.exit(f"AP {found['ap']:.4f} after training on the device, at least {options.at_least} expected")


def detect(options: argparse.Namespace) -> Iterator[str]:
    """Yields the number of validation images in which detect.py finds objects."""
    source = Path(options.data).parent / "images" / "val"
    project = options.folder / "detect"
    run(options, "detect.py", "--weights", str(options.weights), "--source", str(source), "--project", str(project),
        "--name", "exp", "--exist-ok", "--conf-thres", "0.01", "--save-txt")  # fmt: skip
    yield f"detections in {len(list(project.rglob('exp/labels/*.txt')))} of {len(list(source.iterdir()))} images"


def exported(options: argparse.Namespace) -> Iterator[str]:
    """Exports a trained model on the CPU and yields the AP of each file on the device. Raises SystemExit if an AP
    differs from the checkpoint's, or if the latter is below ``--at-least``: equal scores would then prove nothing."""
    formats = list(SUFFIXES)
    absent = [package for package in ONNX_PACKAGES if importlib.util.find_spec(package) is None]
    if absent:
        formats.remove("onnx")
        yield f"no ONNX file: {', '.join(absent)} not installed"
    run(options, "export.py", "--weights", str(options.weights), "--format", *formats, "--no-check", device="cpu")
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


def score_of_weights(options: argparse.Namespace) -> Iterator[str]:
    """Yields how well trained weights find the training objects, which determines ``lr_mult``. Raises SystemExit if the
    device's score differs from the CPU's, or is below ``--at-least``."""
    from benchmarks.gpu.bits import open_loader
    from engine.assembly.lr_probe import MAX_PROBE_IMAGES, score_on_objects
    from models.weights.load import load_detector

    found = {}
    for device in dict.fromkeys((options.device, "cpu")):
        ctx = context_of(device)
        detector = load_detector(options.weights)[0].eval().fuse().to(ctx.device)
        loader = open_loader(options, ctx)
        started = time.monotonic()
        found[device], objects = score_on_objects(detector, loader.samples, MAX_PROBE_IMAGES, ctx)
        yield f"device {device}: {found[device]:.5f} of {objects} objects, {time.monotonic() - started:.1f} s"
        loader.close()
    if abs(found[options.device] - found["cpu"]) > SAME_SCORE:
        sys.exit("the scores differ")
    if found["cpu"] < options.at_least:
        sys.exit(f"the score is {found['cpu']:.5f}, at least {options.at_least} expected of trained weights")


def validate_elsewhere(options: argparse.Namespace) -> Iterator[str]:
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
    run(options, "train.py", "--data", options.data, "--model", options.model, "--imgsz", str(options.imgsz),
        "--batch-size", "-1", "--epochs", "1", "--val-every", "0", "--noplots", "--project", str(project), "--name",
        "largest", "--exist-ok")  # fmt: skip
    options.batch_size = yaml.safe_load((project / "largest" / "settings.yaml").read_text())["config"]["batch_size"]
    yield f"batch {options.batch_size}: the step in a new process {step_rate(options):.0f} images/s"


def time_training(options: argparse.Namespace) -> Iterator[str]:
    """Yields images per second of the step alone, of trainings on ``--data`` with the first ``--layouts`` of `FEEDS`,
    and of the peer's training, and their ratios. Raises SystemExit if one of them fails."""
    case = f"{options.model} batch {options.batch_size} {OPTIMIZER}"
    alone = step_rate(options)
    yield f"{case}: step alone, in a run too short for cuDNN's search, {alone:.0f} images/s"
    rates: list[float] = []
    problems: list[str] = []
    feeds = list(FEEDS)[: options.layouts]
    for feed in (*feeds, FALLBACK):
        if feed == FALLBACK and rates:
            break
        try:
            rate, waiting = our_speed(options, FEEDS.get(feed, []))
        except SystemExit as error:  # the others' figures are still worth having
            problems.append(f"{feed}: {end_of(error)}")
            continue
        rates.append(rate)
        yield f"{case}, {feed}: {rate:.0f} images/s, {rate / alone:.2f} of the step alone; waits for data {waiting:.0%}"
    if options.peer:
        try:
            peer = peer_speed(options)
        except SystemExit as error:
            problems.append(f"Ultralytics: {end_of(error)}")
        else:
            ratio = f"; ours is {rates[0] / peer:.2f} times as fast" if rates else ""
            yield f"{case}, Ultralytics, cache ram: {peer:.0f} images/s{ratio}"
    if problems:
        sys.exit("; ".join(problems))


def step_rate(options: argparse.Namespace) -> float:
    """Returns images per second of the step alone, in a process of its own.

    cuDNN does not search for the fastest kernels, because the trainings here have too few batches for that.
    """
    steps = 1 if options.device == "cpu" else 20
    with Sides(["auto"], imgsz=options.imgsz, device=options.device, steps=steps, short_run=True) as sides:
        turn = sides.measure("auto", model=options.model, batch_size=options.batch_size, optimizer=OPTIMIZER)
    if "error" in turn:
        sys.exit(turn["error"])
    return options.batch_size / turn["seconds"]


def our_speed(options: argparse.Namespace, feed: Sequence[str]) -> tuple[float, float]:
    """Returns images per second (`epoch_rate`), and the fraction of the time in which the loop waits for data.

    ``feed``: flags of train.py.
    """
    with tempfile.TemporaryDirectory() as folder:
        run(options, "train.py", "--data", options.data, "--model", options.model, "--imgsz", str(options.imgsz),
            "--batch-size", str(options.batch_size), "--epochs", str(options.epochs + 1), "--optimizer", OPTIMIZER,
            "--workers", str(workers()), "--val-every", "0", "--noplots", "--cache-dir", str(Path(folder, "index")),
            "--project", folder, "--name", "exp", *feed, "--set", "close_mosaic=0", "close_scale=0")  # fmt: skip
        rows = read_csv(Path(folder, "exp", "results.csv"))
    waiting = statistics.median(float(row["speed/data_wait"]) for row in rows[1:-1])
    return epoch_rate(training_images(options.data), [float(row["time"]) for row in rows]), waiting


def peer_speed(options: argparse.Namespace) -> float:
    """Returns images per second of the peer's training (`epoch_rate`)."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            options.peer, str(PEER_SIDE), "train", "--data", options.data, "--model", f"{options.model}.yaml",
            "--imgsz", str(options.imgsz), "--batch-size", str(options.batch_size), "--workers", str(workers()),
            "--device", options.device, "--epochs", str(options.epochs + 1), "--cache", "ram", "--no-val",
            "--project", folder, "--set", f'optimizer="{OPTIMIZER}"', "close_mosaic=0",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
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


def workers() -> int:
    return max(1, min((os.cpu_count() or 2) - 2, 14))


def training_images(data: str) -> int:
    from data.source.dataset_yaml import load_dataset_spec
    from data.source.files import list_split

    return len(list_split(load_dataset_spec(data), "train").images)
