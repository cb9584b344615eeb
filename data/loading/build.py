"""Builds the loaders of a run from its settings.

A loader starts workers that render samples, whole images or tiles, which a reader (open_reader.py) takes from a split.
Every process of a run must call these functions: the first one of each node scans and caches, and the others read the
results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from data.cache.open import open_device_images
from data.dataset.spec import DatasetSpec
from data.loading.loader import InfiniteDataLoader, ValidationLoader, WorkerSettings
from data.loading.open_reader import open_run_val_reader, open_train_reader
from data.loading.sampler import EpochOrder, KeyedDistributedSampler, TrainCanvases
from data.loading.worker import plan_batch
from data.loading.worker_count import loader_workers
from data.render.device import DeviceRenderer, PlannedBatch
from data.render.letterbox import CanvasRule
from data.samples.batch_request import BatchRequest
from data.samples.dataset import AugmentedImages, LoadImagesAndLabels
from data.samples.readers import SampleReader
from data.samples.sample_weights import sample_weights
from utils.config.checks import check_image_size
from utils.config.settings import Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError

# Largest validation batch, which one process evaluates. In float32 an image takes up to two sevenths of the memory that
# it takes in training in bfloat16 (yolov8n at 640 px), so one GPU may lack the memory for the global training batch of
# eight GPUs.
MAX_VALIDATION_BATCH = 32


def open_train_samples(
    ctx: DistributedContext, config: TrainConfig, hyp: Hyperparameters, spec: DatasetSpec, *, stride: int
) -> AugmentedImages:
    """Opens the augmented samples of the training split, whatever the batch size.

    Raises UserError for an unsuitable image size or a split without images, if processes have read different data, and
    if the scan or the cache fails.
    """
    check_image_size(config.imgsz, stride)
    reader = open_train_reader(ctx, config, hyp, spec)
    weights = sample_weights(reader, tile_backgrounds=hyp.tile_backgrounds, repeat_factor=config.repeat_factor)
    return AugmentedImages(reader, hyp=hyp, seed=config.seed, rect=config.rect, weights=weights)


def build_train_loader(
    ctx: DistributedContext, config: TrainConfig, hyp: Hyperparameters, samples: AugmentedImages, *, stride: int
) -> InfiniteDataLoader:
    """Builds the endless loader of this process's shards of the training batches, shuffled and augmented.

    With ``--render-on device`` the loader yields planned batches, and its ``renderer`` renders them. Raises UserError
    if there are too few images for ``--quad``, or if the device cache fails.
    """
    sampler = build_train_sampler(ctx, config, hyp, samples, stride=stride)
    workers = loader_workers(config.workers, ctx)
    make_batch = None
    renderer = None
    if config.render_on == "device":
        make_batch, renderer = _device_rendering(ctx, config, samples, workers)
    return InfiniteDataLoader(
        samples,
        sampler,
        WorkerSettings(workers, pin_memory=ctx.device.type == "cuda", make_batch=make_batch),
        weighted=config.image_weights,
        stops_after_epoch=config.time > 0,
        renderer=renderer,
    )


def build_train_sampler(
    ctx: DistributedContext, config: TrainConfig, hyp: Hyperparameters, samples: AugmentedImages, *, stride: int
) -> KeyedDistributedSampler:
    """Builds the sampler of this process's shards of the training batches; its `len` is the batches per epoch."""
    image_hw = samples.sample_index.image_hw if config.rect else None
    order = EpochOrder(
        samples.weights,
        seed=config.seed,
        batch_size=config.batch_size,
        canvases=TrainCanvases(config.imgsz, stride, image_hw),
        block=0 if config.rect else hyp.mosaic_block,
    )
    if config.quad and len(order) < 4:
        raise UserError(f"--quad: needs at least 4 training images, train has {len(order)}")
    return KeyedDistributedSampler(
        order,
        rank=ctx.rank // config.pipeline,
        world_size=ctx.world_size // config.pipeline,
        run_epochs=config.epochs,
        quad=config.quad,
        multi_scale=config.multi_scale,
    )


def _device_rendering(
    ctx: DistributedContext, config: TrainConfig, samples: AugmentedImages, workers: int
) -> tuple[Callable[[BatchRequest], PlannedBatch], DeviceRenderer]:
    """Returns the two halves of ``--render-on device``: the function that plans batches in the workers, and this
    process's renderer."""
    layout = None
    pixels = None
    if config.cache == "device":
        layout, pixels = open_device_images(ctx, samples.sample_index, samples.reader.source_hw, workers)
    fuse = ctx.device.type == "cuda" and not config.deterministic
    return partial(plan_batch, samples, layout), DeviceRenderer(ctx.device, pixels, fuse=fuse)


def build_run_val_loader(
    ctx: DistributedContext, config: TrainConfig, hyp: Hyperparameters, spec: DatasetSpec, canvases: CanvasRule
) -> ValidationLoader:
    """Builds the validation loader of a training run, of tiles if the run trains on tiles; see `build_val_loader`."""
    check_image_size(canvases.imgsz, canvases.stride)
    reader = open_run_val_reader(ctx, config, hyp, spec)
    # Each rank gets whole batches, whose size must not depend on the number of ranks.
    batch_size = min(config.batch_size, MAX_VALIDATION_BATCH)
    return build_val_loader(ctx, reader, canvases, batch_size=batch_size, workers=config.workers)


def build_val_loader(
    ctx: DistributedContext, reader: SampleReader, canvases: CanvasRule, *, batch_size: int, workers: int
) -> ValidationLoader:
    """Builds the loader of this process's letterboxed batches of a split; each sample occurs once over all processes.
    ``canvases``: rule of the model's canvases; ``workers``: value of the flag."""
    samples = LoadImagesAndLabels(reader)
    requests = samples.requests(batch_size, canvases, rank=ctx.rank, world_size=ctx.world_size)
    settings = WorkerSettings(loader_workers(workers, ctx), pin_memory=ctx.device.type == "cuda")
    return ValidationLoader(samples, requests, settings)
