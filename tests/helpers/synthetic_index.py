"""Small data sets of rectangles on smooth noise, with an index made without a scan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from data.augment.plan import SamplePlan, SamplePlanner
from data.cache.disk import DiskCache, open_disk_cache
from data.cache.mapped import Decoding, MappedImages, open_ram_cache
from data.findings import ScanReport
from data.flat_strings import FlatStrings
from data.index import DatasetIndex
from data.samples.dataset import LoadImagesAndLabels
from utils.batches import BatchRequest, Sample, SampleKey
from utils.distributed.context import DistributedContext

OBJECT = (250, 20, 20)  # RGB of the rectangles that labels lie on
GEOMETRIES = {  # hyper-parameters for every kind of matrix that a renderer gets
    "plain": {},
    "zoom": {"scale": 0.9},
    "flips": {"fliplr": 0.5, "flipud": 0.5},
    "rotate": {"degrees": 30.0},
    "shear": {"degrees": 5.0, "shear": 15.0, "flipud": 0.5},
    "perspective": {"degrees": 10.0, "perspective": 0.001},
}


def index_of(
    *,
    names: Sequence[str],
    paths: Sequence[str | os.PathLike],
    image_hw: np.ndarray,
    offsets: np.ndarray,
    boxes_xywh_px: np.ndarray,
    classes: np.ndarray,
) -> DatasetIndex:
    """Returns an index of arrays in memory, without crowd regions. Areas are box areas."""
    boxes_xywh_px = np.asarray(boxes_xywh_px, np.float64).reshape(-1, 4)
    offsets = np.asarray(offsets, np.int64)
    return DatasetIndex(
        names=tuple(names),
        root=Path("/"),
        paths=FlatStrings.of(os.fspath(p) for p in paths),
        image_hw=np.asarray(image_hw, np.int32).reshape(-1, 2),
        incomplete=np.zeros(len(offsets) - 1, bool),
        offsets=offsets,
        boxes_xywh_px=boxes_xywh_px,
        classes=np.asarray(classes, np.int32),
        crowd=np.zeros(len(boxes_xywh_px), bool),
        area_px=boxes_xywh_px[:, 2:].prod(1),
        repeated=np.zeros(len(boxes_xywh_px), bool),
        row_number=np.full(len(boxes_xywh_px), -1, np.int32),
        report=ScanReport.of([]),
    )


def smooth_image(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Returns noise without fine detail, so that two resampling methods agree closely. Its red is below OBJECT's."""
    coarse = rng.integers(30, 200, (max(height // 24, 2), max(width // 24, 2), 3), dtype=np.uint8)
    coarse[..., 0] //= 2
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)


def write_rectangles(
    folder: Path, sizes: list[tuple[int, int]], *, objects: int = 2, classes: int = 3, seed: int = 0
) -> DatasetIndex:
    """Writes PNG files of the given heights and widths, each with up to ``objects`` labeled rectangles. Returns their
    index."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    boxes = []
    labels = []
    offsets = [0]
    for i, (height, width) in enumerate(sizes):
        image = smooth_image(rng, height, width)
        for _ in range(int(rng.integers(objects + 1))):
            w, h = (int(v) for v in rng.integers(8, min(height, width) // 2, 2))
            x, y = int(rng.integers(width - w)), int(rng.integers(height - h))
            image[y : y + h, x : x + w] = OBJECT
            boxes.append((x, y, w, h))
            labels.append(int(rng.integers(classes)))
        path = folder / f"{i:03d}.png"
        path.write_bytes(cv2.imencode(".png", image[..., ::-1])[1].tobytes())
        paths.append(str(path))
        offsets.append(len(boxes))
    index = index_of(
        names=[f"class{c}" for c in range(classes)],
        paths=paths,
        image_hw=np.array(sizes),
        offsets=np.array(offsets),
        boxes_xywh_px=np.array(boxes),
        classes=np.array(labels),
    )
    return replace(index, image_files="synthetic")


def draw_plans(keys: Sequence[SampleKey], *, epochs: int, **settings: Any) -> list[SamplePlan]:
    """Returns the plans of samples in a run of ``epochs``; ``settings`` are those of `SamplePlanner`."""
    return SamplePlanner(**settings).draw(keys, epochs)


def draw_plan(key: SampleKey, **settings: Any) -> SamplePlan:
    """Returns the plan of one sample; ``settings`` are those of `draw_plans`."""
    return draw_plans([key], **settings)[0]


def render_samples(samples: LoadImagesAndLabels, keys: Sequence[SampleKey], *, epochs: int = 50) -> list[Sample]:
    """Returns the samples of ``keys``, all of one epoch of a run of ``epochs``."""
    return samples.render(BatchRequest(tuple(keys), keys[0].canvas_hw, run_epochs=epochs))


def render_sample(samples: LoadImagesAndLabels, key: SampleKey, *, epochs: int = 50) -> Sample:
    """Returns the sample of ``key`` in a run of ``epochs``."""
    return render_samples(samples, [key], epochs=epochs)[0]


def open_cache(kind: str, index: DatasetIndex, imgsz: int, folder: Path) -> MappedImages | DiskCache:
    """Opens an empty cache of kind "ram", or of kind "disk" in ``folder``."""
    if kind == "ram":
        return open_ram_cache(DistributedContext.single(), index, imgsz, Decoding())
    return open_disk_cache(index, imgsz, Decoding(), cache_dir=str(folder))
