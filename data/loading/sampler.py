"""The sample order of an epoch, and the batch requests of one rank in training.

The order and the canvas sizes depend on (seed, epoch), but not on rank or worker. Global batch k consists of positions
[kB, (k + 1)B) of the epoch, on any number of ranks; each rank renders a contiguous shard of it, which may be empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

import numpy as np

from utils.batches import BatchRequest, SampleKey
from utils.distributed.context import shard_bounds
from utils.rng import Stream, keyed_generator, named_stream

QUAD_PROBABILITY = 0.5  # probability of four samples side by side; otherwise a quad shows one at twice the size


class TrainCanvases:
    """Chooses the canvases of training batches, before ``--multi-scale``: squares, or with ``--rect`` rectangles."""

    def __init__(self, imgsz: int, stride: int, image_hw: np.ndarray | None = None) -> None:
        """
        Args:
            imgsz: side of square canvases, or longer side of images on rectangular ones, pixels.
            stride: divisor of the canvas sides.
            image_hw: int (N, 2), sizes of the samples, for rectangular canvases; None for squares.
        """
        self.imgsz = imgsz
        self.stride = stride
        self.bucket: np.ndarray | None = None  # int (N,), equal for samples whose own canvases would be equal
        self._aspects: np.ndarray | None = None
        if image_hw is not None:
            self._aspects = image_hw[:, 0] / image_hw[:, 1]
            shapes = rect_shapes(self._aspects, self._aspects, imgsz, stride)
            self.bucket = shapes[:, 0] - shapes[:, 1]

    def canvas_hw(self, indices: np.ndarray) -> tuple[int, int]:
        """Returns height and width of the canvas for a batch of the samples ``indices``, pixels."""
        if self._aspects is None:
            return self.imgsz, self.imgsz
        return rect_canvas(self._aspects[indices], self.imgsz, self.stride)

    def extremes(self) -> set[tuple[int, int]]:
        """Returns the canvases of the widest and of the highest sample alone."""
        aspects = np.ones(1) if self._aspects is None else self._aspects
        return {self.canvas_hw(np.array([index])) for index in (aspects.argmin(), aspects.argmax())}


def rect_shapes(low: np.ndarray, high: np.ndarray, imgsz: int, stride: int) -> np.ndarray:
    """Returns the smallest canvases, int64 (n, 2), for training images with a longer side of imgsz.

    ``low``, ``high`` (n,): range of the aspects (height / width) on each canvas. Sides are rounded up to multiples of
    ``stride``.
    """
    sides = np.stack([np.minimum(high, 1), np.minimum(1 / low, 1)], 1)
    return (np.ceil(sides * imgsz / stride - 1e-9) * stride).astype(np.int64)


def rect_canvas(aspects: np.ndarray, imgsz: int, stride: int) -> tuple[int, int]:
    """Returns the smallest canvas for a training batch of images with these aspects (n,)."""
    height, width = rect_shapes(aspects.min(keepdims=True), aspects.max(keepdims=True), imgsz, stride)[0].tolist()
    return height, width


class EpochOrder:
    """The order of the samples in each epoch: a permutation, possibly with repetitions, or random draws."""

    def __init__(
        self, weights: np.ndarray, *, seed: int, batch_size: int, canvases: TrainCanvases, block: int = 0
    ) -> None:
        """
        Args:
            weights: float64 (N,), with a whole sum: how often each sample occurs in an epoch, rounded up in some epochs
                and down in others; see `data.samples.weights`.
            batch_size: B, the size of the global batch.
            canvases: canvases of the same samples. If they are rectangular, samples of similar aspect share a batch.
            block: number of neighbors in the order among which the partners of a mosaic are chosen; 0 for all samples.
        """
        self.seed = seed
        self.batch_size = batch_size
        self.canvases = canvases
        self.block = block
        self.draw_weights: np.ndarray | None = None  # float64 (N,), set for an order of random draws
        self._weights = weights
        self._count = round(weights.sum())

    def __len__(self) -> int:
        return self._count

    def indices(self, epoch: int) -> np.ndarray:
        """Returns the sample at each position of the epoch, int64."""
        rng = keyed_generator(self.seed, Stream.PERMUTATION, epoch)
        if self.draw_weights is None:
            order = rng.permutation(self._epoch_samples(epoch))
        else:
            draw = keyed_generator(self.seed, Stream.IMAGE_WEIGHTS, epoch)
            probabilities = self.draw_weights / self.draw_weights.sum()
            order = draw.choice(len(probabilities), self._count, p=probabilities)
        bucket = self.canvases.bucket
        return order if bucket is None else self._group_by_bucket(order, bucket, rng)

    def _epoch_samples(self, epoch: int) -> np.ndarray:
        """Returns the samples of an epoch, ascending, each repeated according to its weight: int64.

        A sample occurs as often as the whole part of its weight, and once more in a share of the epochs that equals the
        fractional part. The extra samples are a systematic draw: one random start, then steps of 1 along the cumulative
        sum of the fractional parts.
        """
        copies = np.floor(self._weights).astype(np.int64)
        fractions = self._weights - copies
        candidates = np.flatnonzero(fractions)
        num_drawn = self._count - int(copies.sum())
        if num_drawn:
            start = keyed_generator(self.seed, named_stream("repeats"), epoch).random()
            ends = np.cumsum(fractions[candidates])
            drawn = np.searchsorted(ends, start + np.arange(num_drawn), side="right")
            drawn = drawn.clip(max=len(candidates) - 1)  # the last sum may be rounded down
            copies += np.bincount(candidates[drawn], minlength=len(copies))
        return np.repeat(np.arange(len(copies)), copies)

    def _group_by_bucket(self, order: np.ndarray, bucket: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Reorders the samples so that the aspects in each batch are similar.

        ``bucket``: int (N,), equal for samples with equal canvases. The buckets are concatenated, each in random order,
        and cut into batches; the full batches are shuffled.
        """
        order = order[np.argsort(bucket[order], kind="stable")]
        full = self._count // self.batch_size
        head, tail = np.split(order, [full * self.batch_size])
        return np.concatenate([rng.permutation(head.reshape(full, self.batch_size)).reshape(-1), tail])

    def block_bounds(self, position: int) -> tuple[int, int]:
        """Returns start and end of the block around ``position``. The last block of an epoch includes the remainder."""
        last = max(self._count // self.block - 1, 0)
        number = min(position // self.block, last)
        end = self._count if number == last else (number + 1) * self.block
        return number * self.block, end


def count_batches(samples: int, batch_size: int, *, quad: bool) -> int:
    """Returns the number of global batches of an epoch, including the last, possibly smaller one. With ``quad``, an
    epoch may leave out up to three samples."""
    usable = samples // 4 * 4 if quad else samples
    return -(-usable // batch_size)


class DistributedSampler:
    """Divides global batches among ranks: yields requests for one rank's shards, epoch after epoch.

    ``len`` is the number of batches per epoch, see `count_batches`.
    """

    def __init__(
        self,
        order: EpochOrder,
        *,
        rank: int,
        world_size: int,
        run_epochs: int,
        quad: bool = False,
        multi_scale: float = 0.0,
    ) -> None:
        """
        Args:
            run_epochs: length of the whole run, which `InfiniteDataLoader.set_epochs` may change.
            quad: whether four samples make one image of twice the size.
            multi_scale: fraction by which canvas sizes vary up and down from batch to batch.
        """
        self.order = order
        self.rank = rank
        self.world_size = world_size
        self.quad = quad
        self.multi_scale = multi_scale
        self.run_epochs = run_epochs
        self.epoch = 0
        self.first_batch = 0
        self.stops_after_epoch = False  # whether an iteration ends after its epoch, and the next one continues

    def __len__(self) -> int:
        return count_batches(len(self.order), self.order.batch_size, quad=self.quad)

    def global_samples(self, batch: int) -> int:
        """Returns the number of samples in a global batch; four per image with ``quad``."""
        return self.global_images(batch) * (4 if self.quad else 1)

    def global_images(self, batch: int) -> int:
        """Returns the number of images in a global batch."""
        size = min(len(self.order) - batch * self.order.batch_size, self.order.batch_size)
        return size // 4 if self.quad else size

    @property
    def max_pixels(self) -> int:
        """Height times width, summed over the images of the largest possible batch of this rank."""
        stride = self.order.canvases.stride
        side = (math.ceil(self.order.canvases.imgsz * (1 + self.multi_scale) / stride) + 1) * stride
        return -(-self.order.batch_size // self.world_size) * side**2

    def __iter__(self) -> Iterator[BatchRequest]:
        epoch = self.epoch
        yield from self.requests(epoch, self.first_batch)
        while not self.stops_after_epoch:
            epoch += 1
            yield from self.requests(epoch)
        self.set_epoch(epoch + 1)

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Sets the position at which the next iteration begins, initially batch 0 of epoch 0."""
        self.epoch = epoch
        self.first_batch = first_batch

    def requests(self, epoch: int, first_batch: int = 0) -> Iterator[BatchRequest]:
        """Yields this rank's shards of the epoch's batches, from ``first_batch`` on."""
        indices = self.order.indices(epoch)
        for batch in range(first_batch, len(self)):
            yield self._request(indices, epoch, batch)

    def _request(self, indices: np.ndarray, epoch: int, batch: int) -> BatchRequest:
        """Returns the request for this rank's shard of a batch. ``indices``: the samples of the epoch, int64."""
        first = batch * self.order.batch_size
        canvas = self._canvas(indices[first : first + self.order.batch_size], epoch, batch)
        start, end = shard_bounds(self.global_images(batch), self.rank, self.world_size)
        if self.quad:
            quads = [tuple(self._quad(indices, epoch, first + 4 * i, canvas)) for i in range(start, end)]
            return BatchRequest(
                keys=tuple(chain.from_iterable(quads)),
                canvas_hw=(2 * canvas[0], 2 * canvas[1]),
                run_epochs=self.run_epochs,
                samples_per_image=tuple(map(len, quads)),
            )
        keys = tuple(self._keys(indices, epoch, range(first + start, first + end), canvas))
        return BatchRequest(keys, canvas, run_epochs=self.run_epochs)

    def _keys(self, indices: np.ndarray, epoch: int, positions: range, canvas: tuple[int, int]) -> Iterator[SampleKey]:
        """Yields the keys of the samples at some ``positions`` of the epoch."""
        bounds = (0, 0)
        block: tuple[int, ...] = ()
        for position in positions:
            if self.order.block and not bounds[0] <= position < bounds[1]:
                bounds = self.order.block_bounds(position)
                block = tuple(indices[slice(*bounds)].tolist())  # one object, which pickle sends to the worker once
            yield SampleKey(int(indices[position]), epoch, position, canvas, block)

    def _quad(self, indices: np.ndarray, epoch: int, first: int, canvas: tuple[int, int]) -> Iterator[SampleKey]:
        """Yields the keys of four samples side by side, or of one of them at twice the size."""
        rng = keyed_generator(self.order.seed, Stream.QUAD, epoch, first)
        if rng.random() < QUAD_PROBABILITY:
            return self._keys(indices, epoch, range(first, first + 4), canvas)
        position = first + int(rng.integers(4))
        double = (2 * canvas[0], 2 * canvas[1])
        return self._keys(indices, epoch, range(position, position + 1), double)

    def _canvas(self, indices: np.ndarray, epoch: int, batch: int) -> tuple[int, int]:
        """Returns height and width of the canvas for a batch of the samples ``indices``, int64, pixels."""
        canvas_hw = self.order.canvases.canvas_hw(indices)
        if self.multi_scale == 0:
            return canvas_hw
        rng = keyed_generator(self.order.seed, Stream.MULTI_SCALE, epoch, batch)
        return self._scaled(canvas_hw, rng.uniform(1 - self.multi_scale, 1 + self.multi_scale))

    def _scaled(self, canvas_hw: tuple[int, int], factor: float) -> tuple[int, int]:
        stride = self.order.canvases.stride
        # At least two strides per side: batch norm needs more than one value per channel.
        height, width = (max(round(side * factor / stride), 2) * stride for side in canvas_hw)
        return height, width

    def extreme_canvases(self) -> set[tuple[int, int]]:
        """Returns heights and widths, pixels, of the smallest and largest canvases that samples are rendered to."""
        sizes = self.order.canvases.extremes()
        if self.multi_scale:
            sizes = {self._scaled(size, 1 + sign * self.multi_scale) for size in sizes for sign in (-1, 1)}
        return sizes | ({(2 * height, 2 * width) for height, width in sizes} if self.quad else set())
