"""Data loaders with workers that outlive the epoch: `InfiniteDataLoader` for training, `ValidationLoader`."""

from __future__ import annotations

import errno
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from data.index.index import DatasetIndex
from data.loading.sampler import KeyedDistributedSampler
from data.loading.shared_memory import BatchSlots, open_slots
from data.loading.worker import RequestDataset, init_worker, render_batch
from data.loading.worker_iterator import WorkerIterator
from data.samples.batch_request import BatchRequest
from data.samples.dataset import AugmentedImages, LoadImagesAndLabels, Samples
from data.samples.sample_weights import image_weights, inverse_frequency_weights
from utils.batches import Batch
from utils.errors import UserError
from utils.machine.limits import DISK_FULL

PREFETCHED_BATCHES = 2  # per worker
RESERVED_BATCHES = 4  # slots for batches that the parent is still using
# Errors of sem_open(3), which creates the semaphores of the workers' queues, if /dev/shm cannot be used.
_NO_SEMAPHORES = frozenset((*DISK_FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOSYS))


@dataclass
class _SlottedRequests:
    """Assigns each request a slot to render into, if one is free."""

    requests: Sequence[BatchRequest] | KeyedDistributedSampler
    slots: BatchSlots
    pixel_bytes: int

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[BatchRequest]:
        for request in self.requests:
            nbytes = self.pixel_bytes * len(request.images) * math.prod(request.canvas_hw)
            yield replace(request, slot=self.slots.take(nbytes))


@dataclass(frozen=True)
class WorkerSettings:
    """The processes that produce a loader's batches."""

    workers: int = 0  # number of processes; 0 to render in this process
    pin_memory: bool = False
    make_batch: Callable[[BatchRequest], Any] | None = None  # picklable, runs in the workers; None for `render_batch`


class _RequestLoader(DataLoader):
    """Yields a batch for each request. Its workers stay alive between iterations."""

    def __init__(
        self,
        samples: Samples,
        requests: Sequence[BatchRequest] | KeyedDistributedSampler,
        max_pixels: int,
        settings: WorkerSettings,
    ) -> None:
        """
        Args:
            samples: samples that make up the batches. Torch's data set is a `RequestDataset`, whose items are batches.
            max_pixels: height times width, summed over the images of the largest batch.
        """
        self.samples = samples
        workers = settings.workers
        slots = workers * PREFETCHED_BATCHES + RESERVED_BATCHES
        uses_slots = workers > 0 and settings.make_batch is None
        pixel_bytes = self.index.pixels.nbytes
        self._slots = open_slots(slots, pixel_bytes * max_pixels) if uses_slots else None
        super().__init__(
            RequestDataset(settings.make_batch or partial(render_batch, samples, self._slots), self._slots),
            batch_size=None,  # each "index" is the request for a whole batch
            sampler=requests if self._slots is None else _SlottedRequests(requests, self._slots, pixel_bytes),
            num_workers=workers,
            pin_memory=settings.pin_memory,
            worker_init_fn=partial(init_worker, os.getpid()),
            # By default, from Python 3.14 on, the workers' parent would be another process.
            multiprocessing_context="fork" if workers > 0 and sys.platform == "linux" else None,
            persistent_workers=workers > 0,
            prefetch_factor=PREFETCHED_BATCHES if workers > 0 else None,
            generator=torch.Generator(),  # drawing worker seeds, which nothing uses, leaves the global generator alone
        )

    def check_worker_number_rationality(self) -> None:
        """Suppresses torch's warning, because `data.loading.worker_count.log_loader_workers` warns already."""

    def _get_iterator(self) -> Any:
        """Starts the workers. Raises UserError if /dev/shm has no room for the semaphores of their queues."""
        if self.num_workers == 0:
            return super()._get_iterator()
        try:
            return WorkerIterator(self)
        except OSError as error:
            if error.errno not in _NO_SEMAPHORES:
                raise
            reason = "is full" if error.errno in DISK_FULL else f"cannot be used ({(error.strerror or '').lower()})"
            raise UserError(
                f"--workers {self.num_workers}: loader processes need semaphores in /dev/shm, which {reason}; make it "
                "larger and writable (docker run --shm-size=8g), or use --workers 0"
            ) from None

    @property
    def index(self) -> DatasetIndex:
        """Index of the split's images; the samples may be tiles of these."""
        return self.samples.reader.index

    def close(self) -> None:
        """Ends the workers. Another ``iter()`` would start new ones."""
        iterator = self._iterator
        self._iterator = None
        if isinstance(iterator, WorkerIterator):
            iterator.close()
            if self._slots is not None:
                self._slots.reclaim()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator around torch's iterator
        for batch in super().__iter__():
            if isinstance(batch, UserError):
                self.close()
                raise batch
            yield batch


class ValidationLoader(_RequestLoader):
    """Yields each of this rank's batches once per ``iter()``."""

    def __init__(
        self, samples: LoadImagesAndLabels, requests: Sequence[BatchRequest], settings: WorkerSettings
    ) -> None:
        max_pixels = max((len(r.images) * math.prod(r.canvas_hw) for r in requests), default=0)
        super().__init__(samples, requests, max_pixels, settings)


class InfiniteDataLoader(_RequestLoader):
    """Yields training batches endlessly, each epoch in a new order; workers prefetch across epochs.

    ``len`` is the number of batches per epoch, the same on every rank.
    """

    samples: AugmentedImages

    def __init__(
        self,
        samples: AugmentedImages,
        sampler: KeyedDistributedSampler,
        settings: WorkerSettings,
        *,
        weighted: bool = False,
        stops_after_epoch: bool = False,
        renderer: Callable[[Any], Batch] | None = None,
    ) -> None:
        """
        Args:
            weighted: whether to draw images with class weights; see `set_class_weights`.
            stops_after_epoch: whether to disable prefetching across epochs, so that `set_epochs` can be called
                between them.
            renderer: turns a result of ``make_batch`` into a `Batch` on the device; None if the result is a `Batch`.
        """
        self.renderer = renderer
        self._requests = sampler
        # float64 (C,); None if images are not drawn with weights. A mid-epoch checkpoint must save them.
        self.class_weights: np.ndarray | None = None
        super().__init__(samples, sampler, sampler.max_pixels, settings)
        sampler.stops_after_epoch = weighted or stops_after_epoch
        if weighted:
            self.set_class_weights(inverse_frequency_weights(self.index.boxes_per_class(len(self.index.names))))

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator around torch's iterator
        while True:  # torch's iterator ends after each epoch with ``stops_after_epoch``, otherwise never
            yield from super().__iter__()

    def start_at(self, epoch: int, batch: int = 0) -> None:
        """Sets the position at which the next ``iter()`` begins, to resume a run.

        Batch ``len(loader)`` is the first batch of the next epoch.
        """
        self._requests.start = (epoch + batch // len(self), batch % len(self))

    def render(self, epoch: int, batch: int) -> Batch:
        """Renders this rank's shard of batch ``batch`` to the host, in this process, outside of any iteration."""
        rendered = self.dataset[next(self._requests.requests(epoch, batch))]
        if isinstance(rendered, UserError):
            raise rendered
        if self.renderer is None:
            return rendered
        return self.renderer(rendered).to(torch.device("cpu"), non_blocking=False)

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
