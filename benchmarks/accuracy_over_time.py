"""Accuracy over time, compared with Ultralytics: the same model, data set, image size, batch size and epochs, each side
with its default recipe, including validation after each epoch.

    python -m benchmarks.accuracy_over_time --data bccd.yaml --epochs 60 --peer PYTHON --peer-set nbs=64 nbs=16

All times are wall-clock times since the start of the command; an epoch counts when its row is in results.csv. AP is
that of pycocotools: ours equals it; the peer's weights of each epoch are scored afterwards, starting where its own
figure approaches the threshold. The runs follow one another, so the machine should be quiet throughout.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.coco_scores import average_precision
from benchmarks.dataset_copy import copied
from benchmarks.report import Comparison, show
from benchmarks.turns import ROOT
from benchmarks.validate import run as run_process

DOUBT = 0.03  # by which the peer's own AP may be off


@dataclass
class Curve:
    """The progress of a training as observed from outside."""

    total_s: float
    epoch_s: list[float]  # when each epoch's row was there
    own_ap: list[float]  # as it says itself
    folder: Path


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.accuracy_over_time", description=__doc__.split(":")[0])
    parser.add_argument("--data", required=True, help="data set with YOLO labels")
    parser.add_argument("--model", default="yolov8n")
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threshold", type=float, default=0.50, help="AP that is to be passed soon")
    parser.add_argument("--peer", default="", help="Python of an environment that has Ultralytics; empty: ours alone")
    parser.add_argument(
        "--peer-set", nargs="*", default=["nbs=64", "nbs=16"], help="a run of the peer for each setting"
    )
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of our train.py; last")
    parser.add_argument("--log", action="store_true", help="append a dated row to benchmarks/README.md")
    options = parser.parse_args()
    with copied(options.data) as data, tempfile.TemporaryDirectory() as folder:
        rows = compare(options, data, Path(folder))
    title = f"{options.model} on {Path(options.data).stem}, {options.epochs} epochs, {options.imgsz} px"
    show(title, rows, log=options.log)


def compare(options: argparse.Namespace, data: Path, folder: Path) -> list[Comparison]:
    ours = watch(our_command(options, data, folder), folder / "ours", "metrics/AP")
    passed = next((s for s, ap in zip(ours.epoch_s, ours.own_ap) if ap >= options.threshold), float("inf"))
    best = max(ours.own_ap)
    if not options.peer:
        return [
            Comparison("wall time", "s", [ours.total_s]),
            Comparison("best AP", "", [best], higher_is_better=True),
            Comparison(f"until AP {options.threshold}", "s", [passed]),
        ]
    rows = []
    for setting in options.peer_set:
        runs = folder / setting.replace("=", "")
        curve = watch(peer_command(options, data, runs, setting), runs, "metrics/mAP50-95(B)")
        scorer = PeerScorer(options, data, folder, curve)
        rows += [
            Comparison(f"wall time, {setting}", "s", [ours.total_s], [curve.total_s], goal=1 / 0.45),
            Comparison(f"best AP, {setting}", "", [best], [scorer.score("best")], higher_is_better=True, goal=1.0),
            Comparison(f"until AP {options.threshold}, {setting}", "s", [passed], [scorer.time_until()], goal=3.0),
        ]
    return rows


def our_command(options: argparse.Namespace, data: Path, folder: Path) -> list[str]:
    command = [sys.executable, "train.py", "--data", str(data), "--model", options.model, "--device", "cpu"]
    command += ["--imgsz", str(options.imgsz), "--batch-size", str(options.batch_size), "--seed", str(options.seed)]
    command += ["--epochs", str(options.epochs), "--workers", str(options.workers), "--noplots"]
    command += ["--cache-dir", str(folder / "index"), "--project", str(folder), "--name", "ours"]
    return [*command, *options.flags]


def peer_command(options: argparse.Namespace, data: Path, folder: Path, setting: str) -> list[str]:
    side = str(ROOT / "benchmarks" / "ultralytics_side.py")
    command = [options.peer, side, "train", "--data", str(data), "--model", f"{options.model}.yaml", "--device", "cpu"]
    command += ["--imgsz", str(options.imgsz), "--batch-size", str(options.batch_size)]
    command += ["--epochs", str(options.epochs), "--workers", str(options.workers), "--project", str(folder)]
    return [*command, "--set", setting, "save_period=1", f"seed={options.seed}"]


def watch(command: Sequence[str], folder: Path, column: str) -> Curve:
    """Runs a training and records when each row of the results.csv in or below ``folder`` appears."""
    started = time.perf_counter()
    epoch_s: list[float] = []
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"YOLO_OFFLINE": "1"}, stdout=output, stderr=subprocess.STDOUT
        )
        running = True
        while running:
            running = process.poll() is None
            now = time.perf_counter() - started
            epoch_s += [now] * (len(_rows(folder)) - len(epoch_s))
            time.sleep(0.1)
        if process.returncode:
            output.seek(0)
            sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{output.read()[-2000:]}")
    own = [float(row[column]) for row in _rows(folder)]
    return Curve(now, epoch_s, own, next(folder.rglob("results.csv")).parent)


def _rows(folder: Path) -> list[dict[str, str]]:
    for path in folder.rglob("results.csv"):
        with open(path, newline="") as file:
            return [{k.strip(): v for k, v in row.items() if k} for row in csv.DictReader(file)]
    return []


class PeerScorer:
    """Scores the weights that a peer's run has kept."""

    def __init__(self, options: argparse.Namespace, data: Path, folder: Path, curve: Curve) -> None:
        from data.index.dataset_yaml import load_dataset_spec
        from data.index.index import load_index

        index = load_index(load_dataset_spec(data), "val", cache_dir=str(folder / "index"), progress=False)
        self.gt, self.classes = index.ground_truth(), len(index.names)
        self.options, self.data, self.folder, self.curve = options, data, folder, curve

    def score(self, name: str) -> float:
        """pycocotools' AP of ``weights/<name>.pt``."""
        options, target = self.options, self.folder / "scored"
        command = [str(Path(options.peer).parent / "yolo"), "detect", "val", f"data={self.data}", "device=cpu"]
        command += [f"model={self.curve.folder / 'weights' / name}.pt", f"imgsz={options.imgsz}", "save_json=True"]
        command += [f"batch={options.batch_size}", "plots=False", f"project={target}", "name=exp", "exist_ok=True"]
        run_process(command)
        return average_precision(next(target.rglob("predictions.json")), self.gt, self.classes)

    def time_until(self) -> float:
        """Seconds until the threshold is first passed, infinite if never."""
        for epoch, own in enumerate(self.curve.own_ap):
            kept = self.curve.folder / "weights" / f"epoch{epoch}.pt"
            if own < self.options.threshold - DOUBT or not kept.exists():
                continue
            if self.score(f"epoch{epoch}") >= self.options.threshold:
                return self.curve.epoch_s[epoch]
        return float("inf")


if __name__ == "__main__":
    main()
