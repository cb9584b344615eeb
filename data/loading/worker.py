"""The worker processes of a loader: their settings, batches for requests, and collating."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from data.loading.shared_memory import BatchSlots, SentBatch, new_pixels
from data.samples.batch_request import BatchRequest
from data.samples.dataset import LoadImagesAndLabels
from utils.errors import UserError
from utils.machine.limits import explanation
from utils.structures import Batch, Sample, Targets


def collate(samples: Sequence[Sample], pixels: Tensor) -> Batch:
    """A batch of samples, whose images are stored in ``pixels`` (B, H, W, C), unless they were rendered there, and seen
    as (B, C, H, W): the channels_last layout."""
    for sample, out in zip(samples, pixels.numpy()):
        if not np.may_share_memory(sample.image, out):  # it was not rendered in place
            out[:] = sample.image
    return Batch(
        images=pixels.permute(0, 3, 1, 2),
        targets=Targets.from_labels([sample.labels for sample in samples]),
        indices=torch.tensor([s.index for s in samples], dtype=torch.int64),
        original_hw=torch.tensor([s.original_hw for s in samples], dtype=torch.int32).reshape(-1, 2),
        letterbox=torch.tensor([(*s.gain_xy, *s.pad_xy) for s in samples], dtype=torch.float64).reshape(-1, 4),
        paths=tuple(s.path for s in samples),
    )


def collate_quad(samples: Sequence[Sample], request: BatchRequest, pixels: Tensor) -> Batch:
    """`collate` for requests with ``--quad``: four samples of half the batch's size become one image."""
    groups = [[samples[i] for i in members] for members in request.images]
    return collate([group[0] if len(group) == 1 else _side_by_side(group) for group in groups], pixels)


def _side_by_side(samples: Sequence[Sample]) -> Sample:
    """Four samples in two rows, with the index and the path of the first."""
    first, second, third, fourth = (sample.image for sample in samples)
    shift = np.repeat(np.float32([[0, 0], [0.5, 0], [0, 0.5], [0.5, 0.5]]), [len(s.labels) for s in samples], 0)
    labels = np.concatenate([sample.labels for sample in samples])
    labels[:, 1:] /= 2
    labels[:, 1:3] += shift
    image = np.vstack([np.hstack([first, second]), np.hstack([third, fourth])])
    return replace(samples[0], image=image, labels=labels)


PARENT_CHECK_S = 0.5  # an orphan keeps sockets open, by which other ranks would notice that its parent died


@dataclass(eq=False)
class RequestDataset:
    """The data set as torch's DataLoader sees it, indexed by requests. A UserError, also for a failure of the machine,
    is returned: torch would wrap one that is raised in a traceback."""

    make_batch: Callable[[BatchRequest], Any]
    slots: BatchSlots | None = None  # `make_batch` renders into the one that a request names

    def __getitem__(self, request: BatchRequest) -> Any:
        try:
            batch = self.make_batch(request)
            return batch if get_worker_info() is None else SentBatch(batch, self.slots, request.slot)
        except Exception as error:
            line = str(error) if isinstance(error, UserError) else explanation(error)
            if line is None:
                raise
            return UserError(line)


def render_batch(dataset: LoadImagesAndLabels, slots: BatchSlots | None, request: BatchRequest) -> Batch:
    """A batch whose images are rendered on the host, in a slot if the request names one."""
    count, kind = len(request.images), dataset.index.pixels
    if slots is None or request.slot is None:
        pixels = new_pixels(count, request.canvas_hw, kind)
    else:
        pixels = torch.from_numpy(slots.pixels(request.slot, (count, *request.canvas_hw, kind.channels), kind.dtype))
    if count < len(request.keys):
        return collate_quad(dataset.samples(request.keys, epochs=request.epochs), request, pixels)
    return collate(dataset.samples(request.keys, list(pixels.numpy()), epochs=request.epochs), pixels)


def init_worker(parent: int, worker: int) -> None:
    """Limits a worker to one thread and leaves signals to the parent: Ctrl-C prints no tracebacks of workers, and when
    a batch system sends SIGTERM to every process, the parent can still finish its step and save. ``parent``: its
    process id, which cannot be queried here, because the parent may already have been killed."""
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    signal.set_wakeup_fd(-1)  # the parent's, which a fork shares
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS, where SIGTERM just ends the worker
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()


def _exit_with_parent(parent: int) -> None:
    """Ends the worker on SIGTERM from the parent, by which torch and multiprocessing stop workers, or when the parent
    is gone. Ignores SIGTERM from other processes."""
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, PARENT_CHECK_S)
        if received is not None and received.si_pid == parent:
            break
    os._exit(0)
