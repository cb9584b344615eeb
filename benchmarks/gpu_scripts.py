"""Checks what the scripts print on a GPU: validation, detection, and a training that searches for its batch size."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from benchmarks.turns import ROOT

LEFT_OUT = 77  # exit code of a part that says why it is left out
LEAST_AP = 0.7  # of the part that trains, on the demo set
SAME_SCORE = 0.01  # AP of few images: one box that falls on the other side of a threshold moves it


def leave_out(reason: str) -> NoReturn:
    print(f"skip: {reason}", flush=True)
    sys.exit(LEFT_OUT)


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


def help_of(flag: str, text: str) -> str:
    """The help of a script for ``flag``; empty if there is none."""
    found = re.search(rf"^ +{flag} .*?(?=^ +-|\Z)", text, re.DOTALL | re.MULTILINE)
    return found[0] if found else ""


def largest_batch(options: argparse.Namespace) -> Iterator[str]:
    """A training with ``--batch-size -1``."""
    text = subprocess.run(
        [sys.executable, "train.py", "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    if "-1" not in help_of("--batch-size", text):
        leave_out("train.py --help names no --batch-size -1")
    if options.device == "cpu":
        leave_out("--batch-size -1 needs a GPU")
    text = run(options, "train.py", "--data", options.data, "--model", options.model, "--imgsz", str(options.imgsz),
               "--batch-size", "-1", "--epochs", "1", "--val-every", "0", "--noplots", "--project",
               str(options.folder / "runs"), "--name", "largest")  # fmt: skip
    for line in text.splitlines():
        if "--batch-size" in line or re.search(r"fits|largest|epoch 1/1", line):
            yield line.strip()
