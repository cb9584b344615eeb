"""Compares this program with the reference packages: they write checkpoints with random weights; this program reads the
files and must compute the same outputs.

    python -m venv peers && peers/bin/pip install ultralytics
    python -m benchmarks.peer_outputs --peer ultralytics=peers/bin/python --peer yolox=yolox/bin/python

Each package has its own environment and runs unmodified (`peer_checkpoints.py`). The model is recognized from the file.
Both sides compute in float64. Decoded boxes and scores must agree to 5e-3 pixels and 1e-4, and the raw maps, of both
branches if there are two, to 1e-3. This is the rounding error of YOLOX's first layer, whose inputs are 0 to 255 there
and 0 to 1 here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from models.weights.load import load_detector
from utils.boxes import xyxy_to_cxcywh

MODELS = {
    "ultralytics": ("yolov8n", "yolov8s", "yolo11n", "yolo11m", "yolo26n", "yolo26m", "yolov9t", "yolov9s", "yolov9c"),
    "yolox": ("yolox-nano", "yolox-tiny", "yolox-s", "yolox-m"),
}
SUFFIX = {"ultralytics": ".pt", "yolox": ".pth"}
BOX_PX, SCORE, RAW = 5e-3, 1e-4, 1e-3
PEER_SCRIPT = Path(__file__).with_name("peer_checkpoints.py")


def differences(checkpoint: Path, reference: Path) -> tuple[str, int, dict[str, float]]:
    """The recognized model, its classes, and the largest absolute differences from the peer's outputs."""
    detector = load_detector(checkpoint)[0].double()
    stored = {key: torch.from_numpy(value) for key, value in np.load(reference).items()}
    images = stored["image"].permute(2, 0, 1)[None].double() / 255
    with torch.inference_mode():
        raw = detector(images)
        boxes, scores = detector.decode(
            raw[: len(detector.strides)]
        )  # of a pair, the peer decodes the one-to-many maps
    found = {
        "boxes, px": (xyxy_to_cxcywh(boxes)[0] - stored["boxes"]).abs().max(),
        "scores": (scores[0] - stored["scores"]).abs().max(),
        "raw": (_maps(raw, stored) - _raw(stored)).abs().max(),
    }
    return detector.spec["name"], detector.num_classes, {key: float(value) for key, value in found.items()}


def _raw(stored: dict[str, torch.Tensor]) -> torch.Tensor:
    """The peer's raw maps (channels, N), branch after branch."""
    return torch.cat([value for key, value in stored.items() if key.startswith("raw")], 1)


def _maps(raw: list[torch.Tensor], stored: dict[str, torch.Tensor]) -> torch.Tensor:
    """Our raw maps in the same form; only the box maps if the peer provides only these."""
    ours = torch.cat([level[0].flatten(1) for level in raw], 1)
    return ours[:4] if "raw_boxes" in stored else ours


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.peer_outputs", description=__doc__.split("\n")[0])
    parser.add_argument("--peer", action="append", required=True, metavar="PACKAGE=PYTHON")
    parser.add_argument("--models", nargs="+", help="of the package's names; default: several sizes of each family")
    parser.add_argument("--classes", type=int, default=80)
    parser.add_argument("--keep", type=Path, help="folder for the peers' files; default: a temporary one")
    given = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        print(f"{'file':16} {'recognized as':16} {'classes':>7} {'boxes, px':>10} {'scores':>10} {'raw maps':>10}")
        for peer in given.peer:
            package, _, python = peer.partition("=")
            for name in [m for m in MODELS[package] if not given.models or m in given.models]:
                command = [python, PEER_SCRIPT, package, folder, name, "--classes", str(given.classes)]
                subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
                checkpoint = folder / f"{name}{SUFFIX[package]}"
                model, classes, found = differences(checkpoint, folder / f"{name}.npz")
                good = found["boxes, px"] < BOX_PX and found["scores"] < SCORE and found["raw"] < RAW
                failed += not good
                numbers = " ".join(f"{value:10.1e}" for value in found.values())
                print(f"{checkpoint.name:16} {model:16} {classes:7} {numbers}{'' if good else '  TOO FAR'}", flush=True)
    sys.exit(f"{failed} models differ" if failed else 0)


if __name__ == "__main__":
    main()
