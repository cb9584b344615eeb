"""Speed of our exported files beside Ultralytics' exports of the same weights, in the same runtime.

    python -m benchmarks.export_speed --weights yolov8n.pt yolov5nu.pt --peer PYTHON

Each side exports in its own environment; then both files run in turns in this process, on the same pixels, with the
runtime's default settings: ONNX Runtime's CPU provider, and OpenVINO compiled for latency.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.report import Comparison, show
from benchmarks.turns import ROOT

FORMATS = {"onnx": ".onnx", "openvino": "_openvino_model"}
Run = Callable[[np.ndarray], object]


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.export_speed", description=__doc__.split("\n")[0])
    parser.add_argument("--weights", type=Path, nargs="+", required=True, help="checkpoints that both sides read")
    parser.add_argument("--peer", required=True, help="Python of an environment that has Ultralytics and the runtimes")
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--layout", default="raw", help="of ours; the peer's is its default")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--runs", type=int, default=10, help="runs in each turn of a file; their median counts")
    parser.add_argument("--log", action="store_true", help="append a dated row to benchmarks/README.md")
    options = parser.parse_args()
    pixels = np.random.default_rng(0).random((1, 3, options.imgsz, options.imgsz), np.float32)
    rows = []
    for weights in options.weights:
        with tempfile.TemporaryDirectory() as folder:
            ours, theirs = (export(weights, Path(folder) / side, options) for side in ("ours", "peer"))
            for name in FORMATS:
                seconds = take_turns([opened(ours[name]), opened(theirs[name])], pixels, options)
                rows.append(Comparison(f"{weights.stem}, {name}", "ms", *seconds, goal=1.0))
    show(f"Exported files, {options.imgsz} px, one image", rows, log=options.log)


def export(weights: Path, folder: Path, options: argparse.Namespace) -> dict[str, Path]:
    """The files by format; ours if the folder is called ours."""
    folder.mkdir()
    copy = folder / weights.name
    shutil.copyfile(weights, copy)
    if folder.name == "ours":
        command = [sys.executable, ROOT / "export.py", "--weights", copy, "--format", *FORMATS, "--no-check"]
        commands = [[*command, "--imgsz", options.imgsz, "--layout", options.layout]]
    else:
        tool = Path(options.peer).parent / "yolo"
        commands = [
            [tool, "export", f"model={copy}", f"format={name}", f"imgsz={options.imgsz}", "device=cpu"]
            for name in FORMATS
        ]
    for words in commands:
        environment = os.environ | {"YOLO_OFFLINE": "1"}
        done = subprocess.run(list(map(str, words)), cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return {name: folder / f"{weights.stem}{suffix}" for name, suffix in FORMATS.items()}


def opened(path: Path) -> Run:
    """The file's forward pass in its runtime."""
    if path.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        return lambda pixels: session.run(None, {name: pixels})
    import openvino

    model = openvino.Core().compile_model(next(path.glob("*.xml")), "CPU", {"PERFORMANCE_HINT": "LATENCY"})
    request = model.create_infer_request()
    return lambda pixels: request.infer([pixels])


def take_turns(runs: list[Run], pixels: np.ndarray, options: argparse.Namespace) -> list[list[float]]:
    """Milliseconds of each in each round."""
    for run in runs:
        run(pixels)
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(options.rounds):
        for run, milliseconds in zip(runs, found):
            milliseconds.append(1e3 * statistics.median(seconds(run, pixels) for _ in range(options.runs)))
    return found


def seconds(run: Run, pixels: np.ndarray) -> float:
    started = time.perf_counter()
    run(pixels)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
