"""Runs train.py, val.py, detect.py and export.py on a GPU as a user would: scores, which must be those of the CPU, a
process that only validates, the largest batch, and the speed of a training."""

from __future__ import annotations

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


def run_script(*command: object) -> str:
    """Runs a script, prints its output and returns it. Raises SystemExit if it fails."""
    output = run_process([sys.executable, *command])
    print(output, flush=True)
    return output


def run_train(project: Path, name: str, data: str, imgsz: int, device: str, *flags: object) -> str:
    """Trains yolov8n. Returns the output of train.py."""
    return run_script(
        "train.py", "--data", data, "--model", "yolov8n", "--imgsz", imgsz, "--device", device, "--noplots",
        "--project", project, "--name", name, "--exist-ok", *flags,
    )  # fmt: skip


def scores(weights: Path, folder: str, device: str, *flags: str) -> dict:
    """Returns the content of val.py's results.json."""
    run_script("val.py", "--weights", weights, "--device", device, "--project", folder, "--name", "val", "--exist-ok",
               "--noplots", *flags)  # fmt: skip
    return json.loads(Path(folder, "val", "results.json").read_text())


def validate(*, device: str, weights: str, folder: str, min_ap: float) -> Iterator[str]:
    """Yields val.py's scores, which must be the CPU's. Equal scores of a model with an AP below ``min_ap`` prove
    nothing."""
    found = {device: scores(Path(weights), folder, device)}
    if device != "cpu":
        found["cpu"] = scores(Path(weights), folder, "cpu")
    for name, of_device in found.items():
        shown = {key: of_device[key] for key in ("precision", "recall", "ap50", "ap")}  # null: undefined
        texts = [f"{key} {'undefined' if score is None else f'{score:.4f}'}" for key, score in shown.items()]
        yield f"val.py{' on the CPU' if name != device else ''}: {', '.join(texts)}"
    if any(abs(found[device][key] - found["cpu"][key]) > SAME_SCORE for key in ("ap50", "ap")):
        yield f"! scores differ by more than {SAME_SCORE} from the CPU's"
    if found[device]["ap"] < min_ap:
        yield f"! AP {found[device]['ap']:.4f} after training on the device, at least {min_ap} expected"


def detect(*, device: str, weights: str, data: str, folder: str) -> Iterator[str]:
    """Yields the number of validation images in which detect.py finds objects."""
    source = Path(data).parent / "images" / "val"
    run_script("detect.py", "--weights", weights, "--source", source, "--device", device, "--conf-thres", "0.01",
               "--save-txt", "--project", folder, "--name", "detect", "--exist-ok")  # fmt: skip
    yield f"detections in {len(list(Path(folder).glob('detect/labels/*.txt')))} of {len(list(source.iterdir()))} images"


def export(*, device: str, weights: str, folder: str, min_ap: float) -> Iterator[str]:
    """Exports a trained model on the CPU and yields the AP of each file on the device, which must be the checkpoint's.
    Equal scores of a model with an AP below ``min_ap`` prove nothing."""
    formats = list(SUFFIXES)
    absent = [package for package in ONNX_PACKAGES if importlib.util.find_spec(package) is None]
    if absent:
        formats.remove("onnx")
        yield f"no ONNX file: {', '.join(absent)} not installed"
    run_script("export.py", "--weights", weights, "--format", *formats, "--device", "cpu", "--no-check")
    expected = scores(Path(weights), folder, device)["ap"]
    yield f"checkpoint: AP {expected:.4f}"
    if expected < min_ap:
        yield f"! the checkpoint's AP is {expected:.4f}, at least {min_ap} expected"
    for name in formats:
        try:
            ap = scores(Path(weights).with_suffix(SUFFIXES[name]), folder, device, "--trust")["ap"]
        except SystemExit as error:  # the other files are still worth scoring
            yield f"! {name}: {end_of(error)}"
            continue
        yield f"{name}: AP {ap:.4f}"
        if abs(ap - expected) > SAME_SCORE:
            yield f"! {name}: AP {ap:.4f}, the checkpoint's is {expected:.4f}"


def validate_elsewhere(
    *, device: str, data: str, imgsz: int, batch_size: int, epochs: int, amp: str, folder: str
) -> Iterator[str]:
    """Trains in one process while another one validates (``--eval-ranks``), and yields train.py's log lines about the
    latter, which must not end early: training then goes on and validates itself."""
    output = run_train(
        Path(folder), "validated-elsewhere", data, imgsz, device, "--batch-size", batch_size, "--epochs", epochs,
        "--amp", amp, "--spawn", "2", "--eval-ranks", "1", "--workers", "2",
    )  # fmt: skip
    for line in output.splitlines():
        if "--eval-ranks" in line:
            yield f"! {line}" if "validate from now on" in line else line


def largest_batch(*, device: str, data: str, imgsz: int, folder: str) -> Iterator[str]:
    """Trains with ``--batch-size -1``, and times the step at the found batch size in a new process."""
    run_train(
        Path(folder), "largest", data, imgsz, device, "--batch-size", "-1", "--epochs", "1", "--val-every", "0"
    )  # fmt: skip
    settings = yaml.safe_load(Path(folder, "largest", "settings.yaml").read_text())
    batch_size = settings["config"]["batch_size"]
    yield f"batch {batch_size}: the step in a new process {step_rate(device, imgsz, batch_size):.0f} images/s"


def time_training(*, device: str, data: str, imgsz: int, batch_size: int, epochs: int, peer: str = "") -> Iterator[str]:
    """Yields images per second of the step alone, of a training with images cached in memory, and of the peer's
    training, and their ratios."""
    case = f"yolov8n batch {batch_size} {OPTIMIZER}"
    workers = max(1, min((os.cpu_count() or 2) - 2, 14))
    alone = step_rate(device, imgsz, batch_size)
    yield f"{case}: step alone, in a run too short for cuDNN's search, {alone:.0f} images/s"
    rate = 0.0
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_train(
                Path(folder), "exp", data, imgsz, device, "--batch-size", batch_size, "--epochs", epochs + 1,
                "--optimizer", OPTIMIZER, "--workers", workers, "--val-every", "0", "--cache", "ram", "--cache-dir",
                Path(folder, "index"), "--set", "close_mosaic=0", "close_scale=0",
            )  # fmt: skip
            rows = read_csv(Path(folder, "exp", "results.csv"))
            rate = epoch_rate(data, rows)
            waiting = statistics.median(float(row["speed/data_wait"]) for row in rows[1:-1])
            yield f"{case}: {rate:.0f} images/s, {rate / alone:.2f} of the step alone; waits for data {waiting:.0%}"
        except SystemExit as error:  # the peer's figure is still worth having
            yield f"! {end_of(error)}"
    if not peer:
        return
    with tempfile.TemporaryDirectory() as folder:
        command = peer_command(
            peer, "train", data=data, model="yolov8n.yaml", imgsz=imgsz, batch_size=batch_size, workers=workers,
            device=device, epochs=epochs + 1, cache="ram", project=folder, optimizer=OPTIMIZER, close_mosaic=0,
        )  # fmt: skip
        try:
            print(run_process(command), flush=True)
            peer_rate = epoch_rate(data, read_csv(next(Path(folder).rglob("results.csv"))))
            ratio = f"; ours is {rate / peer_rate:.2f} times as fast" if rate else ""
            yield f"{case}, Ultralytics: {peer_rate:.0f} images/s{ratio}"
        except SystemExit as error:
            yield f"! Ultralytics: {end_of(error)}"


def step_rate(device: str, imgsz: int, batch_size: int) -> float:
    """Returns images per second of the step alone, in a process of its own.

    cuDNN does not search for the fastest kernels, because the trainings here have too few batches for that.
    """
    steps = 1 if device == "cpu" else 20
    command = our_command("step", imgsz=imgsz, device=device, steps=steps, optimizer=OPTIMIZER, is_short=True)
    with Sides({"ours": command}) as sides:
        turn = sides.measure("ours", model="yolov8n", batch_size=batch_size)
    if "error" in turn:
        sys.exit(turn["error"])
    return batch_size / turn["seconds"]


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
