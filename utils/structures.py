"""Data structures that the packages share: batches, losses, detections, ground truth and results.

Legend: B images in a batch, M targets, N images in a split, D detections, C classes, K slots of a padded axis.
Frames: ``_px`` is pixels of the original image (upright, after EXIF) unless the name says canvas; ``_norm`` is
divided by the canvas width and height. Boxes are ``xyxy`` corners, ``xywh`` top-left corner and size (COCO's),
``cxcywh`` center and size. Images are RGB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

TARGET_BUCKET = 16
MAX_SCORED_DETECTIONS = 100  # COCO's
GRAY = 114  # uint8 value of the padding around images


def padding_value(dtype: np.dtype) -> int:
    return GRAY * (np.iinfo(dtype).max // 255)


def to_float(images: Tensor, device: torch.device, dtype: torch.dtype, channels_last: bool) -> Tensor:
    """uint8 or uint16 (B, C, H, W) of the whole range to [0, 1] on ``device``, where it is divided in one pass. uint16
    becomes float32, as ``dtype`` may not hold it."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images = images.to(device, non_blocking=True).to(memory_format=layout)
    return images.float() / 65535 if images.dtype == torch.uint16 else images / torch.tensor(255, dtype=dtype)


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``value``, a tensor or nested dataclasses and tuples, with ``function`` applied to its tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) is tuple:
        return tuple(map_tensors(item, function) for item in value)
    if is_dataclass(value):
        return replace(value, **{f.name: map_tensors(getattr(value, f.name), function) for f in fields(value)})
    return value


def ignored_class(classes: np.ndarray) -> np.ndarray:
    """Labels mark regions to ignore by negative classes: -1 for all (-1), -2 for class 0, -3 for class 1 and so on. The
    function is its own inverse."""
    return -2 - classes


class SampleKey(NamedTuple):
    """Everything that a training sample depends on besides the data set, the seed and the hyper-parameters."""

    index: int  # image in the data set
    epoch: int
    position: int  # index in the epoch's permutation; unique within an epoch
    canvas_hw: tuple[int, int]  # height and width to render, pixels
    block: tuple[int, ...] = ()  # images that mosaic and mixup partners come from; empty: all


@dataclass(frozen=True, slots=True)
class Sample:
    image: np.ndarray  # uint8 (H, W, 3) RGB
    labels: np.ndarray  # float32 (n, 5): class, or `ignored_class`, then cx, cy, w, h normalized to the canvas
    index: int
    path: str
    original_hw: tuple[int, int]  # pixels, upright
    gain_xy: tuple[float, float]  # canvas pixels per original pixel; (1, 1) without meaning for augmented samples
    pad_xy: tuple[float, float]  # canvas pixels left of and above the image


@dataclass(frozen=True, slots=True)
class Targets:
    """What a loss compares the outputs for B images with."""

    rows: Tensor  # float32 (M, 6): image in the batch, class, cx, cy, w, h normalized to the canvas; by image
    counts: tuple[int, ...]  # rows of each image
    ignore: np.ndarray | None = None  # float32 (R, 6), like ``rows``: regions without loss; class -1: of all classes
    host_rows: np.ndarray | None = None  # ``rows`` as they were on the host, once they have moved to a device

    @classmethod
    def of(cls, labels: Sequence[np.ndarray]) -> Targets:
        """Args: labels (n, 5) of each image, as in `Sample`."""
        counts = [len(own) for own in labels]
        numbers = np.repeat(np.arange(len(labels), dtype=np.float32), counts)[:, None]
        rows = np.concatenate([numbers, np.concatenate([np.zeros((0, 5), np.float32), *labels])], 1)
        if not (is_region := rows[:, 1] < 0).any():
            return cls(torch.from_numpy(rows), tuple(counts))
        ignore, rows = rows[is_region], rows[~is_region]
        ignore[:, 1] = ignored_class(ignore[:, 1])
        counts = np.bincount(rows[:, 0].astype(np.int64), minlength=len(labels)).tolist()
        return cls(torch.from_numpy(rows), tuple(counts), ignore)

    @property
    def max_targets(self) -> int:
        """The largest number of targets of an image, rounded up to a multiple of `TARGET_BUCKET`: few shapes."""
        return max(-(-max(self.counts, default=0) // TARGET_BUCKET), 1) * TARGET_BUCKET

    @property
    def on_host(self) -> np.ndarray:
        """The rows on the host, which does not wait for the device if they were moved by `to`."""
        return self.rows.numpy(force=True) if self.host_rows is None else self.host_rows

    def to(self, device: torch.device, non_blocking: bool = True) -> Targets:
        return replace(self, rows=self.rows.to(device, non_blocking=non_blocking), host_rows=self.on_host)

    def pin_memory(self) -> Targets:
        return replace(self, rows=self.rows.pin_memory())

    def shard(self, start: int, end: int) -> Targets:
        """The targets of images ``start``..``end - 1``, numbered from 0."""
        first = sum(self.counts[:start])
        last = first + sum(self.counts[start:end])
        rows = self.rows[first:last].clone()
        rows[:, 0] -= start
        if self.rows.is_pinned():
            rows = rows.pin_memory()
        shift, on_host, ignore = np.float32([start, 0, 0, 0, 0, 0]), self.host_rows, self.ignore
        if on_host is not None:
            on_host = on_host[first:last] - shift
        if ignore is not None:
            ignore = ignore[(ignore[:, 0] >= start) & (ignore[:, 0] < end)] - shift
            ignore = ignore if len(ignore) else None
        return Targets(rows, self.counts[start:end], ignore, on_host)


@dataclass(frozen=True, slots=True)
class Batch:
    """Images of one canvas size and their targets; ``images`` may hold zero images (a rank with an empty shard)."""

    images: Tensor  # uint8 (B, 3, H, W)
    targets: Targets
    indices: Tensor  # int64 (B,) image in the data set
    original_hw: Tensor  # int32 (B, 2)
    letterbox: Tensor  # float64 (B, 4): gain_x, gain_y, pad_x, pad_y
    paths: tuple[str, ...] = ()

    def to(self, device: torch.device, non_blocking: bool = True) -> Batch:
        """Moves the images and the targets to ``device``. The rest is read on the host, and stays there."""
        images = self.images.to(device, non_blocking=non_blocking)
        return replace(self, images=images, targets=self.targets.to(device, non_blocking))

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keeps the memory of what `to` has moved, which another stream allocated, until ``stream`` has used it."""
        self.images.record_stream(stream)
        self.targets.rows.record_stream(stream)

    def shard(self, start: int, end: int) -> Batch:
        """Images ``start``..``end - 1``, exactly as if they had been collated alone."""
        return Batch(
            images=self.images[start:end],
            targets=self.targets.shard(start, end),
            indices=self.indices[start:end],
            original_hw=self.original_hw[start:end],
            letterbox=self.letterbox[start:end],
            paths=self.paths[start:end],
        )

    def pin_memory(self) -> Batch:
        """Copies what `to` moves to page-locked memory. Called by torch's DataLoader when ``pin_memory=True``."""
        return replace(self, images=self.images.pin_memory(), targets=self.targets.pin_memory())


class LossOutput(NamedTuple):
    """Sums over one shard of the global batch, and the normalizer by which the sum of the whole batch is divided.

    The engine adds ``normalizer`` over all shards (ranks, micro-batches) and divides once, so cutting a batch into
    shards changes no gradient. All three live on the device; none is read in the step.
    """

    total: Tensor  # () sum of all terms, gains applied, differentiable
    normalizer: Tensor  # () float32, no gradient; may be 0 in a shard; the engine clamps the global sum to >= 1
    parts: Tensor  # (P,) the terms of ``total``, detached, in the order of the criterion's ``names``


class Detections(NamedTuple):
    """Detections of a batch after NMS, padded to K per image; slots from ``counts`` on are zero."""

    boxes_xyxy: Tensor  # float32 (B, K, 4) canvas pixels
    scores: Tensor  # float32 (B, K), descending
    classes: Tensor  # int64 (B, K)
    counts: Tensor  # int64 (B,)


class LabelArrays:
    """Labels of N images in flat arrays: what `GroundTruth` and the index of a data set have in common."""

    __slots__ = ()
    offsets: np.ndarray  # int64 (N + 1,): boxes of image i are offsets[i]:offsets[i + 1]
    classes: np.ndarray  # int (M,)
    crowd: np.ndarray  # bool (M,)

    @property
    def image_of_box(self) -> np.ndarray:
        """int64 (M,), ascending."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def boxes_of_classes(self, num_classes: int) -> np.ndarray:
        """Number of objects of each class, crowd regions not counted: int64 (C,)."""
        return np.bincount(self.classes[~self.crowd], minlength=num_classes)

    def images_of_classes(self, num_classes: int) -> np.ndarray:
        """Number of images with at least one object of each class, crowd regions not counted: int64 (C,)."""
        pairs = np.unique((self.image_of_box * num_classes + self.classes)[~self.crowd])
        return np.bincount(pairs % num_classes, minlength=num_classes)


@dataclass(frozen=True, slots=True)
class GroundTruth(LabelArrays):
    """Labels of a split for evaluation: flat arrays, original pixels. Crowd boxes are ignore regions."""

    offsets: np.ndarray  # int64 (N + 1,): boxes of image i are offsets[i]:offsets[i + 1]
    boxes_xywh_px: np.ndarray  # float64 (M, 4)
    classes: np.ndarray  # int64 (M,) 0-based
    crowd: np.ndarray  # bool (M,)
    area_px: np.ndarray  # float64 (M,) object area (segment area if the source has it), for the size ranges
    image_hw: np.ndarray  # int32 (N, 2)
    image_ids: tuple[int | str, ...]  # COCO's ids if the source has them, else as `image_ids_of` the file stems
    category_ids: tuple[int, ...]  # id written to COCO JSON for each 0-based class
    max_det: int = MAX_SCORED_DETECTIONS  # detections of a class in an image that are scored, the best ones

    @property
    def num_images(self) -> int:
        return len(self.offsets) - 1


@dataclass(frozen=True, slots=True)
class DetectionTable:
    """Detections of many images as flat arrays, original pixels."""

    image_index: np.ndarray  # int64 (D,)
    boxes_xyxy_px: np.ndarray  # float64 (D, 4), clipped to the image
    scores: np.ndarray  # float64 (D,)
    classes: np.ndarray  # int64 (D,)

    @classmethod
    def concatenate(cls, tables: Iterable[DetectionTable]) -> DetectionTable:
        parts = [cls(np.zeros(0, np.int64), np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64)), *tables]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))

    def take(self, rows: np.ndarray) -> DetectionTable:
        """``rows``: a mask or indices."""
        return DetectionTable(*(getattr(self, name)[rows] for name in self.__slots__))

    def best_of_images(self, count: int) -> DetectionTable:
        """The ``count`` detections of each image with the highest scores."""
        order = np.lexsort((-self.scores, self.image_index))
        image = self.image_index[order]
        rank = np.arange(len(image)) - np.searchsorted(image, image)
        return self.take(order[rank < count])


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Scores of one validation. AP is COCO's (101 points, at most 100 detections per image). Classes without ground
    truth have nan and are left out of means."""

    metrics: dict[str, float]  # of all classes, by name, as engine/evaluation/metrics.py lists them
    class_metrics: dict[str, np.ndarray]  # of each class: float64 (C,)
    best_confidence: float  # at which the mean F1 of the classes is largest
    ap_small: float  # IoU 0.50:0.95
    ap_medium: float
    ap_large: float
    class_targets: np.ndarray  # int64 (C,) boxes that are not crowd
    confusion: np.ndarray  # int64 (C + 1, C + 1): rows predicted, columns true, last is background
    confusion_confidence: float  # its detections score higher: `threshold`, or a default without one
    curve_confidence: np.ndarray  # float64 (S,)
    curve_precision: np.ndarray  # float64 (C, S) against confidence
    curve_recall: np.ndarray  # float64 (C, S)
    pr_recall: np.ndarray  # float64 (101,)
    pr_precision: np.ndarray  # float64 (C, 101) at IoU 0.5
    num_images: int
    # `threshold` of the scored detections, and of those that are shown without box voting; None: not known.
    scored_confidence: float | None = None
    plain_confidence: float | None = None
    extras: dict[str, float] = field(default_factory=dict)  # validation losses, milliseconds per image

    @property
    def ap(self) -> float:
        """AP at IoU 0.50:0.95; nan without ground truth."""
        return self.metrics["AP"]

    @property
    def class_ap(self) -> np.ndarray:
        """float64 (C,)."""
        return self.class_metrics["AP"]

    @property
    def curve_f1(self) -> np.ndarray:
        """float64 (C, S) against confidence."""
        return f1_of(self.curve_precision, self.curve_recall)

    @property
    def threshold(self) -> float | None:
        """The confidence with the best mean F1; None if no confidence finds anything."""
        return self.best_confidence if self.metrics["f1"] > 0 else None

    @property
    def silenced(self) -> np.ndarray:
        """The classes of which `threshold` finds no object, but a lower confidence does: int64 (n,)."""
        return np.flatnonzero((self.class_metrics["recall"] == 0) & (self.curve_recall[:, 0] > 0))


def f1_of(precision: np.ndarray, recall: np.ndarray) -> np.ndarray:
    """The harmonic mean of both, of any shape; 0 where both are 0."""
    total = precision + recall
    return 2 * precision * recall / np.where(total > 0, total, 1.0)


def pad_targets(targets: Tensor, batch_size: int, max_targets: int) -> tuple[Tensor, Tensor]:
    """Pads ragged targets to a fixed shape, without a host sync.

    ``targets``: float (M, 6) as in `Targets`, by image, of which none has more than K = ``max_targets``. Returns float
    (B, K, 5) of class, cx, cy, w, h (zeros where empty), and a bool mask (B, K).
    """
    padded = targets.new_zeros((batch_size, max_targets, 5))
    per_image = torch.zeros(batch_size, dtype=torch.long, device=targets.device)
    if batch_size > 0 and targets.shape[0] > 0:
        image = targets[:, 0].long()
        per_image.scatter_add_(0, image, torch.ones_like(image))
        first = per_image.cumsum(0) - per_image
        slot = torch.arange(targets.shape[0], device=targets.device) - first[image]
        padded[image, slot] = targets[:, 1:]
    # Assigning True to a mask's elements would copy the scalar to the device, for which the host would wait.
    return padded, torch.arange(max_targets, device=targets.device) < per_image[:, None]
