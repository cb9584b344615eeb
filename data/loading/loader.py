"""Data loaders with workers that outlive the epoch: `InfiniteDataLoader` for training, `ValidationLoader`."""

from __future__ import annotations

import errno
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.signal_handling import _remove_worker_pids
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from data.index import DatasetIndex
from data.loading.sampler import KeyedDistributedSampler
from data.loading.worker import BatchSlots, RequestDataset, init_worker, open_slots
from data.samples.dataset import AugmentedImages, LoadImagesAndLabels
from data.samples.weights import image_weights, inverse_frequency_weights
from utils.batches import Batch, BatchRequest
from utils.errors import UserError
from utils.machine.limits import DISK_FULL

PREFETCHED_BATCHES = 2  # per worker
PIN_THREAD_PATIENCE_S = 5.0  # longest wait for torch's pin-memory thread to end
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


class WorkerIterator(_MultiProcessingDataLoaderIter):
    """Starts workers and iterates over their batches.

    The workers also end if one of them fails to start, or if nobody closes the iterator, where those of torch would
    not. This relies on private attributes of torch's iterator, as `_RequestLoader` relies on some of torch's loader;
    tests/data/loading/test_loader.py lists them all, and checks that torch still has them.
    """

    def __init__(self, loader: DataLoader) -> None:
        self.owner_pid = os.getpid()
        try:
            super().__init__(loader)
        except BaseException:
            self._shutdown = True  # torch's destructor would use attributes that its constructor has not set yet
            self.kill_workers()
            raise

    def close(self) -> None:
        """Ends the workers as torch does, by a message to each."""
        self._shutdown_workers()

    def __del__(self) -> None:
        """Ends the workers of an iterator that nobody has closed.

        Torch's destructor would use their queues and sentinels. If a reference cycle was garbage-collected, these may
        already be finalized, and it would write to and close descriptors that belong to other objects by then.
        """
        if self._shutdown or os.getpid() != self.owner_pid:  # a forked process inherits the iterator, not the workers
            return
        self._shutdown = True
        _remove_worker_pids(id(self))  # torch would raise an error about workers that are killed
        if hasattr(self, "_pin_memory_thread"):
            self._pin_memory_thread_done_event.set()
            self._worker_result_queue.put((None, None))  # wakes the thread, which keeps this queue alive
            self._pin_memory_thread.join(PIN_THREAD_PATIENCE_S)
        self.kill_workers()

    def kill_workers(self) -> None:
        """Ends the workers that were started, without using any descriptor."""
        for worker in getattr(self, "_workers", ()):
            worker.kill()
            worker.join()


class _RequestLoader(DataLoader):
    """Yields a batch for each request. Its workers stay alive between iterations."""

    def __init__(
        self,
        samples: LoadImagesAndLabels,
        requests: Sequence[BatchRequest] | KeyedDistributedSampler,
        *,
        max_pixels: int,
        workers: int,
        pin_memory: bool,
    ) -> None:
        """
        Args:
            samples: samples that make up the batches. Torch's data set is a `RequestDataset`, whose items are batches.
            max_pixels: height times width, summed over the images of the largest batch.
            workers: number of processes that render batches; 0 to render in this process.
        """
        self.samples = samples
        pixel_bytes = self.index.pixels.nbytes
        slots = workers * PREFETCHED_BATCHES + RESERVED_BATCHES
        self._slots = open_slots(slots, pixel_bytes * max_pixels) if workers > 0 else None
        self._started_iterator: Iterator[Batch] | None = None  # torch's iterator after `start`
        super().__init__(
            RequestDataset(samples, self._slots),
            batch_size=None,  # each "index" is the request for a whole batch
            sampler=requests if self._slots is None else _SlottedRequests(requests, self._slots, pixel_bytes),
            num_workers=workers,
            pin_memory=pin_memory,
            worker_init_fn=partial(init_worker, os.getpid()),
            # By default, from Python 3.14 on, the workers' parent would be another process.
            multiprocessing_context="fork" if workers > 0 and sys.platform == "linux" else None,
            persistent_workers=workers > 0,
            prefetch_factor=PREFETCHED_BATCHES if workers > 0 else None,
            generator=torch.Generator(),  # drawing worker seeds, which nothing uses, leaves the global generator alone
        )

    def check_worker_number_rationality(self) -> None:
        """Suppresses torch's warning, because `data.loading.build.warn_about_workers` warns already."""

    def _get_iterator(self) -> Any:
        """Starts the workers. Raises UserError if /dev/shm has no room for the semaphores of their queues."""
        if self.num_workers == 0:
            return super()._get_iterator()
        cv2.setNumThreads(1)  # ends OpenCV's threads: a fork would inherit their locks, but not the threads
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
        return self.samples.reader.image_index

    def start(self) -> None:
        """Starts the workers, with the first batches of the next ``iter()``: the sooner, the fewer threads hold locks
        that a fork would inherit."""
        self._started_iterator = super().__iter__()

    def close(self) -> None:
        """Ends the workers. Another ``iter()`` would start new ones."""
        iterator = self._iterator
        self._iterator = None
        self._started_iterator = None
        if isinstance(iterator, WorkerIterator):
            iterator.close()
            if self._slots is not None:
                self._slots.reclaim()

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # a generator around torch's iterator
        started = self._started_iterator
        self._started_iterator = None
        for batch in super().__iter__() if started is None else started:
            if isinstance(batch, UserError):
                self.close()
                raise batch
            yield batch


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

    def __init__(
        self,
        samples: AugmentedImages,
        sampler: KeyedDistributedSampler,
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
        self._requests = sampler
        # float64 (C,); None if images are not drawn with weights. A mid-epoch checkpoint must save them.
        self.class_weights: np.ndarray | None = None
        super().__init__(samples, sampler, max_pixels=sampler.max_pixels, workers=workers, pin_memory=pin_memory)
        sampler.stops_after_epoch = weighted or stops_after_epoch
        if weighted:
            self.set_class_weights(inverse_frequency_weights(self.index.boxes_per_class(len(self.index.names))))

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # a generator around torch's iterator
        while True:  # torch's iterator ends with the sampler's: never, or with ``stops_after_epoch`` after each epoch
            yield from super().__iter__()

    def start(self) -> None:
        """Starts the workers, unless a hook may still change the first epoch's images (``stops_after_epoch``)."""
        if not self._requests.stops_after_epoch:
            super().start()

    def start_at(self, epoch: int, batch: int = 0) -> None:
        """Sets the position at which the next ``iter()`` begins, to resume a run.

        Batch ``len(loader)`` is the first batch of the next epoch.
        """
        self._requests.set_epoch(epoch + batch // len(self))
        self._requests.first_batch = batch % len(self)

    def render(self, epoch: int, batch: int) -> Batch:
        """Renders this rank's shard of batch ``batch`` to the host, in this process, outside of any iteration."""
        rendered = self.dataset[next(self._requests.requests(epoch, batch))]
        if isinstance(rendered, UserError):
            raise rendered
        return rendered

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
