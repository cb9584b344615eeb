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
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.entrypoint import run_benchmark
from benchmarks.environment import ROOT
from engine.commands.export import file_bytes, file_path
from utils.config.export_formats import EXPORT_FORMATS
from utils.config.settings import ExportConfig
from utils.errors import UserError


class Row(NamedTuple):
    """One line of the table."""

    model: str
    format: str  # format and precision
    ap: float | None = None  # None if the export or its check failed
    megabytes: float = 0.0
    milliseconds: float = 0.0


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
    interpreters = interpreters_of(options.python)
    for weights in options.weights:
        if not weights.is_file():
            raise UserError(f"{weights}: no such file")
    print("| model | format | AP | MB | ms |\n| --- | --- | --- | --- | --- |")
    for weights in options.weights:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = Path(shutil.copy(weights, folder))
            show(measure(checkpoint, weights.stem, "(checkpoint)", options, sys.executable))
            for name in options.formats:
                interpreter = interpreters.get(name, sys.executable)
                for precision in ("", *options.precisions):
                    if f"--{precision}" not in EXPORT_FORMATS[name].unsupported:
                        show(export_and_measure(checkpoint, name, precision, options, interpreter))


def interpreters_of(entries: Sequence[str]) -> dict[str, str]:
    """Returns interpreters by format from ``FORMAT=INTERPRETER``. Raises UserError for anything else."""
    interpreters = {}
    for entry in entries:
        name, _, interpreter = entry.partition("=")
        if name not in EXPORT_FORMATS or shutil.which(interpreter) is None:
            raise UserError(f"--python {entry}: must be a format, =, and the path of a Python")
        interpreters[name] = interpreter
    return interpreters


def export_and_measure(
    checkpoint: Path, name: str, precision: str, options: argparse.Namespace, interpreter: str
) -> Row:
    """Exports a checkpoint in one format and scores the file. Reports a failed export on standard error."""
    flags = [f"--{precision}"] if precision else []
    command = [interpreter, "export.py", "--weights", checkpoint, "--format", name, *flags]
    command += ["--imgsz", options.imgsz, "--data", options.data, "--check-images", options.check_images]
    done = run_on_one_thread(command)
    title = f"{name} {precision}".strip()
    if done.returncode != 0:
        print(f"{title}: {last_line(done.stderr)}", file=sys.stderr)
        return Row(checkpoint.stem, title)
    config = ExportConfig(weights=str(checkpoint), half=precision == "half", int8=precision == "int8")
    return measure(file_path(checkpoint, config, name), checkpoint.stem, title, options, interpreter)


def measure(path: Path, model: str, title: str, options: argparse.Namespace, interpreter: str) -> Row:
    """Scores a checkpoint or an exported file. Raises UserError with val.py's error if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [interpreter, "val.py", "--weights", path, "--data", options.data, "--imgsz", options.imgsz]
        command += ["--trust", "--no-rect", "--amp", "off", "--device", "cpu", "--workers", 0, "--batch-size", 1]
        done = run_on_one_thread([*command, "--noplots", "--project", folder, "--name", "val"])
        if done.returncode != 0:
            raise UserError(f"{model} {title}: val.py: {last_line(done.stderr)}")
        scores = json.loads(Path(folder, "val", "results.json").read_text(encoding="utf-8"))
    times = re.search(r"ms per image: .*?inference ([\d.]+)", done.stdout)
    if times is None:
        raise RuntimeError(f"val.py printed no times: {done.stdout}")
    return Row(model, title, ap=scores["ap"], megabytes=file_bytes(path) / 1e6, milliseconds=float(times[1]))


def last_line(errors: str) -> str:
    """Returns the last line of a program's standard error, without "error: "."""
    lines = errors.strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else "failed without a message"


def run_on_one_thread(command: list[object]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def show(row: Row) -> None:
    figures = "failed | |"
    if row.ap is not None:
        figures = f"{row.ap:.4f} | {row.megabytes:.1f} | {row.milliseconds:.0f}"
    print(f"| {row.model} | {row.format} | {figures} |", flush=True)


if __name__ == "__main__":
    run_benchmark(main)
