"""`InfiniteDataLoader`: batches from workers that outlive the epoch."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader

from data.dataset import LoadImagesAndLabels
from data.loading.collate import RenderedBatches
from data.loading.shared_memory import BatchSlots, PageLock, open_slots
from data.sampler import BatchRequest, EndlessRequests, ShardedBatches, image_weights, inverse_frequency_weights
from utils.errors import UserError
from utils.machine.limits import explanation
from utils.structures import Batch

PREFETCHED_BATCHES = 2  # a worker
HELD_BATCHES = 4  # slots for those that the parent has not done with
ORPHAN_LOOK_S = 0.5  # till then orphans hold the sockets by which other ranks would notice


@dataclass(frozen=True, slots=True)
class _Failure:
    """A UserError on its way from a worker, whose message torch would wrap in a traceback."""

    message: str


class _Requests:
    """As torch sees the data set: a request is an index. Mistakes of the user's, and what the machine refuses a worker,
    come back as `_Failure`."""

    def __init__(self, make_batch: Callable[[BatchRequest], Any]) -> None:
        self.make_batch = make_batch

    def __getitem__(self, request: BatchRequest) -> Any:
        try:
            return self.make_batch(request)
        except UserError as error:
            return _Failure(str(error))
        except Exception as error:
            line = explanation(error)
            if line is None:
                raise
            return _Failure(line)


class _SlottedRequests:
    """Requests as they go out to workers, each with a slot to draw into while there are any."""

    def __init__(self, requests: EndlessRequests | ShardedBatches, slots: BatchSlots) -> None:
        self.requests = requests
        self.slots = slots

    def __iter__(self) -> Iterator[BatchRequest]:
        for request in self.requests:
            yield replace(request, slot=self.slots.take(3 * len(request.pictures) * math.prod(request.canvas_hw)))


def _set_worker_up(parent: int, worker: int) -> None:
    """One thread a worker, and signals left to the parent, so that Ctrl-C brings no traces of workers and a batch
    system's SIGTERM to every process lets the parent finish its step and save. ``parent``: its process id; to ask here
    would be too late, the parent may have been killed since."""
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    sys.excepthook = _say_unless_parent_has_gone
    signal.set_wakeup_fd(-1)  # the parent's, which a fork shares
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS, where SIGTERM just ends the worker
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_told, args=(parent,), daemon=True).start()


def _say_unless_parent_has_gone(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A thread of multiprocessing's that hands tensors over complains when it was just doing so."""
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)


def _end_when_told(parent: int) -> None:
    """Obeys SIGTERM from the parent, which is how torch and multiprocessing stop a worker, and from nobody else. Ends
    the worker too when the parent has gone."""
    while os.getppid() == parent:
        told = signal.sigtimedwait({signal.SIGTERM}, ORPHAN_LOOK_S)
        if told is not None and told.si_pid == parent:
            break
    os._exit(0)


def _unchanged(batch: Any) -> Any:
    return batch


def _close_if_alive(loader: weakref.ref[InfiniteDataLoader]) -> None:
    alive = loader()
    if alive is not None:
        alive.close()


class InfiniteDataLoader(DataLoader):
    """Batches from workers that stay alive.

    Training: iteration never ends; epoch follows epoch, each in a new order, and the workers prefetch across the
    boundary. Validation: iteration ends after this rank's batches, and can be repeated. ``len`` is this rank's batches
    an epoch, which in training is the same number on every rank.
    """

    def __init__(
        self,
        dataset: LoadImagesAndLabels,
        requests: EndlessRequests | ShardedBatches,
        *,
        workers: int = 0,
        pin_memory: bool = False,
        weighted: bool = False,
        make_batch: Callable[[BatchRequest], Any] | None = None,
        renderer: Callable[[Any], Batch] | None = None,
        after_batch: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            dataset: renders the samples.
            requests: an `EndlessRequests` makes this a training loader, a `ShardedBatches` one for validation.
            workers: processes; 0 renders in this one.
            pin_memory: batches in page-locked memory: the slots' own, a copy where there is none.
            weighted: draw images by class weights; see `set_class_weights`.
            make_batch: run by the workers, picklable; None: `RenderedBatches`.
            renderer: makes a `Batch` on the device of what ``make_batch`` returns; None: that is one, on the host.
            after_batch: called when a batch has come from a worker; what it raises ends the iteration and the workers.
        """
        self.renderer = renderer
        self._after_batch = after_batch
        self._requests = requests
        self._is_training = isinstance(requests, EndlessRequests)
        self._weighted = weighted
        self._class_weights: np.ndarray | None = None
        self._index = dataset.index
        slots = workers * PREFETCHED_BATCHES + HELD_BATCHES
        page_lock = PageLock() if pin_memory and torch.cuda.is_available() else None
        draws = workers > 0 and make_batch is None
        self._slots = open_slots(slots, 3 * requests.most_pixels, page_lock) if draws else None
        super().__init__(
            _Requests(make_batch or RenderedBatches(dataset, self._slots)),
            batch_size=None,
            sampler=requests if self._slots is None else _SlottedRequests(requests, self._slots),
            num_workers=workers,
            collate_fn=_unchanged,
            pin_memory=pin_memory,
            worker_init_fn=partial(_set_worker_up, os.getpid()),
            persistent_workers=workers > 0,
            prefetch_factor=PREFETCHED_BATCHES if workers > 0 else None,
            generator=torch.Generator(),  # for the workers' seeds, which nothing uses: the global one is left alone
        )
        # Before multiprocessing stops what is left, and unlike atexit also in a process that it started itself.
        Finalize(None, _close_if_alive, args=(weakref.ref(self),), exitpriority=100)
        if weighted:
            self.set_class_weights(inverse_frequency_weights(self._index.classes, len(self._index.names)))

    def close(self) -> None:
        """Ends the workers. Another ``iter()`` would start new ones."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()
            if self._slots is not None:
                self._slots.take_back()

    def __len__(self) -> int:
        return self._requests.sampler.num_batches if self._is_training else len(self._requests)

    def __iter__(self) -> Iterator[Batch]:
        if not (self._is_training and self._weighted):
            yield from self._checked()
            return
        # The next epoch's draw waits for its weights, so each epoch is an iteration of its own: nothing is prefetched
        # across the boundary, and the draw happens when its first batch is asked for.
        epoch, batch = self._requests.start
        self._requests.one_epoch = True
        while True:
            self._requests.start = (epoch, batch)
            yield from self._checked()
            epoch, batch = epoch + 1, 0

    def _checked(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            if isinstance(batch, _Failure):
                self.close()
                raise UserError(batch.message)
            if self._after_batch is not None:
                try:
                    self._after_batch()
                except UserError:
                    self.close()
                    raise
            yield batch

    def start_at(self, epoch: int, batch: int = 0) -> None:
        """Where the next ``iter()`` in training begins (resume); batch len(loader) is the next epoch's first."""
        if not 0 <= batch <= len(self):
            raise ValueError(f"batch {batch} of {len(self)}")
        self._requests.start = (epoch + batch // len(self), batch % len(self))

    @property
    def index(self) -> Any:
        """The `DatasetIndex` behind the batches."""
        return self._index

    def render(self, epoch: int, batch: int) -> Batch:
        """This rank's share of batch ``batch``, rendered here and now, on the host; where the iteration stands is not
        touched."""
        if self._is_training:
            request = next(self._requests.sampler.requests(epoch, batch))
        else:
            request = self._requests[batch]
        rendered = self.dataset[request]
        if isinstance(rendered, _Failure):
            raise UserError(rendered.message)
        return (
            rendered if self.renderer is None else self.renderer(rendered).to(torch.device("cpu"), non_blocking=False)
        )

    def global_pictures(self, batch: int) -> int:
        """Pictures in training batch ``batch`` of an epoch, over all ranks."""
        return self._requests.sampler.global_pictures(batch)

    @property
    def class_weights(self) -> np.ndarray | None:
        """Float64 (C,), or None when images are not drawn by weight. To be saved with a position inside an epoch."""
        return self._class_weights

    def set_class_weights(self, weights: np.ndarray) -> None:
        """Class weights (C,), not negative, for epochs that begin after this call; the same on every rank.

        Until then they are inverse to the classes' frequencies. See `data.sampler.image_weights`.
        """
        if not self._weighted:
            raise ValueError("this loader does not draw images by weight")
        index = self._index
        self._class_weights = np.asarray(weights, np.float64)
        self._requests.sampler.order.weights = image_weights(
            self._class_weights, index.offsets, index.classes, ~index.crowd
        )
