"""The scripts on a GPU as a user starts them: what validation, detection and the search for a batch size print; their
rates; and whole trainings, their speed, the GPU utilization, and the fraction of the step's speed that they reach,
compared with the peer's using the same optimizer.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    command = ["val.py", "--weights", str(weights), "--project", str(options.folder / "val"), "--noplots"]
    found = scores(run(options, *command))
    yield f"val.py: {told(found)}"
    for flags in (["--amp", "auto"], ["--tta"]):
        yield f"val.py {' '.join(flags)}: {told(scores(run(options, *command, *flags)))}"
    if options.device == "cpu":
        return
    expected = scores(run(options, *command, device="cpu"))
    yield f"val.py on the CPU: {told(expected)}"
    if any(abs(found[name] - expected[name]) > SAME_SCORE for name in ("AP50", "AP")):
        sys.exit(f"scores differ by more than {SAME_SCORE} from the CPU's")
    if weights.parent.name == "plain" and found["AP"] < LEAST_AP:
        sys.exit(f"AP {found['AP']:.4f} after training on the GPU, at least {LEAST_AP} expected")


def scores(text: str) -> dict[str, float]:
    """The line of all classes in the table that val.py prints."""
    lines = [line.split() for line in text.splitlines()]
    header = next(line for line in lines if line[:1] == ["class"])
    values = next(line for line in lines if line[:1] == ["all"])
    return {name: float(value) for name, value in zip(header[1:], values[1:])}


def told(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {found[name]:.4f}" for name in ("P", "R", "AP50", "AP"))


def detect(options: argparse.Namespace) -> Iterator[str]:
    source = options.folder / "small" / "images" / "val"
    text = run(options, "detect.py", "--weights", str(weights_of(options)), "--source", str(source), "--project",
               str(options.folder / "detect"), "--conf-thres", "0.01", "--save-txt")  # fmt: skip
    yield text.strip().splitlines()[-2]


def exported(options: argparse.Namespace) -> Iterator[str]:
    """A TorchScript file, traced on the CPU, is scored on the device. SystemExit if its AP is not the checkpoint's."""
    weights = weights_of(options)
    run(options, "export.py", "--weights", str(weights), "--format", "torchscript", "--no-check", device="cpu")
    project = ["--project", str(options.folder / "val"), "--noplots", "--exist-ok", "--trust"]
    files = {"checkpoint": weights, "TorchScript": weights.with_suffix(".torchscript")}
    aps = {what: scores(run(options, "val.py", "--weights", str(path), *project))["AP"] for what, path in files.items()}
    yield ", ".join(f"{what} AP {ap:.4f}" for what, ap in aps.items())
    if abs(aps["checkpoint"] - aps["TorchScript"]) > SAME_SCORE:
        sys.exit("the TorchScript file has another AP")


def score_of_weights(options: argparse.Namespace) -> Iterator[str]:
    """How well weights find the training objects, which decides ``lr_mult``. SystemExit if the CPU's differs."""
    from benchmarks.gpu.bits import open_loader
    from engine.optim.pretrained_rate import IMAGES, score_on_objects
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


def rates(options: argparse.Namespace) -> Iterator[str]:
    """Images per second of val.py and detect.py without the time to start: of the training images, which are many, less
    that of the validation images."""
    images = Path(options.data).parent / "images"
    more = len(list(images.rglob("train/**/*.jpg"))) - len(list(images.rglob("val/*.jpg")))
    shared = ["--weights", str(weights_of(options)), "--project", str(options.folder / "rates"), "--exist-ok"]
    commands = {
        "val.py": lambda split: ["--data", options.data, "--task", split, "--noplots", "--batch-size",
                                 str(options.batch_size)],
        "detect.py": lambda split: ["--source", str(images / split / "**" / "*.jpg")],
    }  # fmt: skip
    for script, flags in commands.items():
        seconds = []
        for split in ("val", "train"):
            started = time.monotonic()
            run(options, script, *flags(split), *shared)
            seconds.append(time.monotonic() - started)
        longer = seconds[1] - seconds[0]
        yield f"{script}: {more / max(longer, 1e-3):.0f} images/s ({more} images more take {longer:.1f} s more)"


def largest_batch(options: argparse.Namespace) -> Iterator[str]:
    """A training with ``--batch-size -1``, and the step at that size in a new process."""
    project = options.folder / "runs"
    text = run(options, "train.py", "--data", options.data, "--model", options.model, "--imgsz", str(options.imgsz),
               "--batch-size", "-1", "--epochs", "1", "--val-every", "0", "--noplots", "--project",
               str(project), "--name", "largest", "--exist-ok")  # fmt: skip
    for line in text.splitlines():
        if "--batch-size" in line or re.search(r"fits|largest|epoch 1/1", line):
            yield line.strip()
    options.batch_size = yaml.safe_load((project / "largest" / "settings.yaml").read_text())["config"]["batch_size"]
    yield f"batch {options.batch_size}: the step in a new process {step_rate(options):.0f} images/s"


EPOCH_LINE = re.compile(r"epoch (\d+)/\d+ +(\d+)/(\d+) .* ([\d.]+) img/s +wait (\d+)%")
SAMPLE_MS = 100
OPTIMIZER = "SGD"  # on both sides
GOALS = {"step": 0.9, "peer": 2.0}  # of the images a second: times those of the step alone, times the peer's
# What draws the pictures; the first is what train.py does by itself, and the last takes its place if that fails.
LAYOUTS = {
    "pictures from workers, cache ram": ["--cache", "ram"],
    "pictures on the device, cache device": ["--render-on", "device", "--cache", "device"],
    "pictures from workers, no cache": [],
}


class GpuMeter:
    """Measures GPU utilization: the fraction of each tenth of a second in which a kernel ran, as reported by
    nvidia-smi."""

    def __init__(self, device: str) -> None:
        self.samples: list[tuple[float, float]] = []  # time, share
        self._process = None
        if device != "cpu" and shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "-i", device, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
            self._process = subprocess.Popen([*query, "-lms", str(SAMPLE_MS)], stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            if line.strip().isdigit():
                self.samples.append((time.monotonic(), int(line) / 100))

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def busy(self, start: float, end: float) -> float | None:
        """The mean utilization between two times; None if it is unknown."""
        shares = [share for at, share in self.samples if start <= at <= end]
        return statistics.fmean(shares) if shares else None


@dataclass(frozen=True)
class Speed:
    """The speed of a training's epochs after the first, including the time between epochs."""

    rate: float  # images a second
    wait: float  # share of the time in which the loop waits for data
    busy: float | None  # share of the time in which the GPU is busy; None: not known

    def __str__(self) -> str:
        busy = "unknown" if self.busy is None else f"{self.busy:.0%}"
        return f"{self.rate:.0f} images/s, loop waits for data {self.wait:.0%} of the time, GPU busy {busy}"


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
            speed = our_speed(options, LAYOUTS[name])
        except SystemExit as error:  # the others' figures are still worth having
            wrong.append(f"{name}: {' '.join(str(error).split())[-ERROR_WIDTH:]}")
            continue
        rates.append(speed.rate)
        yield f"{what}, {name}: {speed}; {speed.rate / alone:.2f} of the step alone"
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


def our_speed(options: argparse.Namespace, flags: Sequence[str]) -> Speed:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "train.py", "--data", options.data, "--model", options.model, "--imgsz",
            str(options.imgsz), "--batch-size", str(options.batch_size), "--epochs", str(options.epochs), "--device",
            options.device, "--optimizer", OPTIMIZER, "--workers", str(workers()), "--val-every", "0", "--noplots",
            "--cache-dir", str(Path(folder, "index")), "--project", folder, *flags,
            "--set", "close_mosaic=0", "close_scale=0",
        ]  # fmt: skip
        return last_epochs(command, options)


def last_epochs(command: Sequence[str], options: argparse.Namespace) -> Speed:
    meter = GpuMeter(options.device)
    ends: list[float] = []
    waits: list[float] = []
    lines: list[str] = []
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    for line in process.stdout:
        lines.append(line)
        match = EPOCH_LINE.search(line)
        if match and match[2] == match[3]:
            ends.append(time.monotonic())
            waits.append(int(match[5]) / 100)
    code = process.wait()
    meter.close()
    if code or len(ends) < 2:
        sys.exit(f"{' '.join(command)} ended with {code}:\n{''.join(lines[-8:])}")
    rate = training_images(options.data) * (len(ends) - 1) / (ends[-1] - ends[0])
    return Speed(rate, statistics.median(waits[1:]), meter.busy(ends[0], ends[-1]))


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
