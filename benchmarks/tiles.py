"""AP in large images, scaled as a whole and cut into tiles: the images of a data set are pasted into mosaics, at their
size or scaled, and val.py scores a checkpoint on them.

python -m benchmarks.tiles --weights yolov8n.pt --data coco128.yaml
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import yaml

from benchmarks.turns import ROOT
from data.image_io.decode import read_image
from data.index.dataset_yaml import load_dataset_spec
from data.index.index import DatasetIndex, load_index
from utils.drawing.draw import write_image

MOST_GAP = 60  # pixels between images
VARIANTS = {
    "whole image, 640 px": ["--imgsz", "640"],
    "whole image, 1280 px": ["--imgsz", "1280"],
    "whole image, full size": ["--imgsz", "{side}", "--batch-size", "2"],
    "tiles of 640": ["--tile", "640", "--no-tile-full-image"],
    "tiles of 640 and the whole image at 640": ["--tile", "640", "--imgsz", "640"],
    "tiles of 640 and the whole image at 1280": ["--tile", "640", "--imgsz", "1280"],
}


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.tiles", description=__doc__.split(":")[0])
    parser.add_argument("--weights", required=True)
    parser.add_argument("--data", required=True, help="data set YAML; its val split is pasted")
    parser.add_argument("--side", type=int, default=2560, help="of the mosaics, pixels, a multiple of 32")
    parser.add_argument("--scale", type=float, default=1.0, help="images are scaled by 1/n to n times, at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        index = load_index(load_dataset_spec(options.data), "val", cache_dir=str(folder / "index"), progress=False)
        mosaics = write_mosaics(folder, index, options.side, options.scale, options.seed)
        print(f"{mosaics} mosaics of {options.side} px, {len(index.classes)} objects")
        for name, flags in VARIANTS.items():
            words = [word.format(side=options.side) for word in flags]
            print(f"{name:42}", *(f"{key} {value:.4f}" for key, value in scores(options, folder, words).items()))


def scores(options: argparse.Namespace, folder: Path, flags: list[str]) -> dict[str, float]:
    """The APs that val.py finds with ``flags``."""
    given = {"--weights": options.weights, "--data": folder / "data.yaml", "--device": options.device}
    given |= {"--project": folder / "runs", "--cache-dir": folder / "cache", "--workers": 0}
    words = [str(word) for pair in given.items() for word in pair]
    command = [sys.executable, "val.py", *words, *flags, "--name", "scored", "--exist-ok", "--noplots"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    results = json.loads((folder / "runs" / "scored" / "results.json").read_text())
    return {key: results[key] for key in ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")}


def write_mosaics(folder: Path, index: DatasetIndex, side: int, scale: float, seed: int) -> int:
    """Pastes each image once, in rows, with random gaps. Returns the number of mosaics."""
    rng = np.random.default_rng(seed)
    for kind in ("images", "labels"):
        (folder / kind).mkdir()
    waiting = list(_scaled_images(index, scale, rng))
    if any(max(image.shape) > side for image, _ in waiting):
        raise SystemExit("an image is larger than a mosaic; choose a larger --side or a smaller --scale")
    number = 0
    while waiting:
        canvas, rows = np.full((side, side, 3), 114, np.uint8), []
        top = int(rng.integers(MOST_GAP))
        while placed := _fill_row(canvas, top, waiting, rng, rows):
            top += placed + int(rng.integers(MOST_GAP))
        write_image(folder / "images" / f"{number}.png", canvas)
        (folder / "labels" / f"{number}.txt").write_text("".join(rows))
        number += 1
    (folder / "data.yaml").write_text(yaml.safe_dump({"val": "images", "names": list(index.names)}))
    return number


def _scaled_images(
    index: DatasetIndex, scale: float, rng: np.random.Generator
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Images in random order and their labels, float32 (n, 5), as `DatasetIndex.labels` has them."""
    for i in rng.permutation(len(index)).tolist():
        factor = float(np.exp(rng.uniform(-1, 1) * np.log(scale)))
        image = read_image(index.path(i))
        if factor != 1:
            method = cv2.INTER_AREA if factor < 1 else cv2.INTER_LINEAR
            image = cv2.resize(image, None, fx=factor, fy=factor, interpolation=method)
        yield image, index.labels(i)


def _fill_row(
    canvas: np.ndarray,
    top: int,
    waiting: list[tuple[np.ndarray, np.ndarray]],
    rng: np.random.Generator,
    rows: list[str],
) -> int:
    """Pastes the next images side by side. Returns the height of the row, 0 if not one fits, and appends to ``rows``
    the lines of a YOLO label file."""
    side, left, tallest = len(canvas), int(rng.integers(MOST_GAP)), 0
    while waiting:
        image, labels = waiting[0]
        height, width = image.shape[:2]
        if top + height > side or left + width > side:
            break
        canvas[top : top + height, left : left + width] = image
        moved = (labels[:, 1:] * [width, height, width, height] + [left, top, 0, 0]) / side
        rows += [f"{int(c)} {x:.8f} {y:.8f} {w:.8f} {h:.8f}\n" for c, (x, y, w, h) in zip(labels[:, 0], moved.tolist())]
        left, tallest = left + width + int(rng.integers(MOST_GAP)), max(tallest, height)
        waiting.pop(0)
    return tallest


if __name__ == "__main__":
    main()
