"""``--batch-size -1``: finds the largest batch that fits on the GPUs by taking steps like those of the run, with the
largest canvas and many boxes. Each process searches on its own device; the smallest result counts.

A small data set also limits the batch: if one batch held all images, an epoch would be a single step.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.assembly.build_step import StepBatches, build_step
from engine.optim.build import resolve_optimizer
from engine.optim.schedule import StepPlan
from engine.parallel.virtual_ranks import resolve_virtual_ranks
from engine.train.compile import plan_compilation
from models.detector import Detector
from models.losses.base import Criterion
from utils.batches import Batch, Targets
from utils.config.settings import RunSettings, TrainConfig
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


@dataclass(frozen=True, kw_only=True)
class BatchSearch:
    """The run whose batch size is searched for."""

    ctx: DistributedContext
    settings: RunSettings
    model: Detector  # in training mode
    criterion: Criterion
    plan_steps: Callable[[TrainConfig], StepPlan]  # plans the steps of a run with the batch size of a config
    pixels: PixelFormat = RGB8


def check_batch_search(ctx: DistributedContext) -> None:
    """Raises UserError if ``--batch-size -1`` is not supported for this run."""
    if ctx.device.type != "cuda":
        raise UserError(f"--batch-size -1: searches on a GPU only, and this run is on {ctx.device}; use a number")


def batch_that_fits(search: BatchSearch, *, epoch_samples: int) -> int:
    """Returns the largest global batch that fits and leaves enough steps to an epoch, and logs it: per shard, any
    number of images up to 16, above that a multiple of 8. All processes must call this.

    Neither the model nor its gradients change. ``epoch_samples``: samples of an epoch over all processes. Raises
    UserError if not even one image per shard fits.
    """
    ctx = search.ctx
    config = search.settings.config
    shards = resolve_virtual_ranks(ctx, config) or ctx.world_size
    samples_per_image = 4 if config.quad else 1
    allowed_for_data = max(epoch_samples // MIN_EPOCH_BATCHES, ALWAYS_ALLOWED) // (shards * samples_per_image)
    max_images = min(MAX_SHARD_IMAGES, max(allowed_for_data, 1))
    if max_images > 16:
        max_images -= max_images % 8

    def fits(images: int) -> bool:
        has_fit = _has_memory_for_steps(search, images)
        gc.collect()
        if ctx.device.type == "cuda":
            torch.cuda.empty_cache()
        return has_fit

    # CUDA graphs keep their memory, and an epoch's last, smaller batch, which runs without them, needs more.
    has_graphs = config.compile and plan_compilation(config, ctx, images=shards, shards=shards).cuda_graphs
    fits(1)  # loads the kernels, which need memory themselves
    with _limited_memory(ctx.device, fraction=(1 - HEADROOM) / (2 if has_graphs else 1)):
        images = min_over_ranks(ctx, _largest_that_fits(fits, max_images))
    if images == 0:
        raise UserError(
            f"--batch-size -1: not even one image of {_largest_side(search)} px fits in the memory that {ctx.device} "
            "has left; use a smaller --imgsz or model"
        )
    batch_size = images * shards * samples_per_image
    per_shard = counted(images, "image")
    get_logger().info("--batch-size -1: %d (%s of %s)", batch_size, counted(shards, "shard"), per_shard)
    if images == max_images < MAX_SHARD_IMAGES:
        samples = counted(epoch_samples, "sample")
        get_logger().info("--batch-size -1: more may fit, but an epoch has only %s", samples)
    return batch_size


def _largest_that_fits(fits: Callable[[int], bool], max_images: int) -> int:
    """Returns the largest number of images that fits, up to ``max_images``: doubles until memory ends, then bisects."""
    fitting = 0
    failing = 1
    while failing <= max_images and fits(failing):
        fitting = failing
        failing *= 2
    failing = min(failing, max_images + 1)
    while failing - fitting > (grain := 8 if fitting >= 16 else 1):
        middle = fitting + -(-(failing - fitting) // (2 * grain)) * grain
        if fits(middle):
            fitting = middle
        else:
            failing = middle
    return fitting


@contextmanager
def _limited_memory(device: torch.device, *, fraction: float) -> Iterator[None]:
    """Lets torch's allocator use only ``fraction`` of the memory that is free now, besides what it has."""
    if device.type != "cuda":
        yield
        return
    free, total = torch.cuda.mem_get_info(device)
    limit = torch.cuda.memory_reserved(device) + fraction * free
    torch.cuda.set_per_process_memory_fraction(limit / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _has_memory_for_steps(search: BatchSearch, images: int) -> bool:
    """Returns whether two steps with ``images`` per shard have enough memory. In the first one cuDNN may search for
    kernels; the second one has the optimizer's state."""
    try:
        take_step = prepare_step(search, images=images)
        take_step()
        take_step()
        if search.ctx.device.type == "cuda":
            torch.cuda.synchronize(search.ctx.device)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or any(mark in str(error) for mark in _EXHAUSTED):
            return False
        raise
    return True


def _largest_side(search: BatchSearch) -> int:
    """Returns the largest side of the run's canvases, pixels."""
    config = search.settings.config
    side = config.imgsz
    if config.multi_scale:
        side = round(side * (1 + config.multi_scale) / search.model.stride) * search.model.stride
    return 2 * side if config.quad else side


def prepare_step(search: BatchSearch, *, images: int) -> Callable[[], None]:
    """Returns a step like the run's, on copies of its objects, which does not wait for other processes.

    Under DDP the run keeps all gradients allocated; here the second copy of the model takes their place.

    For example, with two processes, ``--virtual-ranks 8`` and 16 ``images``, the batch has 8 shards, of which 4 are
    computed here: the batch size is 8 x 16 = 128 images, and a micro-batch here has 4 x 16 = 64. Without virtual ranks
    each process has one shard: the batch size is 2 x 16 = 32, and a micro-batch here has 16.

    Args:
        images: number per shard of the batch; the step takes this process's shards.
    """
    ctx = search.ctx
    config = search.settings.config
    virtual_ranks = resolve_virtual_ranks(ctx, config)
    shards_here = max(virtual_ranks // ctx.world_size, 1)
    images_here = images * shards_here
    samples_per_image = 4 if config.quad else 1
    config = replace(config, batch_size=images * (virtual_ranks or ctx.world_size) * samples_per_image)
    steps = search.plan_steps(config)  # their number decides on the optimizer (auto) and on cuDNN's kernel search
    config_here = replace(
        config,
        optimizer=resolve_optimizer(config.optimizer, steps.planned_steps),
        virtual_ranks=shards_here if virtual_ranks else 0,
        compile=False,
        zero=False,
        sync_bn=0,
    )
    hyp = replace(search.settings.hyp, lr_mult=1.0)  # `lr_mult` is not chosen yet, and takes no memory
    step = build_step(
        DistributedContext.single(ctx.device),
        RunSettings(config_here, hyp),
        copy.deepcopy(search.model),
        search.criterion,
        StepBatches(steps, images_here),
    )
    number = np.arange(BOXES * samples_per_image)
    sizes = np.full(len(number), 0.05)
    centers = [(number % 16 + 0.5) / 16, (number // 16 % 16 + 0.5) / 16]
    labels = np.stack([number % search.model.num_classes, *centers, sizes, sizes], 1)
    if config.keep_old:  # which has ignore regions
        (region_class,) = ignored_class(np.array([0]))
        labels = np.append(labels, [[region_class, 0.5, 0.5, 1, 1]], axis=0)
    # The prefetcher keeps this step's batches and the next one's, and so does `take_step`.
    batches = [_blank_batch(search, images_here, labels.astype(np.float32)) for _ in range(2 * steps.accumulate)]

    def take_step() -> None:
        used = batches[: min(steps.accumulate, 2)]  # gradients are accumulated from the second one on
        step(used, [images_here] * len(used), updates=1)
        step.reader.pop(leave=0)

    return take_step


def _blank_batch(search: BatchSearch, images: int, labels: np.ndarray) -> Batch:
    """Returns a batch of black images, each with ``labels``: float32 (boxes, 5), as in `Sample`."""
    device = search.ctx.device
    side = _largest_side(search)
    shape = (images, side, side, search.pixels.channels)
    return Batch(
        images=torch.zeros(shape, dtype=search.pixels.torch_dtype, device=device).permute(0, 3, 1, 2),
        targets=Targets.from_labels([labels] * images).to(device, non_blocking=False),
        indices=torch.arange(images),
        original_hw=torch.full((images, 2), side, dtype=torch.int32),
        letterbox=torch.zeros((images, 4), dtype=torch.float64),
    )
