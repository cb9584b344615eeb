"""Loaders whose workers outlive the epoch: `InfiniteDataLoader` for training, `ValidationLoader` for one pass."""

from __future__ import annotations

import math
import os
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
from data.samples.augmented import AugmentedImages
from data.samples.batch_request import BatchRequest
from data.samples.dataset import LoadImagesAndLabels
from utils.errors import UserError
from utils.structures import Batch

PREFETCHED_BATCHES = 2  # per worker
RESERVED_BATCHES = 4  # slots for batches that the parent still uses


@dataclass
class _SlottedRequests:
    """Adds to each request a slot to render into, if one is free."""

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
    """How a loader makes its batches."""

    workers: int = 0  # number of processes; 0: this process renders
    pin_memory: bool = False
    make_batch: Callable[[BatchRequest], Any] | None = None  # runs in the workers, picklable; None: `render_batch`


class _RequestLoader(DataLoader):
    """Yields a batch for each request. Its workers stay alive between iterations."""

    def __init__(
        self,
        dataset: LoadImagesAndLabels,
        requests: Sequence[BatchRequest] | KeyedDistributedSampler,
        most_pixels: int,
        settings: WorkerSettings,
    ) -> None:
        """``most_pixels``: of a batch."""
        self.samples = dataset
        workers = settings.workers
        slots = workers * PREFETCHED_BATCHES + RESERVED_BATCHES
        uses_slots = workers > 0 and settings.make_batch is None
        pixel_bytes = dataset.index.pixels.nbytes
        self._slots = open_slots(slots, pixel_bytes * most_pixels) if uses_slots else None
        super().__init__(
            RequestDataset(settings.make_batch or partial(render_batch, dataset, self._slots), self._slots),
            batch_size=None,  # each "index" is the request for a whole batch
            sampler=requests if self._slots is None else _SlottedRequests(requests, self._slots, pixel_bytes),
            num_workers=workers,
            pin_memory=settings.pin_memory,
            worker_init_fn=partial(init_worker, os.getpid()),
            persistent_workers=workers > 0,
            prefetch_factor=PREFETCHED_BATCHES if workers > 0 else None,
            generator=torch.Generator(),  # for seeds, which are not used; the global generator does not change
        )

    def check_worker_number_rationality(self) -> None:
        """Does not warn: `data.loading.build.loader_workers` does."""

    @property
    def index(self) -> DatasetIndex:
        """The scanned split that the batches are from."""
        return self.samples.split_index

    def close(self) -> None:
        """Ends the workers. Another ``iter()`` would start new ones."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()
            if self._slots is not None:
                self._slots.take_back()

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            if isinstance(batch, UserError):
                self.close()
                raise batch
            yield batch


class ValidationLoader(_RequestLoader):
    """Yields each of this rank's batches once per ``iter()``."""

    def __init__(
        self, dataset: LoadImagesAndLabels, requests: Sequence[BatchRequest], settings: WorkerSettings
    ) -> None:
        most_pixels = max((len(r.images) * math.prod(r.canvas_hw) for r in requests), default=0)
        super().__init__(dataset, requests, most_pixels, settings)


class InfiniteDataLoader(_RequestLoader):
    """Training batches without end, each epoch in a new order. Workers prefetch across epochs. ``len`` is the number of
    batches per epoch, the same on every rank."""

    samples: AugmentedImages

    def __init__(
        self,
        dataset: AugmentedImages,
        sampler: KeyedDistributedSampler,
        settings: WorkerSettings,
        *,
        weighted: bool = False,
        by_epoch: bool = False,
        renderer: Callable[[Any], Batch] | None = None,
    ) -> None:
        """
        Args:
            weighted: draw images by class weights; see `set_class_weights`.
            by_epoch: prefetch nothing across epochs, so that `set_epochs` can be called between them.
            renderer: turns the results of ``make_batch`` into a `Batch` on the device; None: they are one on the host.
        """
        self.renderer = renderer
        self._requests = sampler
        # float64 (C,); None if images are not drawn by weight. To be saved with a position inside an epoch.
        self.class_weights: np.ndarray | None = None
        super().__init__(dataset, sampler, sampler.most_pixels, settings)
        sampler.by_epoch = weighted or by_epoch
        if weighted:
            from data.loading.class_balance import inverse_frequency_weights

            self.set_class_weights(inverse_frequency_weights(self.index.boxes_per_class(len(self.index.names))))

    def __iter__(self) -> Iterator[Any]:
        while True:  # by epoch, else the first iteration is endless
            yield from super().__iter__()

    def start_at(self, epoch: int, batch: int = 0) -> None:
        """Sets where the next ``iter()`` begins (to resume). Batch ``len(loader)`` is the first of the next epoch."""
        self._requests.start = (epoch + batch // len(self), batch % len(self))

    def render(self, epoch: int, batch: int) -> Batch:
        """This rank's shard of batch ``batch``, rendered in this process, on the host, apart from any iteration."""
        rendered = self.dataset[next(self._requests.requests(epoch, batch))]
        if isinstance(rendered, UserError):
            raise rendered
        if self.renderer is None:
            return rendered
        return self.renderer(rendered).to(torch.device("cpu"), non_blocking=False)

    def global_images(self, batch: int) -> int:
        """Images in batch ``batch`` of an epoch, over all ranks."""
        return self._requests.global_images(batch)

    def global_samples(self, batch: int) -> int:
        """Samples in batch ``batch`` of an epoch, over all ranks: four in an image of ``--quad``."""
        return self._requests.global_samples(batch)

    def set_epochs(self, epochs: int) -> None:
        """Sets the number of epochs of the whole run, for epochs that begin after this call; needs ``by_epoch``."""
        self._requests.epochs = epochs

    def set_class_weights(self, weights: np.ndarray) -> None:
        """Sets class weights (C,), not negative and the same on every rank, for epochs that begin after this call.
        Initially they are inverse to the classes' frequencies. Needs ``weighted``. See `image_weights`."""
        from data.loading.class_balance import image_weights

        self.class_weights = np.asarray(weights, np.float64)
        self._requests.order.weights = image_weights(self.class_weights, self.samples.index)
