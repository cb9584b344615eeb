"""Prints parameters and floating-point operations of each model for inference as a Markdown table. Needs only shapes.

    python -m benchmarks.models --imgsz 640

A multiplication and an addition count as two operations. Only convolutions and matrix products are counted. Batch norms
are folded, RepConv blocks are merged, and only the NMS-free head of a pair is counted, as in exported files.
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.command import parse_flags, run_benchmark
from models.detector import build_on_meta
from models.spec import load_spec
from utils.errors import UserError

SIZES = {
    "yolov5": "nsmlx",
    "yolov8": "nsmlx",
    "yolov9": "tsmc",
    "yolo11": "nsmlx",
    "yolo26": "nsmlx",
    "yolox_": ("nano", "tiny", *"smlx"),
}


def names() -> list[str]:
    return [f"{family}{size}" for family, sizes in SIZES.items() for size in sizes]


def measure(name: str, imgsz: int = 640, classes: int = 80) -> tuple[int, int]:
    """Returns the number of parameters, and of operations for one image of ``imgsz`` x ``imgsz`` pixels.

    Raises UserError if ``imgsz`` is not a multiple of the model's stride.
    """
    detector = build_on_meta(load_spec(name), classes)
    if imgsz < 1 or imgsz % detector.stride:
        raise UserError(f"image size {imgsz}: must be a multiple of {name}'s stride, {detector.stride}")
    model = detector.fuse().to("meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(1, 3, imgsz, imgsz, device="meta"))
    return sum(parameter.numel() for parameter in model.parameters()), counter.get_total_flops()


def row(name: str, imgsz: int = 640) -> str:
    parameters, operations = measure(name, imgsz)
    return f"| {name} | {parameters / 1e6:.2f} M | {operations / 1e9:.1f} G |"


def main() -> None:
    imgsz = parse_flags("models", __doc__, imgsz={}).imgsz
    print(f"| model | parameters | FLOPs at {imgsz} px |\n| --- | --- | --- |")
    for name in names():
        print(row(name, imgsz), flush=True)


if __name__ == "__main__":
    run_benchmark(main)
