"""``--batch-size -1``: finds the largest batch that fits on the GPUs by taking steps like those of the run, with the
largest canvas and many boxes. Each process searches on its own device; the smallest result counts.

A small data set also limits the batch: if one batch held all images, an epoch would be a single step.
"""

from __future__ import annotations

import copy
import gc
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from engine.assembly.build_step import StepBatches, build_step
from engine.optim.build import resolve_optimizer
from engine.optim.schedule import StepPlan
from engine.parallel.virtual_ranks import resolve_virtual_ranks
from engine.run.run import RunSettings
from engine.train.compile import plan_compilation
from models.detector import Detector
from models.losses.base import Criterion
from utils.batches import Batch, Targets
from utils.config.settings import Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext, min_over_ranks
from utils.errors import UserError
from utils.labels import ignored_class
from utils.logger import get_logger
from utils.pixels import RGB8, PixelFormat
from utils.strings import counted

MAX_SHARD_IMAGES = 512  # images per shard; larger batches are no faster, and the host keeps 36 batches with 16 workers
BOXES = 128  # boxes per image, as in mosaics of COCO; targets are padded to the image with the most boxes
MIN_EPOCH_BATCHES = 10  # a batch holds at most a tenth of an epoch's samples,
ALWAYS_ALLOWED = 16  # or the default batch size, if that is larger
HEADROOM = 0.1  # fraction of the free memory for fragmentation, communication, and images with more boxes
# Errors besides torch.OutOfMemoryError that mean that memory ran out: cuDNN tries kernels until one has enough.
_EXHAUSTED = ("unable to find an engine", "CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED", "out of memory")

TakeStep = Callable[[], None]
PlanSteps = Callable[[TrainConfig], StepPlan]  # plans the steps of a run with the batch size of a config


@dataclass(frozen=True, kw_only=True)
class BatchSearch:
    """The run whose batch size is searched for."""

    ctx: DistributedContext
    settings: RunSettings
    model: Detector  # in training mode
    criterion: Criterion
    plan_steps: PlanSteps
    pixels: PixelFormat = RGB8


class CudaMemory:
    """Measures memory as torch's allocator reserves it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def limit(self) -> int:
        """Returns the number of bytes that this process may use in total."""
        self._release()
        free, _ = torch.cuda.mem_get_info(self._device)
        return torch.cuda.memory_reserved(self._device) + int((1 - HEADROOM) * free)

    def peak_of(self, prepare: Callable[[], TakeStep]) -> int | None:
        """Returns the peak number of bytes in the second call of the step that ``prepare`` returns; None if memory runs
        out. Releases all memory of the step."""
        peak = self._measure(prepare)
        self._release()
        return peak

    def _measure(self, prepare: Callable[[], TakeStep]) -> int | None:
        try:
            take_step = prepare()
            take_step()  # if cuDNN searches for kernels, it does so here, and needs memory for that only once
            self._release()
            take_step()
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or any(mark in str(error) for mark in _EXHAUSTED):
                return None
            raise
        return torch.cuda.max_memory_reserved(self._device)

    def _release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)


def check_batch_search(ctx: DistributedContext) -> None:
    """Raises UserError if ``--batch-size -1`` is not supported for this run."""
    if ctx.device.type != "cuda":
        raise UserError(f"--batch-size -1: searches on a GPU only, and this run is on {ctx.device}; use a number")


def batch_that_fits(search: BatchSearch, *, epoch_samples: int) -> int:
    """Returns the largest global batch that fits and that `largest_for_data` allows, and logs it. All processes must
    call this.

    Neither the model nor its gradients change. ``epoch_samples``: samples of an epoch over all processes. Raises
    UserError if not even one image per shard fits.
    """
    ctx = search.ctx
    memory = CudaMemory(ctx.device)
    config = search.settings.config
    shards = resolve_virtual_ranks(ctx, config) or ctx.world_size
    side = largest_side(config, search.model)
    peak_bytes_of = _step_meter(search, memory, shards=shards)
    peak_bytes_of(1)  # loads the kernels, which need memory themselves
    limit = memory.limit()
    max_for_data = max(largest_for_data(epoch_samples) // (shards * samples_per_image(config)), 1)
    max_images = min(MAX_SHARD_IMAGES, max_for_data)
    images = min_over_ranks(ctx, largest_that_fits(peak_bytes_of, limit, max_images=max_images))
    if images == 0:
        raise UserError(
            f"--batch-size -1: not even one image of {side} px fits in the {limit / 2**30:.1f} GiB of memory "
            f"that {ctx.device} has left; use a smaller --imgsz or model"
        )
    batch_size = images * shards * samples_per_image(config)
    get_logger().info(
        "--batch-size -1: %d (%s of %s of %d px, up to %d boxes each, in %.1f GiB)",
        batch_size,
        counted(shards, "shard"),
        counted(images, "image"),
        side,
        BOXES * samples_per_image(config),
        limit / 2**30,
    )
    if max_images < MAX_SHARD_IMAGES and images == sizes_up_to(max_images)[-1]:
        samples = counted(epoch_samples, "sample")
        get_logger().info("--batch-size -1: more may fit, but an epoch has only %s", samples)
    return batch_size


def _step_meter(search: BatchSearch, memory: CudaMemory, *, shards: int) -> Callable[[int], int | None]:
    """Returns a function that maps a number of images per shard to the peak memory of a step in bytes, or to None if
    memory runs out."""
    config = search.settings.config
    has_graphs = config.compile and plan_compilation(config, search.ctx, images=shards, shards=shards).cuda_graphs

    def peak_bytes_of(images: int) -> int | None:
        peak = memory.peak_of(partial(prepare_step, search, images=images))
        if peak is not None and has_graphs:
            # CUDA graphs keep their memory, and an epoch's last, smaller batch, which runs without them, needs more.
            return 2 * peak
        return peak

    return peak_bytes_of


def largest_for_data(epoch_samples: int) -> int:
    """Returns the number of samples in the largest global batch that leaves enough steps to an epoch."""
    return max(epoch_samples // MIN_EPOCH_BATCHES, ALWAYS_ALLOWED)


def sizes_up_to(max_images: int) -> list[int]:
    """Returns the numbers of images that may be tried, ascending from 0: multiples of 8 from 16 on."""
    return [*range(min(max_images + 1, 16)), *range(16, max_images + 1, 8)]


def largest_that_fits(
    peak_bytes_of: Callable[[int], int | None], limit_bytes: int, *, max_images: int = MAX_SHARD_IMAGES
) -> int:
    """Returns the largest number of images up to ``max_images`` that fits, a multiple of 8 from 16 on; 0 if none fits.
    This number was measured to fit. The next larger one was measured not to fit, or exceeds ``max_images``.

    ``peak_bytes_of`` measures the memory that a number of images takes; None if it ran out.
    """

    def is_too_much(number: int) -> bool:
        peak = peak_bytes_of(number)
        return peak is None or peak > limit_bytes

    sizes = sizes_up_to(max_images)
    end = 1
    while end < len(sizes) and not is_too_much(sizes[end]):
        end *= 2
    # ``sizes[end // 2]`` fits, ``sizes[end]`` does not.
    first_too_much = bisect_left(sizes, True, lo=end // 2 + 1, hi=min(end, len(sizes)), key=is_too_much)
    return sizes[first_too_much - 1]


def samples_per_image(config: TrainConfig) -> int:
    """Returns the number of samples that make up one image of a batch."""
    return 4 if config.quad else 1


def largest_side(config: TrainConfig, model: Detector) -> int:
    """Returns the largest side of the run's canvases, pixels."""
    side = config.imgsz
    if config.multi_scale:
        side = round(side * (1 + config.multi_scale) / model.stride) * model.stride
    return 2 * side if config.quad else side


def prepare_step(search: BatchSearch, *, images: int) -> TakeStep:
    """Returns a step like the run's, on copies of its objects, which does not wait for other processes.

    Under DDP the run keeps all gradients allocated; here the second copy of the model takes their place.

    For example, with two processes, ``--virtual-ranks 8`` and 16 ``images``, the batch has 8 shards, of which 4 are
    computed here: the batch size is 8 x 16 = 128 images, and a micro-batch here has 4 x 16 = 64. Without virtual ranks
    each process has one shard: the batch size is 2 x 16 = 32, and a micro-batch here has 16.

    Args:
        images: number per shard of the batch; the step takes this process's shards.
    """
    ctx = search.ctx
    settings = search.settings
    virtual_ranks = resolve_virtual_ranks(ctx, settings.config)
    shards = virtual_ranks or ctx.world_size
    shards_here = max(virtual_ranks // ctx.world_size, 1)
    images_here = images * shards_here
    samples = samples_per_image(settings.config)
    config = replace(settings.config, batch_size=images * shards * samples)
    steps = search.plan_steps(config)  # their number decides on the optimizer (auto) and on cuDNN's kernel search
    step = build_step(
        DistributedContext.single(ctx.device),
        _settings_alone(config, settings.hyp, steps, virtual_ranks=shards_here if virtual_ranks else 0),
        copy.deepcopy(search.model),
        search.criterion,
        StepBatches(steps, images_here),
    )
    side = largest_side(config, search.model)
    labels = box_labels(BOXES * samples, search.model.num_classes, ignores=config.keep_old)
    # The prefetcher keeps this step's batches and the next one's, and so does `take_step`.
    batches = [blank_batch(images_here, side, labels, ctx.device, search.pixels) for _ in range(2 * steps.accumulate)]

    def take_step() -> None:
        used = batches[: min(steps.accumulate, 2)]  # gradients are accumulated from the second one on
        step(used, [images_here] * len(used), updates=1)
        step.reader.pop(leave=0)

    return take_step


def _settings_alone(config: TrainConfig, hyp: Hyperparameters, steps: StepPlan, *, virtual_ranks: int) -> RunSettings:
    """Returns the settings of a run for a step that one process takes without the others."""
    config = replace(
        config,
        optimizer=resolve_optimizer(config.optimizer, steps.planned_steps),
        virtual_ranks=virtual_ranks,
        compile=False,
        zero=False,
        sync_bn=0,
    )
    return RunSettings(config, replace(hyp, lr_mult=1.0))  # `lr_mult` is not chosen yet, and takes no memory


def box_labels(boxes: int, classes: int, *, ignores: bool) -> np.ndarray:
    """Returns labels of small boxes in rows: float32 (boxes, 5), as in `Sample`. ``ignores``: adds an ignore region of
    class 0 that covers the whole image."""
    number = np.arange(boxes)
    centers = [(number % 16 + 0.5) / 16, (number // 16 % 16 + 0.5) / 16]
    labels = np.stack([number % classes, *centers, np.full(boxes, 0.05), np.full(boxes, 0.05)], 1)
    if ignores:
        (region_class,) = ignored_class(np.array([0]))
        labels = np.append(labels, [[region_class, 0.5, 0.5, 1, 1]], axis=0)
    return labels.astype(np.float32)


def blank_batch(images: int, side: int, labels: np.ndarray, device: torch.device, pixels: PixelFormat) -> Batch:
    """Returns a batch of black images, each with ``labels``."""
    shape = (images, side, side, pixels.channels)
    return Batch(
        images=torch.zeros(shape, dtype=pixels.torch_dtype, device=device).permute(0, 3, 1, 2),
        targets=Targets.from_labels([labels] * images).to(device, non_blocking=False),
        indices=torch.arange(images),
        original_hw=torch.full((images, 2), side, dtype=torch.int32),
        letterbox=torch.zeros((images, 4), dtype=torch.float64),
    )
