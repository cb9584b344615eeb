"""The largest differences between checkpoints and their exports, of all formats and layouts, as a table in Markdown.

    python -m benchmarks.export_formats --weights yolov8n.pt yolo26n.pt --data coco128.yaml --imgsz 640

Each file is made and checked by export.py on ``--images`` validation images. Checkpoints with two branches are exported
with --nms as well. A cell holds the largest difference of a box's side as a fraction of the box, and of a score, and
the number of detections that only one of the two has.
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
FIGURES = re.compile(r"(\d+) detections of both differ by at most (\S+) of a box's size and (\S+) in score, (\d+) of")


def row(weights: Path, layout: str, flags: list[str], folder: Path) -> list[str]:
    """A cell for each format."""
    copy = folder / f"{weights.stem}.pt"
    shutil.copyfile(weights, copy)
    command = [sys.executable, "export.py", "--weights", copy, "--layout", layout, "--format", *FORMATS, *flags]
    done = subprocess.run(map(str, command), cwd=ROOT, capture_output=True, text=True, check=False)
    cells = []
    for suffix in FORMATS.values():
        lines = [line for line in done.stdout.splitlines() if f"{copy.stem}{suffix}: " in line]
        found = FIGURES.search(lines[0]) if lines else None
        cells.append(f"{found[2]}, {found[3]}, {found[4]} of {found[1]}" if found else "failed")
    if done.returncode:
        print(done.stdout[-1000:], done.stderr, file=sys.stderr)
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--weights", nargs="+", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--images", type=int, default=64)
    args = parser.parse_args()
    print(f"| model | layout | {' | '.join(FORMATS)} |\n{'| --- ' * (2 + len(FORMATS))}|", flush=True)
    for weights in args.weights:
        branches = [[], ["--nms"]] if load_detector(weights)[0].head.is_dual else [[]]
        for branch in branches:
            for layout in LAYOUTS:
                flags = ["--data", args.data, "--imgsz", args.imgsz, "--check-images", args.images, *branch]
                with tempfile.TemporaryDirectory() as folder:
                    cells = row(weights, layout, [str(flag) for flag in flags], Path(folder))
                name = " ".join([weights.stem if weights.stem != "best" else weights.parent.name, *branch])
                print(f"| {name} | {layout} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
