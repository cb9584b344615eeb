"""What detection from Python costs beside the bare model: preparing images, and choosing boxes, per image. The model
alone and the whole call take turns in one process.

    python -m benchmarks.predictor --weights yolov8n.pt --source images/ --device 0
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import Comparison, show
from data.sources import Frame, open_source
from engine.inference.predictor import Predictor, load


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.predictor", description=__doc__.split(":")[0])
    parser.add_argument("--weights", required=True)
    parser.add_argument("--source", required=True, help="images, which are decoded beforehand")
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--amp", default="off")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--log", action="store_true", help="append a dated row to benchmarks/README.md")
    options = parser.parse_args()
    predictor = load(options.weights, device=options.device, imgsz=options.imgsz, amp=options.amp, color="rgb")
    frames = (item for item in open_source(options.source) if isinstance(item, Frame))
    images = [frame.image for frame in itertools.islice(frames, options.images)]
    one_round(predictor, images)  # warms up
    rounds = [one_round(predictor, images) for _ in range(options.rounds)]
    rows = [Comparison(name, unit, [values[name] for values in rounds]) for name, unit in UNITS.items()]
    name = Path(options.weights).stem
    show(f"Predictor, {name}, {options.imgsz} px, {options.device}, --amp {options.amp}", rows, log=options.log)


UNITS = {
    "the model alone": "ms an image",
    "the whole call": "ms an image",
    "preprocessing, of the model alone": "%",
    "postprocessing, of the model alone": "%",
}


def one_round(predictor: Predictor, images: list[np.ndarray]) -> dict[str, float]:
    """The means over ``images``, one at a time."""
    bare = whole = before = after = 0.0
    for image in images:
        started = time.perf_counter()
        (result,) = predictor(image)
        whole += (time.perf_counter() - started) * 1e3
        before += result.speed["preprocess"]
        after += result.speed["postprocess"]
        bare += model_ms(predictor, image)
    values = (bare / len(images), whole / len(images), before / bare * 100, after / bare * 100)
    return dict(zip(UNITS, values))


def model_ms(predictor: Predictor, image: np.ndarray) -> float:
    """The model alone on a canvas of this image's size: its milliseconds until the device is done."""
    height, width = predictor.pipeline.canvas_hw(image.shape[:2], predictor.imgsz)
    pixels = torch.rand(1, 3, height, width, device=predictor.device).to(memory_format=torch.channels_last)
    with torch.inference_mode():
        wait(predictor.device)
        started = time.perf_counter()
        with torch.autocast(predictor.device.type, predictor.pipeline.amp, enabled=predictor.pipeline.amp is not None):
            predictor.model(pixels)
        wait(predictor.device)
    return (time.perf_counter() - started) * 1e3


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
