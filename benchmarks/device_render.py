"""The torch renderer: training images per second on a device, from source images in its memory (as with
``--render-on device --cache device``), and the time that one loader process spends on them.

    python -m benchmarks.device_render --device 0 --batch-size 64
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.report import Comparison, show
from data.augment.plan import draw_plans, plan_labels
from data.render.device import paint_layers, render_table
from data.render.opencv import render_plan
from data.render.table import PyramidLayout, RenderTable, build_table
from utils.config.settings import Hyperparameters
from utils.distributed.context import parse_devices
from utils.structures import SampleKey, map_tensors

SOURCES = [(480, 640), (427, 640), (640, 480), (640, 640)]  # heights and widths at 640 px, COCO's most frequent ones
LABELS = 7  # an image


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.device_render", description=__doc__.split(":")[0])
    parser.add_argument("--device", default="")
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-fuse", action="store_true", help="leave the compiled kernel out")
    parser.add_argument("--log", action="store_true", help="append a dated row to benchmarks/README.md")
    options = parser.parse_args()
    device = parse_devices(options.device)[0]
    scene = Scene(options.imgsz, images=64)
    table = map_tensors(scene.table(options.batch_size), lambda t: t.to(device))
    cache = scene.pixels.to(device)
    rows = []
    painters: dict[str, Callable] = {"operation by operation": paint_layers}
    if not options.no_fuse:
        painters["compiled"] = torch.compile(paint_layers, dynamic=True)
    for name, paint in painters.items():
        seconds = [time_on(device, lambda: render_table(table, cache, paint)) for _ in range(options.rounds + 1)][1:]  # noqa: B023
        rates = [options.batch_size / s for s in seconds]
        rows.append(Comparison(f"renderer, {name}", "images/s", rates, higher_is_better=True))
    for what, work in (("numbers for it, one process", scene.numbers), ("OpenCV renderer, one process", scene.opencv)):
        seconds = [time_on(torch.device("cpu"), lambda: work(16)) for _ in range(options.rounds)]  # noqa: B023
        rows.append(Comparison(what, "images/s", [16 / s for s in seconds], higher_is_better=True))
    title = f"Mosaic, affine, color, flips: {options.imgsz} px, batch {options.batch_size}, {device}"
    show(title, rows, log=options.log)


class Scene:
    """Source images of noise with labels, and plans for them."""

    def __init__(self, imgsz: int, *, images: int) -> None:
        rng = np.random.default_rng(0)
        sizes = np.array(SOURCES) * imgsz // 640
        self.source_hw = sizes[np.arange(images) % len(sizes)]
        self.imgsz = imgsz
        self.images = [rng.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in self.source_hw.tolist()]
        corners = rng.uniform(0.2, 0.8, (LABELS, 2))
        extent = rng.uniform(0.05, 0.4, (LABELS, 2))
        self.labels = np.concatenate([np.zeros((LABELS, 1)), corners, extent], 1).astype(np.float32)
        self.layout = PyramidLayout.of(self.source_hw)

    @property
    def pixels(self) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([self.layout.flat(image) for image in self.images]))

    def plans(self, count: int) -> list:
        canvas = (self.imgsz, self.imgsz)
        keys = [SampleKey(p % len(self.images), 0, p, canvas) for p in range(count)]
        return draw_plans(keys, source_hw=self.source_hw, hyp=Hyperparameters(), seed=0, epochs=100)

    def table(self, count: int) -> RenderTable:
        return build_table(self.plans(count), (self.imgsz, self.imgsz), self.source_hw, self.layout)

    def numbers(self, count: int) -> None:
        plans = self.plans(count)
        build_table(plans, (self.imgsz, self.imgsz), self.source_hw, self.layout)
        plan_labels(plans, self.source_hw, self.labels_of)

    def labels_of(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.tile(self.labels, (len(images), 1)), np.repeat(np.arange(len(images)), len(self.labels))

    def opencv(self, count: int) -> None:
        for plan in self.plans(count):
            render_plan(plan, self.images.__getitem__)


def time_on(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds until ``work`` is done, on the device too."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
