"""The scripts on a GPU as a user starts them: what validation, detection and the search for a batch size print;
and whole trainings, their speed, and the fraction of the step's speed that they reach, compared
with the peer's using the same optimizer.
"""

from __future__ import annotations

import argparse
import csv
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

LEAST_AP = 0.7  # of the part that trains, on the demo set
SAME_SCORE = 0.01  # AP of few images: one box that falls on the other side of a threshold moves it


def weights_of(options: argparse.Namespace) -> Path:
    """A checkpoint of the part that trains, or of a separate training."""
    weights = options.folder / "runs" / "plain" / "last.pt"
    if not weights.exists():
        weights = options.folder / "runs" / "own" / "last.pt"
        run(options, "train.py", "--data", options.data, "--model", options.model, "--imgsz", str(options.imgsz),
            "--batch-size", str(options.batch_size), "--epochs", "1", "--noplots", "--project",
            str(options.folder / "runs"), "--name", "own", "--exist-ok")  # fmt: skip
    return weights


def run(options: argparse.Namespace, *command: str, device: str = "") -> str:
    """The output of a script, which is also printed. SystemExit if it fails. ``device`` replaces that of the
    options."""
    done = subprocess.run(
        [sys.executable, *command, "--device", device or options.device],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
    )  # fmt: skip
    print(done.stdout, flush=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}")
    return done.stdout


def validate(options: argparse.Namespace) -> Iterator[str]:
    """By val.py, in float32 and in what ``--amp auto`` takes, with views at test time too. SystemExit if a GPU's scores
    are not the CPU's, or if what the part that trains has trained on it is a poor detector."""
    weights = weights_of(options)
    found = scores(options, weights)
    yield f"val.py: {described(found)}"
    for flags in (["--amp", "auto"], ["--tta"]):
        yield f"val.py {' '.join(flags)}: {described(scores(options, weights, *flags))}"
    if options.device == "cpu":
        return
    expected = scores(options, weights, device="cpu")
    yield f"val.py on the CPU: {described(expected)}"
    if any(abs(found[name] - expected[name]) > SAME_SCORE for name in ("ap50", "ap")):
        sys.exit(f"scores differ by more than {SAME_SCORE} from the CPU's")
    if weights.parent.name == "plain" and found["ap"] < LEAST_AP:
        sys.exit(f"AP {found['ap']:.4f} after training on the GPU, at least {LEAST_AP} expected")


def scores(options: argparse.Namespace, weights: Path, *flags: str, device: str = "") -> dict:
    """The content of val.py's results.json."""
    project = options.folder / "val"
    run(options, "val.py", "--weights", str(weights), "--project", str(project), "--name", "exp", "--exist-ok",
        "--noplots", *flags, device=device)  # fmt: skip
    return json.loads((project / "exp" / "results.json").read_text())


def described(found: dict) -> str:
    return ", ".join(f"{name} {found[name]:.4f}" for name in ("precision", "recall", "ap50", "ap"))


def detect(options: argparse.Namespace) -> Iterator[str]:
    source = options.folder / "small" / "images" / "val"
    project = options.folder / "detect"
    run(options, "detect.py", "--weights", str(weights_of(options)), "--source", str(source), "--project", str(project),
        "--name", "exp", "--exist-ok", "--conf-thres", "0.01", "--save-txt")  # fmt: skip
    yield f"detections in {len(list(project.rglob('exp/labels/*.txt')))} of {len(list(source.iterdir()))} images"


def exported(options: argparse.Namespace) -> Iterator[str]:
    """A TorchScript file, traced on the CPU, is scored on the device. SystemExit if its AP is not the checkpoint's."""
    weights = weights_of(options)
    run(options, "export.py", "--weights", str(weights), "--format", "torchscript", "--no-check", device="cpu")
    files = {"checkpoint": weights, "TorchScript": weights.with_suffix(".torchscript")}
    aps = {what: scores(options, path, "--trust")["ap"] for what, path in files.items()}
    yield ", ".join(f"{what} AP {ap:.4f}" for what, ap in aps.items())
    if abs(aps["checkpoint"] - aps["TorchScript"]) > SAME_SCORE:
        sys.exit("the TorchScript file has another AP")


def score_of_weights(options: argparse.Namespace) -> Iterator[str]:
    """How well weights find the training objects, which decides ``lr_mult``. SystemExit if the CPU's differs."""
    from benchmarks.gpu.bits import open_loader
    from engine.train.lr_probe import IMAGES, score_on_objects
    from models.weights.load import load_detector

    found = {}
    for device in dict.fromkeys((options.device, "cpu")):
        ctx = context_of(device)
        detector = load_detector(weights_of(options))[0].eval().fuse().to(ctx.device)
        loader = open_loader(options, ctx)
        started = time.monotonic()
        found[device], objects = score_on_objects(detector, loader.samples, IMAGES, ctx)
        yield f"device {device}: {found[device]:.5f} of {objects} objects, {time.monotonic() - started:.1f} s"
        loader.close()
    if abs(found[options.device] - found["cpu"]) > SAME_SCORE:
        sys.exit("the scores differ")


def largest_batch(options: argparse.Namespace) -> Iterator[str]:
    """A training with ``--batch-size -1``, and the step at that size in a new process."""
    project = options.folder / "runs"
    run(options, "train.py", "--data", options.data, "--model", options.model, "--imgsz", str(options.imgsz),
        "--batch-size", "-1", "--epochs", "1", "--val-every", "0", "--noplots", "--project", str(project), "--name",
        "largest", "--exist-ok")  # fmt: skip
    options.batch_size = yaml.safe_load((project / "largest" / "settings.yaml").read_text())["config"]["batch_size"]
    yield f"batch {options.batch_size}: the step in a new process {step_rate(options):.0f} images/s"


OPTIMIZER = "SGD"  # on both sides
GOALS = {"step": 0.9, "peer": 2.0}  # of the images a second: times those of the step alone, times the peer's
# What draws the pictures; the first is what train.py does by itself, and the last takes its place if that fails.
LAYOUTS = {
    "pictures from workers, cache ram": ["--cache", "ram"],
    "pictures on the device, cache device": ["--render-on", "device", "--cache", "device"],
    "pictures from workers, no cache": [],
}


def workers() -> int:
    return max(1, min((os.cpu_count() or 2) - 2, 14))


def time_training(options: argparse.Namespace) -> Iterator[str]:
    """Lines of figures about trainings on ``options.data``. SystemExit if one fails or is slower than required."""
    what = f"{options.model} batch {options.batch_size} {OPTIMIZER}"
    alone = step_rate(options)
    yield f"{what}: step alone {alone:.0f} images/s"
    rates: list[float] = []
    wrong: list[str] = []
    preferred, *others, instead = LAYOUTS
    for name in [preferred, *others[: options.layouts - 1], instead]:
        if name == instead and rates:
            continue
        try:
            rate, waiting = our_speed(options, LAYOUTS[name])
        except SystemExit as error:  # the others' figures are still worth having
            wrong.append(f"{name}: {' '.join(str(error).split())[-ERROR_WIDTH:]}")
            continue
        rates.append(rate)
        yield f"{what}, {name}: {rate:.0f} images/s, {rate / alone:.2f} of the step alone; waits for data {waiting:.0%}"
    if not rates:
        sys.exit("; ".join(wrong))
    short = [f"{rates[0] / alone:.2f} of the step alone, {GOALS['step']} wanted"] * (rates[0] < GOALS["step"] * alone)
    if options.peer:
        peer = peer_speed(options)
        yield f"{what}, Ultralytics, cache ram: {peer:.0f} images/s; ours is {rates[0] / peer:.2f} times as fast"
        if rates[0] < GOALS["peer"] * peer:
            short.append(f"{rates[0] / peer:.2f} times as fast as Ultralytics, {GOALS['peer']:g} wanted")
    wrong += short if options.device != "cpu" else []
    if wrong:
        sys.exit("; ".join(wrong))


def step_rate(options: argparse.Namespace) -> float:
    """Images per second of the step alone, in a separate process."""
    steps = 20 if options.device != "cpu" else 1
    with Sides(["auto"], imgsz=options.imgsz, device=options.device, steps=steps) as sides:
        turn = sides.measure("auto", model=options.model, batch_size=options.batch_size, optimizer=OPTIMIZER)
    if "error" in turn:
        sys.exit(turn["error"])
    return options.batch_size / turn["seconds"]


def our_speed(options: argparse.Namespace, flags: Sequence[str]) -> tuple[float, float]:
    """Images per second of the epochs after the first, including the time between epochs, and the fraction of the time
    in which the loop waits for data."""
    with tempfile.TemporaryDirectory() as folder:
        run(options, "train.py", "--data", options.data, "--model", options.model, "--imgsz", str(options.imgsz),
            "--batch-size", str(options.batch_size), "--epochs", str(options.epochs), "--optimizer", OPTIMIZER,
            "--workers", str(workers()), "--val-every", "0", "--noplots", "--cache-dir", str(Path(folder, "index")),
            "--project", folder, "--name", "exp", *flags, "--set", "close_mosaic=0", "close_scale=0")  # fmt: skip
        with open(Path(folder, "exp", "results.csv"), newline="") as file:
            rows = list(csv.DictReader(file))
    times, waiting = ([float(row[name]) for row in rows] for name in ("time", "speed/data_wait"))
    rate = training_images(options.data) * (len(times) - 1) / (times[-1] - times[0])
    return rate, statistics.median(waiting[1:])


def peer_speed(options: argparse.Namespace) -> float:
    """Images per second of the peer's epochs, except the first and the last, which ends with a validation."""
    with tempfile.TemporaryDirectory() as folder:
        side = str(PEER_SIDE)
        command = [options.peer, side, "train", "--data", options.data, "--model", f"{options.model}.yaml"]
        command += ["--imgsz", str(options.imgsz), "--batch-size", str(options.batch_size), "--workers", str(workers())]
        command += ["--device", options.device, "--epochs", str(options.epochs + 1), "--cache", "ram", "--no-val"]
        command += ["--project", folder, "--set", f'optimizer="{OPTIMIZER}"', "close_mosaic=0"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        with open(next(Path(folder).rglob("results.csv")), newline="") as file:
            times = [float({k.strip(): v for k, v in row.items()}["time"]) for row in csv.DictReader(file)]
    return training_images(options.data) * (len(times) - 2) / (times[-2] - times[0])


def training_images(data: str) -> int:
    from data.index.files import list_split
    from data.spec.dataset_yaml import load_dataset_spec

    return len(list_split(load_dataset_spec(data), "train").images)
