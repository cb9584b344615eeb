"""Exports checkpoints in file formats, scores the files with val.py, and prints a Markdown table.

    python -m benchmarks.formats --weights yolov8n.pt yolox_nano.pth --data coco128.yaml --imgsz 320 \\
        --formats onnx openvino litert --python litert=ENVIRONMENT/bin/python

The table has "failed" for files that do not pass the check of export.py. Milliseconds are measured by val.py for one
image, in the runtime alone, on one thread, with square images of the export's size.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.environment import ROOT
from engine.export.exporter import file_bytes, file_path
from utils.config.export_formats import EXPORT_FORMATS
from utils.config.settings import ExportConfig


class Row(NamedTuple):
    """One line of the table."""

    model: str
    format: str  # format and precision
    ap: float | None  # None if the export or its check failed
    megabytes: float
    milliseconds: float


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.formats", description=__doc__.split("\n")[0])
    parser.add_argument("--weights", nargs="+", required=True, type=Path, help="checkpoints")
    parser.add_argument("--data", required=True, help="data set for the checks and scores")
    parser.add_argument("--imgsz", type=int, default=320, help="side of the exported input, pixels")
    parser.add_argument(
        "--formats", nargs="+", default=list(EXPORT_FORMATS), choices=EXPORT_FORMATS, help="default: all"
    )
    parser.add_argument("--precisions", nargs="*", default=[], choices=["half", "int8"], help="in addition to float32")
    parser.add_argument("--check-images", type=int, default=64, help="images to check each file with")
    parser.add_argument("--python", nargs="*", default=[], help="FORMAT=INTERPRETER of another environment")
    options = parser.parse_args()
    interpreters = dict(entry.split("=", 1) for entry in options.python)
    print("| model | format | AP | MB | ms |\n| --- | --- | --- | --- | --- |")
    for weights in options.weights:
        with tempfile.TemporaryDirectory() as folder:
            copied = Path(shutil.copy(weights, folder))
            show(measure(copied, weights.stem, "(checkpoint)", options, sys.executable))
            for name in options.formats:
                interpreter = interpreters.get(name, sys.executable)
                for precision in ("", *options.precisions):
                    if f"--{precision}" not in EXPORT_FORMATS[name].unsupported:
                        show(export_and_measure(copied, name, precision, options, interpreter))


def export_and_measure(weights: Path, name: str, precision: str, options: argparse.Namespace, interpreter: str) -> Row:
    flags = [f"--{precision}"] if precision else []
    command = [interpreter, "export.py", "--weights", weights, "--format", name, *flags]
    command += ["--imgsz", options.imgsz, "--data", options.data, "--check-images", options.check_images]
    done = run_on_one_thread(command)
    title = f"{name} {precision}".strip()
    if done.returncode != 0:
        print(done.stderr.strip().splitlines()[-1], file=sys.stderr)
        return Row(weights.stem, title, None, 0, 0)
    config = ExportConfig(weights=str(weights), half=precision == "half", int8=precision == "int8")
    return measure(file_path(weights, config, name), weights.stem, title, options, interpreter)


def measure(path: Path, model: str, title: str, options: argparse.Namespace, interpreter: str) -> Row:
    """Scores a checkpoint or an exported file. Raises RuntimeError if val.py fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [interpreter, "val.py", "--weights", path, "--data", options.data, "--imgsz", options.imgsz]
        command += ["--trust", "--no-rect", "--amp", "off", "--device", "cpu", "--workers", 0, "--batch-size", 1]
        done = run_on_one_thread([*command, "--noplots", "--project", folder, "--name", "val"])
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        scores = json.loads(Path(folder, "val", "results.json").read_text(encoding="utf-8"))
    times = re.search(r"ms per image: .*?inference ([\d.]+)", done.stdout)
    if times is None:
        raise RuntimeError(f"val.py printed no times: {done.stdout}")
    return Row(model, title, scores["ap"], file_bytes(path) / 1e6, float(times[1]))


def run_on_one_thread(command: list[object]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def show(row: Row) -> None:
    if row.ap is None:
        print(f"| {row.model} | {row.format} | failed | | |", flush=True)
    else:
        print(
            f"| {row.model} | {row.format} | {row.ap:.4f} | {row.megabytes:.1f} | {row.milliseconds:.0f} |", flush=True
        )


if __name__ == "__main__":
    main()
