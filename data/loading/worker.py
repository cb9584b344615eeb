"""What runs in a loader's worker process: requests to batches, collate, and the process's own settings."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from data.augment.plan import SamplePlan
from data.dataset import LoadImagesAndLabels
from data.render.device import PlannedBatch, RenderGroup
from data.render.table import CachedPixels, PackedPixels, PyramidLayout, build_table
from data.sampler import BatchRequest, Cell
from data.shared_memory import BatchSlots, SentBatch, new_pixels
from utils.errors import UserError
from utils.machine.limits import explanation
from utils.structures import Batch, Sample, bucketed


def collate(samples: Sequence[Sample], cells: Sequence[Cell], pixels: Tensor) -> Batch:
    """A batch of samples, each in its cell of a picture. Several samples in a picture carry the first one's identity.

    Images are stored (B, H, W, 3) and seen as (B, 3, H, W): the channels_last layout, without a copy.

    Args:
        samples, cells: the samples and their cells, pictures in order.
        pixels: uint8 (B, H, W, 3); samples that were rendered into it are not copied.
    """
    for sample, out in zip(samples, cell_views(pixels.numpy(), cells)):
        if not np.may_share_memory(sample.image, out):
            out[:] = sample.image
    targets = _targets(samples, cells)
    counts = np.bincount(targets[:, 0].astype(np.int64), minlength=len(pixels)).tolist()
    firsts = [sample for sample, cell in zip(samples, cells) if cell.row == cell.column == 0]
    return Batch(
        images=pixels.permute(0, 3, 1, 2),
        targets=torch.from_numpy(targets),
        max_targets=bucketed(max(counts, default=0)),
        indices=torch.tensor([s.index for s in firsts], dtype=torch.int64),
        original_hw=torch.tensor([s.original_hw for s in firsts], dtype=torch.int32).reshape(-1, 2),
        letterbox=torch.tensor([(*s.gain_xy, *s.pad_xy) for s in firsts], dtype=torch.float64).reshape(-1, 4),
        paths=tuple(s.path for s in firsts),
        counts=tuple(counts),
    )


def cell_views(pixels: np.ndarray, cells: Sequence[Cell]) -> list[np.ndarray]:
    """The part (h, w, 3) of ``pixels`` (B, H, W, 3) that belongs to each cell."""
    views = []
    for cell in cells:
        height, width = pixels.shape[1] // cell.grid[0], pixels.shape[2] // cell.grid[1]
        top, left = cell.row * height, cell.column * width
        views.append(pixels[cell.picture, top : top + height, left : left + width])
    return views


def _targets(samples: Sequence[Sample], cells: Sequence[Cell]) -> np.ndarray:
    """float32 (M, 6) as `Batch.targets`, from labels normalised to the cells."""
    if not samples:
        return np.zeros((0, 6), np.float32)
    labels = np.concatenate([sample.labels for sample in samples])
    frames = [(cell.picture, *cell.grid[::-1], cell.column / cell.grid[1], cell.row / cell.grid[0]) for cell in cells]
    frame = np.repeat(np.array(frames, np.float32), [len(sample.labels) for sample in samples], 0)
    targets = np.concatenate([frame[:, :1], labels], 1)
    targets[:, 2:] /= np.tile(frame[:, 1:3], 2)
    targets[:, 2:4] += frame[:, 3:]
    return targets


PARENT_CHECK_S = 0.5  # until it notices, an orphan holds sockets by which other ranks would see that its parent died


@dataclass(frozen=True, slots=True)
class Failure:
    """A UserError on its way from a worker. Torch would wrap its message in a traceback."""

    message: str


class RequestDataset:
    """What torch takes for the data set: a request is an index. User errors, and what the machine refuses a worker,
    come back as `Failure`."""

    def __init__(self, make_batch: Callable[[BatchRequest], Any], slots: BatchSlots | None = None) -> None:
        """``slots``: those that requests name; ``make_batch`` renders into them."""
        self.make_batch = make_batch
        self.slots = slots

    def __getitem__(self, request: BatchRequest) -> Any:
        try:
            batch = self.make_batch(request)
            return batch if get_worker_info() is None else SentBatch(batch, self.slots, request.slot)
        except UserError as error:
            return Failure(str(error))
        except Exception as error:
            line = explanation(error)
            if line is None:
                raise
            return Failure(line)


class RenderedBatches:
    """A request to a batch that is rendered on the host."""

    def __init__(self, dataset: LoadImagesAndLabels, slots: BatchSlots | None = None) -> None:
        """``slots``: those that requests name."""
        self.dataset = dataset
        self.slots = slots

    def __call__(self, request: BatchRequest) -> Batch:
        if self.slots is None or request.slot is None:
            pixels = new_pixels(request.pictures, request.canvas_hw)
        else:
            pixels = torch.from_numpy(self.slots.pixels(request.slot, (request.pictures, *request.canvas_hw, 3)))
        cells = request.cells()
        # OpenCV may round the ends of rows differently where the rows of a picture do not follow one another.
        outs = [view if view.flags.c_contiguous else None for view in cell_views(pixels.numpy(), cells)]
        return collate(self.dataset.samples(request.keys, outs), cells, pixels)


class PlannedBatches:
    """A request to a batch that `DeviceRenderer` renders."""

    def __init__(self, dataset: LoadImagesAndLabels, layout: PyramidLayout | None) -> None:
        """
        Args:
            dataset: of training samples.
            layout: of the device cache that holds its images; None: visible pixels are sent with the batch.
        """
        self.dataset = dataset
        self.layout = layout

    def __call__(self, request: BatchRequest) -> PlannedBatch:
        plans, cells = self.dataset.plans(request.keys), request.cells()
        pixels = new_pixels(request.pictures, (0, 0))
        rest = collate(self.dataset.planned(request.keys, plans), cells, pixels)
        sizes = dict.fromkeys(plan.canvas_hw for plan in plans)
        members = ([(plan, cell) for plan, cell in zip(plans, cells) if plan.canvas_hw == size] for size in sizes)
        return PlannedBatch(request.canvas_hw, tuple(self._group(*zip(*pairs)) for pairs in members), rest)

    def _group(self, plans: Sequence[SamplePlan], cells: Sequence[Cell]) -> RenderGroup:
        sources = PackedPixels(self.dataset.source_image) if self.layout is None else CachedPixels(self.layout)
        table = build_table(plans, plans[0].canvas_hw, self.dataset.source_hw, sources)
        pixels = sources.pixels if isinstance(sources, PackedPixels) else None
        return RenderGroup(table, pixels, torch.tensor([cell[:3] for cell in cells], dtype=torch.int64))


def init_worker(parent: int, worker: int) -> None:
    """One thread a worker, and signals left to the parent, so that Ctrl-C prints no tracebacks of workers, and a batch
    system's SIGTERM to every process lets the parent finish its step and save.

    Args:
        parent: its process id. Asking for it here would be too late: the parent may have been killed already.
        worker: number of the worker.
    """
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    sys.excepthook = _print_unless_parent_is_gone
    signal.set_wakeup_fd(-1)  # the parent's, which a fork shares
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS, where SIGTERM just ends the worker
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()


def _print_unless_parent_is_gone(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A thread of multiprocessing that hands over tensors raises when the parent dies meanwhile."""
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)


def _exit_with_parent(parent: int) -> None:
    """Obeys SIGTERM from the parent only, which is how torch and multiprocessing stop a worker. Ends the worker too
    when the parent is gone."""
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, PARENT_CHECK_S)
        if received is not None and received.si_pid == parent:
            break
    os._exit(0)
