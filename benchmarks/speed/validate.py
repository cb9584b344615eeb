"""Times validation as a whole process, compared with Ultralytics: the same weights and data set, AP by pycocotools.

python -m benchmarks.speed.validate --weights yolov8n.pt --data coco128.yaml --peer PYTHON
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.coco_scores import average_precision, require_pycocotools
from benchmarks.dataset_copy import copied
from benchmarks.entrypoint import run_benchmark
from benchmarks.flag_types import at_least, choices_of
from benchmarks.peer import PEER_SIDE, find_peer
from benchmarks.processes import run_process
from benchmarks.speed.report import Comparison, add_flags, show
from data.dataset.yaml_file import load_dataset_spec
from data.index.index import IndexSettings
from data.index.load import load_index

PEER = "peer"  # its name among the autocast types of our side


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.speed.validate", description=__doc__.split(":")[0])
    parser.add_argument("--weights", required=True, help="a checkpoint that both sides read")
    parser.add_argument(
        "--data", required=True, help="data set with YOLO labels: YAML, folder, or name in configs/data"
    )
    parser.add_argument("--imgsz", type=at_least(1), default=640)
    parser.add_argument("--batch-size", type=at_least(1), default=16)
    parser.add_argument("--workers", type=at_least(0), default=2)
    parser.add_argument(
        "--amp",
        nargs="+",
        default=["off", "auto"],
        choices=choices_of("amp"),
        help="on our side; the peer's is float32",
    )
    parser.add_argument("--device", default="cpu")
    add_flags(parser)
    options = parser.parse_args()
    options.peer = find_peer(options.peer)
    require_pycocotools()
    with copied(options.data) as data, tempfile.TemporaryDirectory() as folder:
        show(f"Validation of {Path(options.data).stem}", compare(options, data, Path(folder)))


def compare(options: argparse.Namespace, data: Path, folder: Path) -> list[Comparison]:
    """Runs all commands alternately. Returns rows of times and scores for each autocast type."""
    commands = {amp: our_command(options, data, folder, amp) for amp in options.amp}
    if options.peer:
        commands[PEER] = peer_command(options, data, folder)
    for command in commands.values():
        time_process(command)  # scans the data set
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(options.rounds):
        for name, command in commands.items():
            seconds[name].append(time_process(command))
    scores = scores_of(commands, data, folder)
    rows = []
    for amp in options.amp:
        case = f"{Path(options.weights).stem}, {options.imgsz} px, amp {amp}"
        rows.append(Comparison(f"{case}: whole process", "s", seconds[amp], seconds.get(PEER, [])))
        rows.append(Comparison(f"{case}: AP", "", scores[amp], scores.get(PEER, []), higher_is_better=True))
    return rows


def scores_of(names: Iterable[str], data: Path, folder: Path) -> dict[str, list[float]]:
    """Returns the AP of each command's predictions, one number in a list."""
    index = load_index(load_dataset_spec(data), "val", IndexSettings(cache_dir=str(folder / "index"), progress=False))
    gt = index.ground_truth()
    classes = len(index.names)
    return {name: [average_precision(folder / name / "exp" / "predictions.json", gt, classes)] for name in names}


def our_command(options: argparse.Namespace, data: Path, folder: Path, amp: str) -> list[str]:
    command = [sys.executable, "val.py", "--weights", options.weights, "--data", str(data), "--amp", amp]
    command += ["--imgsz", str(options.imgsz), "--batch-size", str(options.batch_size), "--device", options.device]
    command += ["--workers", str(options.workers), "--cache-dir", str(folder / "index"), "--noplots"]
    return [*command, "--project", str(folder / amp), "--name", "exp", "--exist-ok"]


def peer_command(options: argparse.Namespace, data: Path, folder: Path) -> list[str]:
    command = [options.peer, str(PEER_SIDE), "val", "--weights", options.weights, "--data", str(data)]
    command += ["--imgsz", str(options.imgsz), "--batch-size", str(options.batch_size), "--device", options.device]
    return [*command, "--workers", str(options.workers), "--project", str(folder / PEER), "--name", "exp"]


def time_process(command: Sequence[str]) -> float:
    """Runs a process (`run_process`) and returns its duration in seconds."""
    started = time.perf_counter()
    run_process(command)
    return time.perf_counter() - started


if __name__ == "__main__":
    run_benchmark(main)
