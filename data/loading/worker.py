"""Runs in a loader's worker processes: renders or plans the requested batches, and collates their samples."""

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
from torch.utils.data import Dataset, get_worker_info

from data.augment.plan import SamplePlan
from data.loading.shared_memory import BatchSlots, SentBatch, new_pixels
from data.render.device import PlannedBatch, RenderGroup
from data.render.pyramid import PackedPixels, PyramidLayout
from data.render.table import RenderTable, build_table
from data.samples.batch_request import BatchRequest
from data.samples.dataset import AugmentedImages, Samples
from utils.batches import Batch, Sample, Targets
from utils.errors import UserError
from utils.machine.limits import explain_limit

# An orphan must end soon: it keeps sockets open, and other ranks notice the death of its parent when these close.
PARENT_CHECK_S = 0.5


@dataclass(eq=False)
class RequestDataset(Dataset[Any]):
    """The data set as torch's DataLoader sees it: indexed by requests, each item a batch.

    Errors of the user or of the machine are returned as UserError, because torch would add a traceback to a raised one.
    """

    make_batch: Callable[[BatchRequest], Any]
    slots: BatchSlots | None = None  # slots in which `make_batch` renders

    def __getitem__(self, request: BatchRequest) -> Any:
        try:
            batch = self.make_batch(request)
            return batch if get_worker_info() is None else SentBatch(batch, self.slots, request.slot)
        except Exception as error:
            message = str(error) if isinstance(error, UserError) else explain_limit(error)
            if message is None:
                raise
            return UserError(message)


def render_batch(samples: Samples, slots: BatchSlots | None, request: BatchRequest) -> Batch:
    """Renders a batch on the host, in a slot if the request has one."""
    count = len(request.images)
    pixel_format = samples.sample_index.pixels
    if slots is None or request.slot is None:
        pixels = new_pixels(count, request.canvas_hw, pixel_format)
    else:
        shape = (count, *request.canvas_hw, pixel_format.channels)
        pixels = torch.from_numpy(slots.pixels(request.slot, shape, pixel_format.dtype))
    if count < len(request.keys):  # some images consist of four samples
        return collate_quad(samples.render(request), request, pixels)
    return collate(samples.render(request, list(pixels.numpy())), pixels)


def collate(samples: Sequence[Sample], pixels: Tensor) -> Batch:
    """Collates samples into a batch, with images of shape (B, C, H, W) in the channels_last layout.

    The images are copied to ``pixels`` (B, H, W, C), unless they were rendered there.
    """
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
    """Collates as `collate` does, but joins four samples of half the canvas size into one image (``--quad``)."""
    groups = [[samples[i] for i in members] for members in request.images]
    return collate([group[0] if len(group) == 1 else _side_by_side(group) for group in groups], pixels)


def _side_by_side(samples: Sequence[Sample]) -> Sample:
    """Joins four samples in two rows. The result has the index and the path of the first sample."""
    first, second, third, fourth = (sample.image for sample in samples)
    corners = np.array([[0, 0], [0.5, 0], [0, 0.5], [0.5, 0.5]], np.float32)
    labels = np.concatenate([sample.labels for sample in samples])
    labels[:, 1:] /= 2
    labels[:, 1:3] += np.repeat(corners, [len(sample.labels) for sample in samples], 0)
    image = np.vstack([np.hstack([first, second]), np.hstack([third, fourth])])
    return replace(samples[0], image=image, labels=labels)


def plan_batch(samples: AugmentedImages, layout: PyramidLayout | None, request: BatchRequest) -> PlannedBatch:
    """Plans a training batch for `DeviceRenderer`.

    ``layout``: layout of the device cache that has the images; None if the batch carries the visible pixels.
    """
    plans = samples.plans(request)
    members_of_images = request.images
    no_pixels = new_pixels(len(members_of_images), (0, 0), samples.sample_index.pixels)
    rest = collate_quad(samples.without_pixels(request, plans), request, no_pixels)
    groups = []
    for canvas_hw, images in _images_by_canvas(request).items():
        plans_of_group = [plans[i] for image in images for i in members_of_images[image]]
        table, pixels = _table_of(samples, layout, plans_of_group, canvas_hw=canvas_hw, epoch=request.epoch)
        groups.append(RenderGroup(table, pixels, torch.tensor(images, dtype=torch.int64)))
    return PlannedBatch(request.canvas_hw, tuple(groups), rest)


def _images_by_canvas(request: BatchRequest) -> dict[tuple[int, int], list[int]]:
    """Groups the images of a batch by the canvas size of their samples: the size of the batch or, for images that join
    four samples (``--quad``), half of it."""
    images_by_canvas: dict[tuple[int, int], list[int]] = {}
    for image, members in enumerate(request.images):
        canvas_hw = request.keys[members.start].canvas_hw
        images_by_canvas.setdefault(canvas_hw, []).append(image)
    return images_by_canvas


def _table_of(
    samples: AugmentedImages,
    layout: PyramidLayout | None,
    plans: Sequence[SamplePlan],
    *,
    canvas_hw: tuple[int, int],
    epoch: int,
) -> tuple[RenderTable, Tensor | None]:
    """Returns the table of plans with one canvas size, and the pixels (P, C) to which it refers, or None if they are in
    the device cache with ``layout``."""
    source_hw = samples.reader.source_hw
    if layout is not None:
        return build_table(plans, canvas_hw, source_hw, layout), None
    pixel_format = samples.sample_index.pixels

    def allocate(count: int) -> Tensor:
        return new_pixels(1, (count, 1), pixel_format).flatten(0, 2)

    packed = PackedPixels(samples.source_images(epoch), allocate)
    table = build_table(plans, canvas_hw, source_hw, packed)
    return table, packed.pixels


def init_worker(parent: int, worker: int) -> None:
    """Limits a worker to one thread and leaves signals to the parent.

    As a result, Ctrl-C prints no tracebacks of workers, and when a batch system sends SIGTERM to every process, the
    parent can still finish its step and save. ``parent``: process id of the parent, which the worker cannot query
    safely, because the parent may already have been killed.
    """
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    signal.set_wakeup_fd(-1)  # a fork inherits the descriptor of its parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # absent on macOS, where SIGTERM just ends the worker
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()


def _exit_with_parent(parent: int) -> None:
    """Ends the worker when the parent is gone, or sends the SIGTERM with which torch and multiprocessing stop workers.

    Ignores SIGTERM from other processes.
    """
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, PARENT_CHECK_S)
        if received is not None and received.si_pid == parent:
            break
    os._exit(0)
