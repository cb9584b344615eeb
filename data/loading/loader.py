"""Data loaders with workers that outlive the epoch: `InfiniteDataLoader` for training, `ValidationLoader`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

import numpy as np

from data.index import DatasetIndex
from data.loading.collate import render_batch
from data.loading.sampler import DistributedSampler
from data.loading.workers import WorkerPool
from data.samples.dataset import AugmentedImages, LoadImagesAndLabels
from data.samples.weights import image_weights, inverse_frequency_weights
from utils.batches import Batch, BatchRequest


class _RequestLoader:
    """Yields a batch for each request. Its workers stay alive between iterations."""

    def __init__(
        self,
        samples: LoadImagesAndLabels,
        requests: Sequence[BatchRequest] | DistributedSampler,
        *,
        max_pixels: int,
        workers: int,
        pin_memory: bool,
    ) -> None:
        """
        Args:
            samples: samples that make up the batches.
            max_pixels: height times width, summed over the images of the largest batch.
            workers: number of processes that render batches; 0 to render in this process.
            pin_memory: whether to copy batches to page-locked memory.
        """
        self.samples = samples
        self._requests = requests
        self._pin_memory = pin_memory
        self._open_pool = None
        if workers > 0:
            self._open_pool = partial(
                WorkerPool, samples, workers=workers, max_pixels=max_pixels, pin_memory=pin_memory
            )
        self._pool: WorkerPool | None = None  # between iterations
        self._started: Iterator[Batch] | None = None  # the next iteration, after `start`

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def index(self) -> DatasetIndex:
        """Index of the split's images; the samples may be tiles of these."""
        return self.samples.reader.image_index

    def start(self) -> None:
        """Starts the workers, with the first batches of the next ``iter()``: the sooner, the fewer threads hold locks
        that a fork would inherit."""
        self._started = self._iterate()

    def __iter__(self) -> Iterator[Batch]:
        started = self._started
        self._started = None
        return self._iterate() if started is None else started

    def _iterate(self) -> Iterator[Batch]:
        requests = iter(self._requests)
        if self._open_pool is None:
            return map(self._render, requests)
        pool = self._pool or self._open_pool()
        self._pool = None
        for request in islice(requests, pool.capacity):
            pool.request(request)
        return self._receive(pool, requests)

    def _receive(self, pool: WorkerPool, requests: Iterator[BatchRequest]) -> Iterator[Batch]:
        """Yields the batches of pending and further requests, and keeps the pool if the iteration gets to its end."""
        try:
            while pool.pending:
                batch = pool.receive()
                for request in islice(requests, 1):
                    pool.request(request)
                yield batch
        except BaseException:  # also if the iterator is deleted
            pool.close()
            raise
        self._pool = pool

    def _render(self, request: BatchRequest) -> Batch:
        """Renders a batch in this process."""
        batch = render_batch(self.samples, request)
        return batch.pin_memory() if self._pin_memory else batch


class ValidationLoader(_RequestLoader):
    """Yields each of this rank's batches once per ``iter()``."""

    def __init__(
        self,
        samples: LoadImagesAndLabels,
        requests: Sequence[BatchRequest],
        *,
        workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        max_pixels = max((len(r.images) * math.prod(r.canvas_hw) for r in requests), default=0)
        super().__init__(samples, requests, max_pixels=max_pixels, workers=workers, pin_memory=pin_memory)


class InfiniteDataLoader(_RequestLoader):
    """Yields training batches endlessly, each epoch in a new order; workers prefetch across epochs.

    ``len`` is the number of batches per epoch, the same on every rank.
    """

    samples: AugmentedImages
    _requests: DistributedSampler

    def __init__(
        self,
        samples: AugmentedImages,
        sampler: DistributedSampler,
        *,
        workers: int = 0,
        pin_memory: bool = False,
        weighted: bool = False,
        stops_after_epoch: bool = False,
    ) -> None:
        """
        Args:
            weighted: whether to draw images with class weights; see `set_class_weights`.
            stops_after_epoch: whether to disable prefetching across epochs, so that `set_epochs` can be called
                between them. ``weighted`` implies it.
        """
        # float64 (C,); None if images are not drawn with weights. A mid-epoch checkpoint must save them.
        self.class_weights: np.ndarray | None = None
        super().__init__(samples, sampler, max_pixels=sampler.max_pixels, workers=workers, pin_memory=pin_memory)
        sampler.stops_after_epoch = weighted or stops_after_epoch
        if weighted:
            self.set_class_weights(inverse_frequency_weights(self.index.boxes_per_class(len(self.index.names))))

    def __iter__(self) -> Iterator[Batch]:
        while True:  # an iteration ends with the sampler's: never, or with ``stops_after_epoch`` after each epoch
            yield from super().__iter__()

    def start(self) -> None:
        """Starts the workers, unless a hook may still change the first epoch's images (``stops_after_epoch``)."""
        if not self._requests.stops_after_epoch:
            super().start()

    def start_at(self, epoch: int, batch: int = 0) -> None:
        """Sets the position at which the next ``iter()`` begins, to resume a run.

        Batch ``len(loader)`` is the first batch of the next epoch.
        """
        self._requests.set_epoch(epoch + batch // len(self), first_batch=batch % len(self))

    def render(self, epoch: int, batch: int) -> Batch:
        """Renders this rank's shard of batch ``batch`` to the host, in this process, outside of any iteration."""
        return render_batch(self.samples, next(self._requests.requests(epoch, batch)))

    def global_images(self, batch: int) -> int:
        """Returns the number of images in batch ``batch`` of an epoch, over all ranks."""
        return self._requests.global_images(batch)

    def global_samples(self, batch: int) -> int:
        """Returns the number of samples in batch ``batch`` of an epoch, over all ranks; with ``--quad``, an
        image counts as four."""
        return self._requests.global_samples(batch)

    def set_epochs(self, epochs: int) -> None:
        """Sets the length of the whole run, for epochs that begin after this call. Requires ``stops_after_epoch``."""
        self._requests.run_epochs = epochs

    def set_class_weights(self, weights: np.ndarray) -> None:
        """Sets class weights (C,), not negative and equal on every rank, for epochs that begin after this call.

        Initially the weights are inversely proportional to class frequency. Requires ``weighted``. An image is drawn
        with its weight from `image_weights` times its number of occurrences in an unweighted epoch.
        """
        self.class_weights = np.asarray(weights, np.float64)
        by_class = image_weights(self.class_weights, self.samples.sample_index)
        self._requests.order.draw_weights = by_class * self.samples.weights
