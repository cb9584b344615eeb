"""The differences between checkpoints and their exports, of all formats and layouts, as a table in Markdown.

    python -m benchmarks.export_formats --weights yolov8n.pt yolo26n.pt --data coco128.yaml --imgsz 640 --half --int8

Each file is made and checked by export.py on ``--images`` validation images. Checkpoints with two branches are exported
with --nms as well. A cell holds, in float32, the largest difference of a box's side as a fraction of the box, that of a
score, and how many detections only one of the two has; with ``--half`` and ``--int8`` (rows of their own, layout raw,
ONNX and OpenVINO) the change of AP and of F1. The exit status is 1 if an export fails, is out of tolerance, or had no
detections to compare.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from models.weights.load import load_detector

ROOT = Path(__file__).parents[1]
FORMATS = {"onnx": ".onnx", "openvino": "_openvino_model", "torchscript": ".torchscript", "pt2": ".pt2"}
LAYOUTS = ("raw", "end2end", "deepstream")
LOW_PRECISION = ("onnx", "openvino")  # the formats that are measured in less than float32
FIGURES = re.compile(
    r"AP (?P<ap>\S+) \(checkpoint (?P<ap0>\S+)\), F1 at \S+ (?P<f1>\S+) \((?P<f10>\S+)\); detections: (?P<both>\d+) of "
    r"both, at most (?P<box>\S+) of a box's size and (?P<score>\S+) in score apart, (?P<one>\d+) of one only"
)
FAILURE = "failed: "


def cell(line: str, precision: str) -> str:
    """What export.py says about one file, shortened."""
    found = FIGURES.search(line)
    if not found:
        reason = line.partition("differs too much from the checkpoint: ")[2].partition(" (worst image")[0]
        return FAILURE + (reason or "see the messages")
    if not int(found["both"]):
        return FAILURE + "no detections to compare"
    if precision == "float32":
        return f"{found['box']}, {found['score']}, {found['one']} of {found['both']}"
    ap, f1 = float(found["ap"]) - float(found["ap0"]), float(found["f1"]) - float(found["f10"])
    return f"AP {ap:+.4f} of {found['ap0']}, F1 {f1:+.4f} of {found['f10']}"


def row(weights: Path, precision: str, flags: list[str], folder: Path) -> list[str]:
    """A cell for each format."""
    copy = folder / f"{weights.stem}.pt"
    shutil.copyfile(weights, copy)
    formats = tuple(FORMATS) if precision == "float32" else LOW_PRECISION
    command = [sys.executable, "export.py", "--weights", copy, "--format", *formats, *flags]
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    lines = done.stdout.splitlines()
    stem = copy.stem + "_int8" * (precision == "int8")
    cells = []
    for name in formats:
        files = (f"{stem}{FORMATS[name]}: ", f"{stem}{FORMATS[name]}.failed: ")
        cells.append(cell(next((line for line in lines if any(file in line for file in files)), ""), precision))
    return cells + ["-"] * (len(FORMATS) - len(formats))


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.export_formats", description=__doc__.split("\n")[0])
    parser.add_argument("--weights", nargs="+", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--half", action="store_true", help="float16 too")
    parser.add_argument("--int8", action="store_true", help="8-bit integers too")
    args = parser.parse_args()
    kinds = [(layout, "float32", ["--layout", layout]) for layout in LAYOUTS]
    kinds += [("raw", name, [f"--{name}"]) for name in ("half", "int8") if getattr(args, name)]
    print(f"| model | layout | precision | {' | '.join(FORMATS)} |\n{'| --- ' * (3 + len(FORMATS))}|", flush=True)
    failures = 0
    for weights in args.weights:
        for branch in ([], ["--nms"]) if load_detector(weights)[0].head.is_dual else ([],):
            name = " ".join([weights.stem if weights.stem != "best" else weights.parent.name, *branch])
            for layout, precision, kind in kinds:
                flags = ["--data", args.data, "--imgsz", args.imgsz, "--check-images", args.images, *branch, *kind]
                with tempfile.TemporaryDirectory() as folder:
                    cells = row(weights, precision, [str(flag) for flag in flags], Path(folder))
                failures += sum(cell.startswith(FAILURE) for cell in cells)
                print(f"| {name} | {layout} | {precision} | {' | '.join(cells)} |", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
