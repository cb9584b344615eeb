"""Builds the loaders of a run from its settings."""

from __future__ import annotations

from dataclasses import replace

from data.index.index import DatasetIndex
from data.loading.loader import InfiniteDataLoader, ValidationLoader, WorkerSettings
from data.loading.on_device import render_on_device
from data.loading.open_samples import (
    TrainSamples,
    check_same_data,
    open_index,
    open_letterboxed,
    open_tiles,
    open_train_samples,
)
from data.loading.sampler import EpochOrder, KeyedDistributedSampler
from data.loading.worker_count import loader_workers
from data.render.letterbox import CanvasRule
from data.samples.dataset import LoadImagesAndLabels
from data.source.dataset_spec import DatasetSpec
from utils.config.checks import check_image_size
from utils.config.settings import Hyperparameters, TrainConfig, ValConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError

# Largest validation batch, which one process evaluates. In float32 an image takes up to two sevenths of the memory that
# it takes in training in bfloat16 (yolov8n at 640 px), so one GPU may lack the memory for the global training batch of
# eight.
MAX_VALIDATION_BATCH = 32


def build_train_sampler(
    ctx: DistributedContext, config: TrainConfig, hyp: Hyperparameters, samples: TrainSamples, *, stride: int
) -> KeyedDistributedSampler:
    """Builds the sampler of this process's shards of the training batches; its `len` is their number in an epoch."""
    dataset = samples.dataset
    order = EpochOrder(
        len(dataset),
        seed=config.seed,
        batch_size=config.batch_size,
        imgsz=config.imgsz,
        stride=stride,
        image_hw=dataset.index.image_hw if config.rect else None,
        block=0 if config.rect else hyp.mosaic_block,
        repeats=samples.repeats,
    )
    if config.quad and len(order) < 4:
        raise UserError(f"--quad: needs at least 4 training images, train has {len(order)}")
    return KeyedDistributedSampler(
        order,
        rank=ctx.rank // config.pipeline,
        world_size=ctx.world_size // config.pipeline,
        quad=config.quad,
        multi_scale=config.multi_scale,
    )


def build_train_loader(
    ctx: DistributedContext,
    config: TrainConfig,
    hyp: Hyperparameters,
    spec: DatasetSpec,
    *,
    stride: int,
    samples: TrainSamples | None = None,
) -> InfiniteDataLoader:
    """Builds the endless loader of this process's shards of the training batches, shuffled and augmented.

    With ``--render-on device`` the loader yields planned batches, and its ``renderer`` renders them. ``samples``: those
    of the split, if they are open already; see `open_train_samples`, of which the same is true.
    """
    if samples is None:
        samples = open_train_samples(ctx, config, hyp, spec, stride=stride)
    sampler = build_train_sampler(ctx, config, hyp, samples, stride=stride)
    make_batch = None
    renderer = None
    if config.render_on == "device":
        make_batch, renderer = render_on_device(ctx, config, samples.dataset, samples.workers)
    return InfiniteDataLoader(
        samples.dataset,
        sampler,
        WorkerSettings(samples.workers, pin_memory=ctx.device.type == "cuda", make_batch=make_batch),
        weighted=config.image_weights,
        by_epoch=config.time > 0,
        renderer=renderer,
    )


def build_val_loader(
    ctx: DistributedContext,
    config: TrainConfig | ValConfig,
    spec: DatasetSpec,
    canvases: CanvasRule,
    *,
    tile: int = 0,
    hyp: Hyperparameters | None = None,
    index: DatasetIndex | None = None,
) -> ValidationLoader:
    """Builds the loader of this process's letterboxed batches of a split, in which each image comes once over all
    processes. Every process of the run must call this.

    Args:
        config: a `ValConfig` states the split and the batch size; with its ``tile``, a batch is one image at its full
            size. A training run validates on "val", with batches of at most `MAX_VALIDATION_BATCH`.
        canvases: rule of the model's canvases.
        tile: side of the tiles that serve as samples, pixels; 0 for whole images.
        hyp: settings of tiles; None for the defaults.
        index: index of the split, if it is open already.
    """
    check_image_size(canvases.imgsz, canvases.stride)
    if isinstance(config, ValConfig) and config.tile:
        check_image_size(config.tile, canvases.stride, flag="--tile")
    # Each rank gets whole batches, whose size must not depend on the number of ranks.
    if isinstance(config, TrainConfig):
        split = "val"
        batch_size = min(config.batch_size, MAX_VALIDATION_BATCH)
    else:
        split = config.task
        batch_size = config.batch_size
    workers = loader_workers(config.workers, ctx, split)
    if index is None:
        index = open_index(ctx, config, spec, split, workers)
    else:
        check_same_data(ctx, split, index)
    dataset: LoadImagesAndLabels
    if tile:
        dataset = open_tiles(ctx, config, hyp or Hyperparameters(), replace(index, tile=tile), workers)
    else:
        dataset = open_letterboxed(ctx, config, index, workers)
    requests = dataset.requests(batch_size, canvases, rank=ctx.rank, world_size=ctx.world_size)
    return ValidationLoader(dataset, requests, WorkerSettings(workers, pin_memory=ctx.device.type == "cuda"))
