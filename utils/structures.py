"""Data structures that the packages share: batches, losses, detections, ground truth and results.

Legend: B images in a batch, M targets, N images in a split, D detections, C classes, K slots of a padded axis.
Frames: ``_px`` is pixels of the original image (upright, after EXIF) unless the name says canvas; ``_norm`` is
divided by the canvas width and height. Boxes are ``xyxy`` corners, ``xywh`` top-left corner and size (COCO's),
``cxcywh`` center and size. Images are RGB.
"""

from __future__ import annotations

import math
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
    """Returns the gray of the padding around images of ``dtype``, uint8 or uint16."""
    return GRAY * (np.iinfo(dtype).max // 255)


def to_float(images: Tensor, device: torch.device, dtype: torch.dtype, channels_last: bool) -> Tensor:
    """Converts integer images (B, C, H, W) to floats in [0, 1] on ``device``, in one pass.

    uint8 becomes ``dtype``; uint16 becomes float32, since ``dtype`` may be too coarse for it.
    """
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images = images.to(device, non_blocking=True).to(memory_format=layout)
    if images.dtype == torch.uint16:
        return images.float() / 65535
    return images / torch.tensor(255, dtype=dtype)


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Applies ``function`` to every tensor in ``value``: a tensor, or tuples and dataclasses that may be nested."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) is tuple:
        return tuple(map_tensors(item, function) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: map_tensors(getattr(value, f.name), function) for f in fields(value)})
    return value


def ignored_class(classes: np.ndarray) -> np.ndarray:
    """Converts class numbers to those that mark ignore regions, and back.

    A region in which class c is ignored has the class -2 - c: -2 for class 0, -3 for class 1. A region in which every
    class is ignored has the class -1, which stays -1.
    """
    return -2 - classes


class SampleKey(NamedTuple):
    """Identifies a training sample: with the data set, the seed and the hyper-parameters it determines every pixel."""

    index: int  # type: ignore[assignment]  # image in the data set; hides tuple.index, which nobody calls
    epoch: int
    position: int  # index in the epoch's permutation; unique within an epoch
    canvas_hw: tuple[int, int]  # height and width to render, pixels
    block: tuple[int, ...] = ()  # images that mosaic and mixup partners come from; empty: all


@dataclass(frozen=True, slots=True)
class Sample:
    """One image with its labels, ready to be collated."""

    image: np.ndarray  # uint8 (H, W, 3) RGB
    labels: np.ndarray  # float32 (n, 5): class, or `ignored_class`, then cx, cy, w, h normalized to the canvas
    index: int
    path: str
    original_hw: tuple[int, int]  # pixels, upright
    gain_xy: tuple[float, float]  # canvas pixels per original pixel; a meaningless (1, 1) for augmented samples
    pad_xy: tuple[float, float]  # canvas pixels left of and above the image


@dataclass(frozen=True, slots=True)
class Targets:
    """Ground truth of B images, as the losses take it."""

    rows: Tensor  # float32 (M, 6): image in the batch, class, cx, cy, w, h normalized to the canvas; by image
    counts: tuple[int, ...]  # rows of each image
    ignore: np.ndarray | None = None  # float32 (R, 6), like ``rows``: regions without loss; class -1: of all classes
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
        """The largest number of targets in an image, rounded up to a multiple of `TARGET_BUCKET` so that shapes are
        few."""
        buckets = math.ceil(max(self.counts, default=0) / TARGET_BUCKET)
        return max(buckets, 1) * TARGET_BUCKET

    @property
    def on_host(self) -> np.ndarray:
        """``rows`` on the host. Needs no sync with the device if `to` has moved them there."""
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

    images: Tensor  # uint8 (B, 3, H, W)
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
        """Keeps the memory of the tensors that `to` has moved, on another stream, until ``stream`` has used them."""
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
        """Copies images and targets to page-locked memory. torch's DataLoader calls it with ``pin_memory=True``."""
        return replace(self, images=self.images.pin_memory(), targets=self.targets.pin_memory())


class LossOutput(NamedTuple):
    """Loss of one shard of the global batch, not yet normalized.

    The engine sums ``total`` and ``normalizer`` over all shards (ranks, micro-batches) and divides once, so gradients
    do not depend on how a batch is cut into shards. All three tensors live on the device; the step reads none of them.
    """

    total: Tensor  # () sum of all terms, gains applied, differentiable
    normalizer: Tensor  # () float32, no gradient; 0 in a shard without targets; the engine clamps the sum to >= 1
    parts: Tensor  # (P,) the terms of ``total``, detached, in the order of the criterion's ``names``


class Detections(NamedTuple):
    """Detections of a batch after NMS, padded to K per image; an image's slots from its count on are zero."""

    boxes_xyxy: Tensor  # float32 (B, K, 4) canvas pixels
    scores: Tensor  # float32 (B, K), descending
    classes: Tensor  # int64 (B, K)
    counts: Tensor  # int64 (B,)


class LabelArrays:
    """Base of `GroundTruth` and of a data set's index: labels of N images in flat arrays."""

    __slots__ = ()
    offsets: np.ndarray  # int64 (N + 1,): boxes of image i are offsets[i]:offsets[i + 1]
    classes: np.ndarray  # int (M,)
    crowd: np.ndarray  # bool (M,)

    @property
    def image_of_box(self) -> np.ndarray:
        """Image of each box: int64 (M,), ascending."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def boxes_per_class(self, num_classes: int) -> np.ndarray:
        """Counts the objects of each class, without crowd regions: int64 (C,)."""
        return np.bincount(self.classes[~self.crowd], minlength=num_classes)

    def images_per_class(self, num_classes: int, weights: np.ndarray | None = None) -> np.ndarray:
        """Counts the images with at least one object of each class, without crowd regions: int64 (C,).

        With ``weights`` of the images (N,), sums these instead: float64 (C,).
        """
        pairs = np.unique((self.image_of_box * num_classes + self.classes)[~self.crowd])
        image_weights = None if weights is None else weights[pairs // num_classes]
        return np.bincount(pairs % num_classes, image_weights, minlength=num_classes)


@dataclass(frozen=True, slots=True)
class GroundTruth(LabelArrays):
    """Labels of a split for evaluation, in original pixels. Crowd boxes are ignore regions."""

    offsets: np.ndarray  # int64 (N + 1,): boxes of image i are offsets[i]:offsets[i + 1]
    boxes_xywh_px: np.ndarray  # float64 (M, 4)
    classes: np.ndarray  # int64 (M,) 0-based
    crowd: np.ndarray  # bool (M,)
    area_px: np.ndarray  # float64 (M,) object area (segment area if the source has it), for the size ranges
    image_hw: np.ndarray  # int32 (N, 2)
    image_ids: tuple[int | str, ...]  # COCO's ids if the source has them, else derived from file stems (`image_ids_of`)
    category_ids: tuple[int, ...]  # id written to COCO JSON for each 0-based class
    max_det: int = MAX_SCORED_DETECTIONS  # detections per class and image that are scored, highest scores first

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
        """Joins tables one after another; none give an empty table."""
        empty = cls(np.zeros(0, np.int64), np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64))
        joined = [empty, *tables]
        return cls(*(np.concatenate([getattr(table, column.name) for table in joined]) for column in fields(cls)))

    def take(self, rows: np.ndarray | slice) -> DetectionTable:
        """Selects ``rows``: a mask, indices or a slice."""
        return DetectionTable(*(getattr(self, column.name)[rows] for column in fields(self)))

    def top_per_image(self, count: int) -> DetectionTable:
        """Selects the ``count`` detections with the highest scores of each image, image by image."""
        order = np.lexsort((-self.scores, self.image_index))
        image = self.image_index[order]
        rank = np.arange(len(image)) - np.searchsorted(image, image)
        return self.take(order[rank < count])


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Scores of one validation.

    AP is COCO's (101 recall points, at most 100 detections per image). Classes without ground truth have nan and do not
    count in means.
    """

    metrics: dict[str, float]  # means over classes, by the names listed in engine/evaluation/metrics.py
    class_metrics: dict[str, np.ndarray]  # float64 (C,), by the same names
    best_confidence: float  # the confidence with the highest mean F1
    ap_small: float  # IoU 0.50:0.95
    ap_medium: float
    ap_large: float
    class_targets: np.ndarray  # int64 (C,) boxes that are not crowd
    confusion: np.ndarray  # int64 (C + 1, C + 1): rows predicted, columns true, last is background
    confusion_confidence: float  # its confidence threshold: `threshold`, or a default if that is None
    curve_confidence: np.ndarray  # float64 (S,)
    curve_precision: np.ndarray  # float64 (C, S) against confidence
    curve_recall: np.ndarray  # float64 (C, S)
    pr_recall: np.ndarray  # float64 (101,)
    pr_precision: np.ndarray  # float64 (C, 101) at IoU 0.5
    num_images: int
    # `threshold` of the scored detections, and of those shown without box voting; None: unknown.
    scored_confidence: float | None = None
    plain_confidence: float | None = None
    extras: dict[str, float] = field(default_factory=dict)  # validation losses, milliseconds per image

    @property
    def ap(self) -> float:
        """AP at IoU 0.50:0.95; nan without ground truth."""
        return self.metrics["AP"]

    @property
    def class_ap(self) -> np.ndarray:
        """AP of each class at IoU 0.50:0.95: float64 (C,)."""
        return self.class_metrics["AP"]

    @property
    def curve_f1(self) -> np.ndarray:
        """F1 of each class against confidence: float64 (C, S)."""
        return f1_score(self.curve_precision, self.curve_recall)

    @property
    def threshold(self) -> float | None:
        """The confidence with the best mean F1; None if no confidence gives a true positive."""
        return self.best_confidence if self.metrics["f1"] > 0 else None

    @property
    def missed_at_best_confidence(self) -> np.ndarray:
        """Classes that have true positives at a low confidence, but none at `threshold`: int64 (n,)."""
        return np.flatnonzero((self.class_metrics["recall"] == 0) & (self.curve_recall[:, 0] > 0))


def f1_score(precision: np.ndarray, recall: np.ndarray) -> np.ndarray:
    """Returns the harmonic mean of precision and recall, of any shape; 0 where both are 0."""
    total = precision + recall
    return 2 * precision * recall / np.where(total > 0, total, 1.0)


def pad_targets(targets: Tensor, batch_size: int, max_targets: int) -> tuple[Tensor, Tensor]:
    """Pads ragged targets to a fixed shape, without a host sync.

    Args:
        targets: float (M, 6) as in `Targets`, sorted by image.
        max_targets: K; no image has more targets.

    Returns class, cx, cy, w, h as float (B, K, 5), zeros where empty, and a bool mask (B, K) of the targets.
    """
    padded = targets.new_zeros((batch_size, max_targets, 5))
    per_image = torch.zeros(batch_size, dtype=torch.long, device=targets.device)
    if batch_size > 0 and targets.shape[0] > 0:
        image = targets[:, 0].long()
        per_image.scatter_add_(0, image, torch.ones_like(image))
        first = per_image.cumsum(0) - per_image
        slot = torch.arange(targets.shape[0], device=targets.device) - first[image]
        padded[image, slot] = targets[:, 1:]
    # Not ``mask[image, slot] = True``: that copies the scalar to the device, and the host waits for the copy.
    return padded, torch.arange(max_targets, device=targets.device) < per_image[:, None]
