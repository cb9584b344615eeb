"""In which order an epoch visits the images, and on which canvas: functions of (seed, epoch), not of rank or worker."""

from __future__ import annotations

import math

import numpy as np

from utils.rng import Stream, keyed_generator


class EpochOrder:
    """A fresh order each epoch: a permutation, or draws by weight; gathered by aspect for rectangular batches."""

    def __init__(
        self,
        count: int,
        *,
        seed: int,
        batch_size: int,
        imgsz: int,
        stride: int,
        image_hw: np.ndarray | None = None,
        pad: float = 0.0,
        block: int = 0,
    ) -> None:
        """
        Args:
            count: N images.
            seed: of the run.
            batch_size: B, the global batch.
            imgsz: side of square canvases, longer side of images on rectangular ones, pixels.
            stride: canvas sides are its multiples.
            image_hw: int (N, 2); given for rectangular batches only.
            pad: strides added to each side of a rectangular canvas before rounding up.
            block: neighbours in the order that are partners of each other; 0: all images are.
        """
        self.seed = seed
        self.batch_size = batch_size
        self.imgsz = imgsz
        self.stride = stride
        self.pad = pad
        self.block = block
        self.weights: np.ndarray | None = None  # float64 (N,), of images; set for weighted draws
        self._count = count
        self._aspects = None if image_hw is None else image_hw[:, 0] / image_hw[:, 1]

    def __len__(self) -> int:
        return self._count

    def indices(self, epoch: int) -> np.ndarray:
        """Images int64 (N,) by position in the epoch. Every image once, unless drawn by weight (with replacement)."""
        rng = keyed_generator(self.seed, Stream.PERMUTATION, epoch)
        if self.weights is None:
            order = rng.permutation(self._count)
        else:
            draw = keyed_generator(self.seed, Stream.IMAGE_WEIGHTS, epoch)
            order = draw.choice(self._count, self._count, p=self.weights / self.weights.sum())
        return order if self._aspects is None else self._gathered(order, rng)

    def _gathered(self, order: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The same images such that each batch holds similar aspects.

        Images whose own canvas would be the same form a bucket, and stay in random order within it. The row of buckets
        is cut into batches, and the full batches are shuffled: their number is the same in every epoch.
        """
        shapes = rect_shapes(self._aspects, self._aspects, self.imgsz, self.stride, self.pad)
        bucket = (shapes[:, 0] - shapes[:, 1])[order]
        order = order[np.argsort(bucket, kind="stable")]
        full = self._count // self.batch_size
        head, tail = np.split(order, [full * self.batch_size])
        return np.concatenate([rng.permutation(head.reshape(full, self.batch_size)).reshape(-1), tail])

    def block_bounds(self, position: int) -> tuple[int, int]:
        """First position and end of the block around ``position``. Blocks are aligned to the epoch's beginning; what is
        left at its end belongs to the last one."""
        last = max(self._count // self.block - 1, 0)
        number = min(position // self.block, last)
        return number * self.block, self._count if number == last else (number + 1) * self.block

    def canvas(self, indices: np.ndarray) -> tuple[int, int]:
        """Height and width for a batch of these images, pixels."""
        if self._aspects is None:
            return self.imgsz, self.imgsz
        aspects = self._aspects[indices]
        shape = rect_shapes(aspects.min(keepdims=True), aspects.max(keepdims=True), self.imgsz, self.stride, self.pad)
        return int(shape[0, 0]), int(shape[0, 1])


def rect_shapes(low: np.ndarray, high: np.ndarray, imgsz: int, stride: int, pad: float) -> np.ndarray:
    """The smallest canvases for images of aspects (height / width) from ``low`` to ``high`` (n,), longer side imgsz.

    Returns:
        int64 (n, 2), height and width, rounded up to strides after adding ``pad`` strides.
    """
    share = np.stack([np.minimum(high, 1), np.minimum(1 / low, 1)], 1)
    return (np.ceil(share * imgsz / stride + pad - 1e-9) * stride).astype(np.int64)


def fixed_batches(
    image_hw: np.ndarray, *, batch_size: int, imgsz: int, stride: int, rect: bool, pad: float
) -> list[tuple[np.ndarray, tuple[int, int]]]:
    """The batches of validation: every image once, in the order of the data set, or of aspect if ``rect``.

    Args:
        image_hw: int (N, 2).
        batch_size: images a batch; the last may hold fewer.
        imgsz, stride, pad: as in `EpochOrder`.

    Returns:
        Per batch its images int64 (B,) and the canvas' height and width.
    """
    side = math.ceil(imgsz / stride) * stride
    count = len(image_hw)
    aspects = image_hw[:, 0] / image_hw[:, 1]
    order = np.argsort(aspects, kind="stable") if rect else np.arange(count)
    batches = []
    for start in range(0, count, batch_size):
        members = order[start : start + batch_size]
        canvas = (side, side)
        if rect:
            own = aspects[members]
            shape = rect_shapes(own.min(keepdims=True), own.max(keepdims=True), imgsz, stride, pad)
            canvas = (int(shape[0, 0]), int(shape[0, 1]))
        batches.append((members, canvas))
    return batches


def inverse_frequency_weights(classes: np.ndarray, num_classes: int) -> np.ndarray:
    """Class weights float64 (C,) that sum to C: inverse to the number of labels, which counts as 1 at least."""
    counts = np.bincount(classes, minlength=num_classes)
    inverse = 1 / np.maximum(counts, 1)
    return inverse * num_classes / inverse.sum()


def image_weights(
    class_weights: np.ndarray, offsets: np.ndarray, classes: np.ndarray, counted: np.ndarray
) -> np.ndarray:
    """The weight with which each image is drawn: the sum of its labels' class weights.

    Images without labels get the mean of the others, so that the share of background stays what it is.

    Args:
        class_weights: (C,), not negative.
        offsets: int64 (N + 1,), labels of image i are offsets[i]:offsets[i + 1].
        classes: int (M,).
        counted: bool (M,), labels that count (not crowd).

    Returns:
        float64 (N,), positive sum.
    """
    of_label = np.where(counted, class_weights[classes], 0.0)
    cumulative = np.concatenate([[0.0], np.cumsum(of_label)])
    has_label = np.diff(np.concatenate([[0], np.cumsum(counted)])[offsets]) > 0
    weights = np.diff(cumulative[offsets]).clip(min=0)
    if weights[has_label].sum() <= 0:
        return np.ones(len(offsets) - 1)
    return np.where(has_label, weights, weights[has_label].mean())
