"""Exports checkpoints in file formats, scores the files with val.py, and prints a Markdown table.

    python -m benchmarks.formats --weights yolov8n.pt yolox_nano.pth --data coco128.yaml --imgsz 320 \\
        --formats onnx openvino litert --python litert=ENVIRONMENT/bin/python

The table has "failed" for files that do not pass the check of export.py. Milliseconds are measured by val.py for one
image, in the runtime alone, on one thread, with square images of the export's size.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import parse_flags, run_benchmark, run_process
from engine.commands.export import file_bytes, file_path
from utils.config.export_formats import EXPORT_FORMATS
from utils.config.settings import ExportConfig
from utils.errors import UserError


def main() -> None:
    options = parse_flags(
        "formats",
        __doc__,
        weights={"nargs": "+", "required": True, "type": Path, "help": "checkpoints"},
        data={"help": "data set for the checks and scores"},
        imgsz={"default": 320},
        formats={"nargs": "+", "default": list(EXPORT_FORMATS), "choices": EXPORT_FORMATS, "help": "default: all"},
        precisions={"nargs": "*", "default": [], "choices": ["half", "int8"], "help": "in addition to float32"},
        python={"nargs": "*", "default": [], "help": "FORMAT=INTERPRETER of another environment"},
    )
    interpreters = interpreters_of(options.python)
    for weights in options.weights:
        if not weights.is_file():
            raise UserError(f"{weights}: no such file")
    print("| model | format | AP | MB | ms |\n| --- | --- | --- | --- | --- |")
    for weights in options.weights:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = Path(shutil.copy(weights, folder))
            show(weights.stem, "(checkpoint)", measure(checkpoint, options, sys.executable))
            for name in options.formats:
                for precision in ("", *options.precisions):
                    if f"--{precision}" not in EXPORT_FORMATS[name].unsupported:
                        python = interpreters.get(name, sys.executable)
                        show(
                            weights.stem, f"{name} {precision}", exported(checkpoint, name, precision, options, python)
                        )


def interpreters_of(entries: Sequence[str]) -> dict[str, str]:
    """Returns interpreters by format from ``FORMAT=INTERPRETER``. Raises UserError for anything else."""
    interpreters = {}
    for entry in entries:
        name, _, interpreter = entry.partition("=")
        if name not in EXPORT_FORMATS or shutil.which(interpreter) is None:
            raise UserError(f"--python {entry}: must be a format, =, and the path of a Python")
        interpreters[name] = interpreter
    return interpreters


def exported(checkpoint: Path, name: str, precision: str, options: argparse.Namespace, python: str) -> str:
    """Exports a checkpoint in one format. Returns the cells of the file (`measure`), or "failed", whose reason is
    printed on standard error."""
    command = [python, "export.py", "--weights", checkpoint, "--format", name, "--imgsz", options.imgsz]
    command += ["--data", options.data]
    try:
        run_process([*command, *([f"--{precision}"] if precision else [])], OMP_NUM_THREADS="1")
    except SystemExit as error:
        print(f"{name} {precision}: {str(error).splitlines()[-1]}", file=sys.stderr)
        return "failed | |"
    config = ExportConfig(weights=str(checkpoint), half=precision == "half", int8=precision == "int8")
    return measure(file_path(checkpoint, config, name), options, python)


def measure(path: Path, options: argparse.Namespace, python: str) -> str:
    """Returns a table's cells for a checkpoint or an exported file: AP, megabytes, milliseconds for one image. Raises
    SystemExit if val.py fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "val.py", "--weights", path, "--data", options.data, "--imgsz", options.imgsz, "--trust"]
        command += ["--no-rect", "--amp", "off", "--device", "cpu", "--workers", 0, "--batch-size", 1, "--noplots"]
        output = run_process([*command, "--project", folder, "--name", "val"], OMP_NUM_THREADS="1")
        ap = json.loads(Path(folder, "val", "results.json").read_text(encoding="utf-8"))["ap"]
    times = re.search(r"ms per image: .*?inference ([\d.]+)", output)
    if times is None:
        raise RuntimeError(f"val.py printed no times: {output}")
    return f"{ap:.4f} | {file_bytes(path) / 1e6:.1f} | {float(times[1]):.0f}"


def show(model: str, title: str, cells: str) -> None:
    print(f"| {model} | {title.strip()} | {cells} |", flush=True)


if __name__ == "__main__":
    run_benchmark(main)
