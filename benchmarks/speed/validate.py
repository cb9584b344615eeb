"""Times validation as a whole process, compared with Ultralytics: the same weights and data set, AP by pycocotools.

python -m benchmarks.speed.validate --weights yolov8n.pt --data coco128.yaml --peer PYTHON
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.coco_scores import average_precision, require_pycocotools
from benchmarks.command import parse_flags, run_benchmark, run_process
from benchmarks.dataset_copy import copied
from benchmarks.speed.compare import PEER, Comparison, peer_command, show
from data.index import IndexSettings
from data.load import load_index
from data.read_spec import load_dataset_spec


def main() -> None:
    options = parse_flags(
        "speed.validate",
        __doc__,
        weights={"required": True, "help": "a checkpoint that both sides read"},
        data={},
        imgsz={},
        batch_size={},
        workers={},
        amp={"help": "on our side; the peer's is float32"},
        device={},
        rounds={},
        peer={},
    )
    require_pycocotools()
    with copied(options.data) as data, tempfile.TemporaryDirectory() as folder:
        show(f"Validation of {Path(options.data).stem}", compare(options, data, Path(folder)))


def compare(options: argparse.Namespace, data: Path, folder: Path) -> list[Comparison]:
    """Runs all commands alternately. Returns rows of times and scores for each autocast type."""
    shared = {"weights": options.weights, "data": data, "imgsz": options.imgsz, "batch_size": options.batch_size}
    shared |= {"device": options.device, "workers": options.workers, "name": "exp"}
    ours = [f"--{name.replace('_', '-')}={value}" for name, value in shared.items()]
    ours += ["--cache-dir", str(folder / "index"), "--noplots", "--exist-ok"]
    commands = {
        amp: [sys.executable, "val.py", *ours, "--amp", amp, "--project", str(folder / amp)] for amp in options.amp
    }
    if options.peer:
        commands[PEER] = peer_command(options.peer, "validate", **shared, project=folder / PEER)
    for command in commands.values():
        run_process(command)  # scans the data set
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(options.rounds):
        for name, command in commands.items():
            started = time.perf_counter()
            run_process(command)
            seconds[name].append(time.perf_counter() - started)
    index = load_index(load_dataset_spec(data), "val", IndexSettings(cache_dir=str(folder / "index"), progress=False))
    files = {name: folder / name / "exp" / "predictions.json" for name in commands}
    scores = {name: [average_precision(path, index.ground_truth(), index.names)] for name, path in files.items()}
    rows = []
    for amp in options.amp:
        case = f"{Path(options.weights).stem}, {options.imgsz} px, amp {amp}"
        rows.append(Comparison(f"{case}: whole process", "s", seconds[amp], seconds.get(PEER, [])))
        rows.append(Comparison(f"{case}: AP", "", scores[amp], scores.get(PEER, []), higher_is_better=True))
    return rows


if __name__ == "__main__":
    run_benchmark(main)
