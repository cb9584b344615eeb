"""``--batch-size -1``: doubles the batch while steps like those of the run, with the largest canvas and many boxes, fit
into the memory of the GPUs. Each process searches on its own device; the smallest result counts."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from data.loading.build import count_train_batches
from data.samples.dataset import AugmentedImages
from engine.optim.build import resolve_optimizer
from engine.optim.schedule import step_plan
from engine.parallel.virtual_ranks import resolve_virtual_ranks
from engine.train.compile import plan_compilation
from engine.train.step import build_step
from models.detector import Detector
from models.losses.base import Criterion
from utils.batches import Batch, Targets
from utils.config.settings import RunSettings
from utils.distributed.context import DistributedContext, max_over_ranks
from utils.errors import UserError
from utils.labels import ignored_class

MAX_SHARD_IMAGES = 512  # images per shard; larger batches are no faster, and the host keeps 36 batches with 16 workers
BOXES = 128  # boxes per image, as in mosaics of COCO; targets are padded to the image with the most boxes
MIN_EPOCH_BATCHES = 10  # a batch holds at most a tenth of an epoch's samples,
ALWAYS_ALLOWED = 16  # or the default batch size, if that is larger
MEMORY_SHARE = 0.9  # of the free memory; the rest is for fragmentation, communication, and images with more boxes
# Errors besides torch.OutOfMemoryError that mean that memory ran out: cuDNN tries kernels until one has enough.
_EXHAUSTED = ("unable to find an engine", "CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED", "out of memory")


def find_batch_size(
    ctx: DistributedContext, settings: RunSettings, model: Detector, criterion: Criterion, samples: AugmentedImages
) -> int:
    """Returns the largest batch size that fits on the GPUs and leaves enough steps to an epoch. All processes must call
    this.

    The images of a shard are a power of two. Neither the model nor its gradients change. Raises UserError on a CPU, and
    if not even one image per shard fits.
    """
    config = settings.config
    shards = resolve_virtual_ranks(ctx, config) or ctx.world_size
    samples_per_image = 4 if config.quad else 1
    allowed_for_data = max(samples.per_epoch // MIN_EPOCH_BATCHES, ALWAYS_ALLOWED) // (shards * samples_per_image)
    max_images = min(MAX_SHARD_IMAGES, max(allowed_for_data, 1))

    def fits(images: int) -> bool:
        has_fit = _has_memory(lambda: prepare_step(ctx, settings, model, criterion, samples, images=images))
        gc.collect()
        torch.cuda.empty_cache()
        return has_fit

    fits(1)  # loads the kernels, which need memory themselves
    # CUDA graphs keep their memory, and an epoch's last, smaller batch, which runs without them, needs more.
    has_graphs = config.compile and plan_compilation(config, ctx, images=shards, shards=shards).cuda_graphs
    free, total = torch.cuda.mem_get_info(ctx.device)
    limit = torch.cuda.memory_reserved(ctx.device) + free * (MEMORY_SHARE / 2 if has_graphs else MEMORY_SHARE)
    torch.cuda.set_per_process_memory_fraction(limit / total, ctx.device)
    images = 0
    while (doubled := max(2 * images, 1)) <= max_images and fits(doubled):
        images = doubled
    torch.cuda.set_per_process_memory_fraction(1.0, ctx.device)
    images = -max_over_ranks(ctx, -images)  # the smallest
    if images == 0:
        raise UserError(
            f"--batch-size -1: not even one image of {_largest_side(settings, model)} px fits in the memory that "
            f"{ctx.device} has left; use a smaller --imgsz or model"
        )
    return images * shards * samples_per_image


def _has_memory(prepare: Callable[[], Callable[[], None]]) -> bool:
    """Returns whether two steps have enough memory. In the first one cuDNN may search for kernels; the second one has
    the optimizer's state."""
    try:
        take_step = prepare()
        take_step()
        take_step()
        torch.cuda.synchronize()
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or any(mark in str(error) for mark in _EXHAUSTED):
            return False
        raise
    return True


def _largest_side(settings: RunSettings, model: Detector) -> int:
    """Returns the largest side of the run's canvases, pixels."""
    config = settings.config
    side = config.imgsz
    if config.multi_scale:
        side = round(side * (1 + config.multi_scale) / model.stride) * model.stride
    return 2 * side if config.quad else side


def prepare_step(
    ctx: DistributedContext,
    settings: RunSettings,
    model: Detector,
    criterion: Criterion,
    samples: AugmentedImages,
    *,
    images: int,
) -> Callable[[], None]:
    """Returns a step like the run's, on copies of its objects, which does not wait for other processes. Under DDP the
    run keeps all gradients allocated; here the second copy of the model takes their place.

    For example, with two processes, ``--virtual-ranks 8`` and 16 ``images`` per shard of the batch, the batch has 8
    shards, of which 4 are computed here: the batch size is 8 x 16 = 128 images, and a micro-batch here has 4 x 16 = 64.
    """
    config = settings.config
    virtual_ranks = resolve_virtual_ranks(ctx, config)
    shards_here = max(virtual_ranks // ctx.world_size, 1)
    images_here = images * shards_here
    samples_per_image = 4 if config.quad else 1
    config = replace(config, batch_size=images * (virtual_ranks or ctx.world_size) * samples_per_image)
    steps = step_plan(config, count_train_batches(config, samples))  # decide on the optimizer and cuDNN's kernel search
    config_here = replace(
        config,
        optimizer=resolve_optimizer(config.optimizer, steps.planned_steps),
        virtual_ranks=shards_here if virtual_ranks else 0,
        compile=False,
    )
    settings_here = RunSettings(config_here, settings.hyp)
    ctx_here = DistributedContext.single(ctx.device)
    copied = copy.deepcopy(model)
    step = build_step(ctx_here, settings_here, copied, criterion, steps, full_batch=images_here)
    # The prefetcher keeps this step's batches and the next one's, and so does `take_step`.
    batches = [_fake_batch(ctx, settings, model, samples, images=images_here) for _ in range(2 * steps.accumulate)]

    def take_step() -> None:
        used = batches[: min(steps.accumulate, 2)]  # gradients are accumulated from the second one on
        step(used, [images_here] * len(used), updates=1)
        step.reader.pop(leave=0)

    return take_step


def _fake_batch(
    ctx: DistributedContext, settings: RunSettings, model: Detector, samples: AugmentedImages, *, images: int
) -> Batch:
    """Makes black images on the largest canvas, with `BOXES` boxes for each sample."""
    config = settings.config
    number = np.arange(BOXES * (4 if config.quad else 1))
    sizes = np.full(len(number), 0.05)
    centers = [(number % 16 + 0.5) / 16, (number // 16 % 16 + 0.5) / 16]
    labels = np.stack([number % model.num_classes, *centers, sizes, sizes], 1)
    if config.keep_old:  # which has ignore regions
        (region_class,) = ignored_class(np.array([0]))
        labels = np.append(labels, [[region_class, 0.5, 0.5, 1, 1]], axis=0)
    side = _largest_side(settings, model)
    pixels = samples.sample_index.pixels
    shape = (images, side, side, pixels.channels)
    return Batch(
        images=torch.zeros(shape, dtype=pixels.torch_dtype, device=ctx.device).permute(0, 3, 1, 2),
        targets=Targets.from_labels([labels.astype(np.float32)] * images).to(ctx.device, non_blocking=False),
        indices=torch.arange(images),
        original_hw=torch.full((images, 2), side, dtype=torch.int32),
        letterbox=torch.zeros((images, 4), dtype=torch.float64),
    )
