"""Real images for the check of an export and for its calibration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from data.dataset import LoadImagesAndLabels
from data.index.dataset_yaml import DatasetSpec
from data.index.index import DatasetIndex, load_index
from data.loading.build import VALIDATION_PAD
from data.loading.worker import collate
from data.sampler import BatchRequest, validation_requests
from engine.export.options import ExportOptions
from utils.structures import Batch, GroundTruth

BATCH = 8


@dataclass(frozen=True)
class CheckSet:
    """Some images of a split, letterboxed to the canvases of an export, and their labels."""

    batches: list[Batch]  # ``indices`` count the images of this set
    ground_truth: GroundTruth
    paths: list[str]


def spread(total: int, count: int) -> np.ndarray:
    """At most ``count`` indices out of ``total``, evenly spread and ascending."""
    return np.unique(np.linspace(0, total - 1, min(count, total)).round().astype(np.int64))


def open_split(spec: DatasetSpec, split: str, cache_dir: str, *, single_cls: bool = False) -> DatasetIndex:
    return load_index(spec, split, cache_dir=cache_dir, single_cls=single_cls, progress=False)


def check_set(index: DatasetIndex, count: int, options: ExportOptions, stride: int) -> CheckSet:
    """``count`` images of a split. A dynamic model gets rectangular canvases of several sizes."""
    chosen = spread(len(index), count)
    samples = LoadImagesAndLabels(index, imgsz=max(options.imgsz_hw))
    batches = []
    for request in _requests(index.image_hw[chosen], options, stride):
        keys = tuple(key._replace(index=int(chosen[key.index])) for key in request.keys)
        numbers = torch.tensor([key.index for key in request.keys])
        batches.append(replace(_batch(samples, replace(request, keys=keys)), indices=numbers))
    return CheckSet(batches, _subset(index.ground_truth(), chosen), [index.path(i) for i in chosen])


def calibration_images(index: DatasetIndex, count: int, options: ExportOptions) -> Iterator[np.ndarray]:
    """Batches float32 (B, 3, H, W) in [0, 1], RGB, letterboxed, each of ``options.batch`` images."""
    chosen = spread(len(index), count)
    samples = LoadImagesAndLabels(index, imgsz=max(options.imgsz_hw))
    for request in _requests(index.image_hw[chosen], replace(options, dynamic=False), stride=1, batch=options.batch):
        if len(request.keys) == options.batch:
            keys = tuple(key._replace(index=int(chosen[key.index])) for key in request.keys)
            images = _batch(samples, replace(request, keys=keys)).images
            yield (images.contiguous().float() / 255).numpy()


def _requests(image_hw: np.ndarray, options: ExportOptions, stride: int, batch: int = BATCH) -> list[BatchRequest]:
    hw, rect = options.imgsz_hw, options.dynamic
    requests = validation_requests(
        image_hw, batch_size=batch, imgsz=max(hw), stride=stride, rect=rect, pad=VALIDATION_PAD
    )
    return requests if rect else [request.on_canvas(hw) for request in requests]


def _batch(samples: LoadImagesAndLabels, request: BatchRequest) -> Batch:
    pixels = torch.empty((len(request.keys), *request.canvas_hw, 3), dtype=torch.uint8)
    return collate(samples.samples(request.keys, list(pixels.numpy())), pixels)


def _subset(gt: GroundTruth, chosen: np.ndarray) -> GroundTruth:
    """The labels of some images."""
    counts = np.diff(gt.offsets)
    rows = np.isin(np.repeat(np.arange(gt.num_images), counts), chosen)
    return GroundTruth(
        offsets=np.concatenate([[0], np.cumsum(counts[chosen])]),
        boxes_xywh_px=gt.boxes_xywh_px[rows],
        classes=gt.classes[rows],
        crowd=gt.crowd[rows],
        area_px=gt.area_px[rows],
        image_hw=gt.image_hw[chosen],
        image_ids=tuple(gt.image_ids[i] for i in chosen),
        category_ids=gt.category_ids,
    )
