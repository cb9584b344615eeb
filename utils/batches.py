"""Samples, their keys, requests for them, and batches of images with their targets, as training and validation read
them.

Legend: B images in a batch, M targets, R ignore regions. The canvas is the H x W pixel image that the model sees. Boxes
are ``cx, cy, w, h``, divided by the width and height of the canvas. Images with three channels are RGB.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from utils.labels import ignored_class

TARGET_BUCKET = 16


class SampleKey(NamedTuple):
    """Identifies a training sample. Together with the data set, seed and hyper-parameters, it determines every
    pixel."""

    index: int  # type: ignore[assignment]  # an image or a tile; hides tuple.index, which is not used
    epoch: int
    position: int  # index in the epoch's permutation; unique within an epoch
    canvas_hw: tuple[int, int]  # height and width to render, pixels
    block: tuple[int, ...] = ()  # images that mosaic and mixup partners are drawn from; empty: all images


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The message with which a loader requests a batch from a worker: the samples that make it up."""

    keys: tuple[SampleKey, ...]
    canvas_hw: tuple[int, int]
    run_epochs: int = 1  # epochs of the whole run; close_mosaic and close_scale count from its end
    samples_per_image: tuple[int, ...] = ()  # number of consecutive samples that form each image; empty: one each

    @property
    def images(self) -> list[range]:
        """Positions in ``keys`` of the samples of each image."""
        counts = self.samples_per_image or (1,) * len(self.keys)
        bounds = itertools.accumulate(counts, initial=0)
        return [range(start, end) for start, end in itertools.pairwise(bounds)]

    @property
    def epoch(self) -> int:
        """Epoch that all samples share; 0 without samples."""
        return self.keys[0].epoch if self.keys else 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One image with its labels, ready to be collated."""

    image: np.ndarray  # uint8 (H, W, 3) RGB, or (H, W, C) of another `PixelFormat`
    labels: np.ndarray  # float32 (n, 5): class, or `ignored_class`, then cx, cy, w, h normalized to the canvas
    index: int
    path: str
    original_hw: tuple[int, int]  # pixels, upright
    gain_xy: tuple[float, float]  # canvas pixels per original pixel; a meaningless (1, 1) for augmented samples
    pad_xy: tuple[float, float]  # canvas pixels left of and above the original image; negative for most tiles


@dataclass(frozen=True, slots=True)
class Targets:
    """Ground truth of B images, in the form that the losses take."""

    rows: Tensor  # float32 (M, 6): image in the batch, class, cx, cy, w, h normalized to the canvas; sorted by image
    counts: tuple[int, ...]  # rows of each image
    ignore: np.ndarray | None = None  # float32 (R, 6), like ``rows``: regions without loss; class -1: all classes
    host_rows: np.ndarray | None = None  # copy of ``rows`` on the host, kept by `to`

    @classmethod
    def from_labels(cls, labels: Sequence[np.ndarray]) -> Targets:
        """Joins the labels (n, 5) of each image, as in `Sample`, and separates ignore regions from objects."""
        label_counts = [len(image_labels) for image_labels in labels]
        image = np.repeat(np.arange(len(labels), dtype=np.float32), label_counts)[:, None]
        rows = np.concatenate([image, np.concatenate([np.zeros((0, 5), np.float32), *labels])], 1)
        is_region = rows[:, 1] < 0
        if not is_region.any():
            return cls(torch.from_numpy(rows), tuple(label_counts))
        ignore = rows[is_region]
        ignore[:, 1] = ignored_class(ignore[:, 1])
        objects = rows[~is_region]
        object_counts = np.bincount(objects[:, 0].astype(np.int64), minlength=len(labels)).tolist()
        return cls(torch.from_numpy(objects), tuple(object_counts), ignore)

    @property
    def max_targets(self) -> int:
        """The largest number of targets in an image, rounded up to a multiple of `TARGET_BUCKET` to limit the number of
        distinct shapes."""
        buckets = math.ceil(max(self.counts, default=0) / TARGET_BUCKET)
        return max(buckets, 1) * TARGET_BUCKET

    @property
    def on_host(self) -> np.ndarray:
        """``rows`` on the host. Needs no host sync if `to` moved them to the device, because `to` keeps a host copy."""
        return self.rows.numpy(force=True) if self.host_rows is None else self.host_rows

    def to(self, device: torch.device, non_blocking: bool = True) -> Targets:
        """Moves ``rows`` to ``device`` and keeps a copy on the host."""
        return replace(self, rows=self.rows.to(device, non_blocking=non_blocking), host_rows=self.on_host)

    def pin_memory(self) -> Targets:
        """Copies ``rows`` to page-locked memory."""
        return replace(self, rows=self.rows.pin_memory())

    def shard(self, start: int, end: int) -> Targets:
        """Returns the targets of images ``start``..``end - 1``, numbered from 0."""
        first = sum(self.counts[:start])
        last = first + sum(self.counts[start:end])
        rows = self.rows[first:last].clone()
        rows[:, 0] -= start
        if self.rows.is_pinned():
            rows = rows.pin_memory()
        shift = np.array([start, 0, 0, 0, 0, 0], dtype=np.float32)
        host_rows = None if self.host_rows is None else self.host_rows[first:last] - shift
        ignore = None
        if self.ignore is not None:
            image = self.ignore[:, 0]
            in_shard = (image >= start) & (image < end)
            if in_shard.any():
                ignore = self.ignore[in_shard] - shift
        return Targets(rows, self.counts[start:end], ignore, host_rows)


@dataclass(frozen=True, slots=True)
class Batch:
    """Images of one canvas size and their targets; ``images`` may hold zero images (a rank with an empty shard)."""

    images: Tensor  # uint8 (B, 3, H, W), or (B, C, H, W) of another `PixelFormat`
    targets: Targets
    indices: Tensor  # int64 (B,) image in the data set
    original_hw: Tensor  # int32 (B, 2)
    letterbox: Tensor  # float64 (B, 4): gain_x, gain_y, pad_x, pad_y
    paths: tuple[str, ...] = ()

    def to(self, device: torch.device, non_blocking: bool = True) -> Batch:
        """Moves images and targets to ``device``. The other fields stay on the host, where they are read."""
        images = self.images.to(device, non_blocking=non_blocking)
        return replace(self, images=images, targets=self.targets.to(device, non_blocking))

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keeps the memory of tensors that `to` moved on another stream from being reused before ``stream`` is done."""
        self.images.record_stream(stream)
        self.targets.rows.record_stream(stream)

    def shard(self, start: int, end: int) -> Batch:
        """Returns images ``start``..``end - 1``, exactly as if they had been collated alone."""
        return Batch(
            images=self.images[start:end],
            targets=self.targets.shard(start, end),
            indices=self.indices[start:end],
            original_hw=self.original_hw[start:end],
            letterbox=self.letterbox[start:end],
            paths=self.paths[start:end],
        )

    def pin_memory(self) -> Batch:
        """Copies images and targets to page-locked memory."""
        return replace(self, images=self.images.pin_memory(), targets=self.targets.pin_memory())


def to_float(images: Tensor, device: torch.device, dtype: torch.dtype, channels_last: bool) -> Tensor:
    """Converts integer images (B, C, H, W) to floats in [0, 1] on ``device``.

    uint8 becomes ``dtype``; uint16 becomes float32, since ``dtype`` may be too coarse for it.
    """
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images = images.to(device, non_blocking=True).to(memory_format=layout)
    if images.dtype == torch.uint16:
        return images.float() / 65535
    return images / torch.tensor(255, dtype=dtype)


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Applies ``function`` to every tensor in ``value``: a tensor, or a (nested) tuple or dataclass of tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) is tuple:
        return tuple(map_tensors(item, function) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: map_tensors(getattr(value, f.name), function) for f in fields(value)})
    return value
