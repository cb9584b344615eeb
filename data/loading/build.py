"""Builds the loaders of a run from its settings.

A loader reads samples, which a reader takes from the images of a split, with the workers that it starts. The functions
stand in the order in which they are needed: the two loaders, then what they consist of. Every process of a run must
call them: the first one of each node scans and caches, and the others read the results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from data.cache.decoding import Decoding
from data.cache.device import open_device_cache
from data.cache.open import decoding_for, open_cache, open_tile_cache
from data.index.index import DatasetIndex
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.loading.loader import InfiniteDataLoader, ValidationLoader, WorkerSettings
from data.loading.same_data import check_same_data
from data.loading.sampler import EpochOrder, KeyedDistributedSampler
from data.loading.worker import plan_batch
from data.loading.worker_count import loader_workers, log_loader_workers
from data.render.device import DeviceRenderer, PlannedBatch
from data.render.letterbox import CanvasRule
from data.render.pyramid import PyramidLayout
from data.samples.augmented import AugmentedImages
from data.samples.batch_request import BatchRequest
from data.samples.dataset import LoadImagesAndLabels
from data.samples.readers import ImageReader, SampleReader, TileReader
from data.samples.sample_weights import sample_weights
from data.samples.tiled_index import TiledIndex
from data.source.dataset_spec import DatasetSpec
from utils.boxes import TILE_OVERLAP
from utils.config.checks import check_image_size
from utils.config.settings import Hyperparameters, TrainConfig, ValConfig
from utils.distributed.context import DistributedContext, node_leader_first
from utils.errors import UserError

# Largest validation batch, which one process evaluates. In float32 an image takes up to two sevenths of the memory that
# it takes in training in bfloat16 (yolov8n at 640 px), so one GPU may lack the memory for the global training batch of
# eight.
MAX_VALIDATION_BATCH = 32


def build_train_loader(
    ctx: DistributedContext,
    config: TrainConfig,
    hyp: Hyperparameters,
    spec: DatasetSpec,
    *,
    stride: int,
    samples: AugmentedImages | None = None,
) -> InfiniteDataLoader:
    """Builds the endless loader of this process's shards of the training batches, shuffled and augmented.

    With ``--render-on device`` the loader yields planned batches, and its ``renderer`` renders them. ``samples``: those
    of the split, if they are open already. Raises UserError as `open_train_samples` does.
    """
    if samples is None:
        samples = open_train_samples(ctx, config, hyp, spec, stride=stride)
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
    """Builds the loader of this process's letterboxed batches of a split, in which each sample comes once over all
    processes.

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
    log_loader_workers(config.workers, ctx, split)
    if index is None:
        index = open_index(ctx, config, spec, split)
    else:
        check_same_data(ctx, split, index)
    if tile and not len(index):
        raise UserError(f"{spec.source}: {split} has no images to cut into tiles")
    if tile:
        reader = _open_val_tiles(ctx, config, hyp or Hyperparameters(), replace(index, tile=tile))
    else:
        reader = _open_val_images(ctx, config, index)
    samples = LoadImagesAndLabels(reader)
    requests = samples.requests(batch_size, canvases, rank=ctx.rank, world_size=ctx.world_size)
    workers = loader_workers(config.workers, ctx)
    return ValidationLoader(samples, requests, WorkerSettings(workers, pin_memory=ctx.device.type == "cuda"))


def open_train_samples(
    ctx: DistributedContext, config: TrainConfig, hyp: Hyperparameters, spec: DatasetSpec, *, stride: int
) -> AugmentedImages:
    """Opens the augmented samples of the training split, whatever the batch size.

    Raises UserError: an unsuitable image size, no images, processes that read different data, errors of scan or cache.
    """
    check_image_size(config.imgsz, stride)
    log_loader_workers(config.workers, ctx, "train")
    index = open_index(ctx, config, spec, "train")
    if len(index) == 0:
        raise UserError(f"{spec.source}: train has no images to train on")
    reader = _open_train_reader(ctx, config, hyp, index)
    weights = sample_weights(reader, tile_backgrounds=hyp.tile_backgrounds, repeat_factor=config.repeat_factor)
    return AugmentedImages(reader, hyp=hyp, seed=config.seed, epochs=config.epochs, rect=config.rect, weights=weights)


def build_train_sampler(
    ctx: DistributedContext, config: TrainConfig, hyp: Hyperparameters, samples: AugmentedImages, *, stride: int
) -> KeyedDistributedSampler:
    """Builds the sampler of this process's shards of the training batches; its `len` is their number in an epoch."""
    order = EpochOrder(
        samples.weights,
        seed=config.seed,
        batch_size=config.batch_size,
        imgsz=config.imgsz,
        stride=stride,
        image_hw=samples.sample_index.image_hw if config.rect else None,
        block=0 if config.rect else hyp.mosaic_block,
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


def open_index(ctx: DistributedContext, config: TrainConfig | ValConfig, spec: DatasetSpec, split: str) -> DatasetIndex:
    """Opens the index of a split, the same on all processes."""
    settings = IndexSettings(
        cache_dir=config.cache_dir,
        workers=max(loader_workers(config.workers, ctx), 1),
        max_bad=config.max_bad,
        single_cls=config.single_cls,
        progress=ctx.is_node_leader,
    )
    if isinstance(config, TrainConfig) and split == "train":
        settings = replace(settings, fraction=config.fraction, seed=config.seed, repeats=False)
    with node_leader_first(ctx):
        index = load_index(spec, split, settings)
    check_same_data(ctx, split, index)  # before nodes exchange images
    return index


def _open_train_reader(
    ctx: DistributedContext, config: TrainConfig, hyp: Hyperparameters, index: DatasetIndex
) -> SampleReader:
    """Opens the reader of the training split."""
    decoding = decoding_for(ctx, loader_workers(config.workers, ctx))
    if index.tile:
        tiles = TiledIndex(index, index.tile, hyp=hyp, seed=config.seed)
        images = open_tile_cache(ctx, config.cache, index, cache_dir=config.cache_dir, decoding=decoding)
        return TileReader(tiles, imgsz=config.imgsz, image_cache=images)
    kind = "none" if config.cache == "device" else config.cache  # `_device_rendering` opens the cache on the device
    return ImageReader(index, imgsz=config.imgsz, image_cache=open_cache(ctx, kind, index, config, decoding))


def _open_val_images(ctx: DistributedContext, config: TrainConfig | ValConfig, index: DatasetIndex) -> SampleReader:
    """Opens the reader of a validation split with whole images as samples."""
    image_cache = None
    if isinstance(config, TrainConfig):
        kind = "ram" if config.cache == "device" else config.cache  # the device holds only training images
        decoding = decoding_for(ctx, loader_workers(config.workers, ctx), reduces=False)
        image_cache = open_cache(ctx, kind, index, config, decoding)
    return ImageReader(index, imgsz=_letterboxed_side(config), image_cache=image_cache, reduces=False)


def _open_val_tiles(
    ctx: DistributedContext, config: TrainConfig | ValConfig, hyp: Hyperparameters, index: DatasetIndex
) -> SampleReader:
    """Opens the reader of a validation split with tiles of side ``index.tile`` as samples."""
    cache = "none"
    overlap = TILE_OVERLAP
    if isinstance(config, TrainConfig):
        cache = config.cache
    elif config.overlap:
        overlap = config.overlap
    decoding = decoding_for(ctx, loader_workers(config.workers, ctx))
    images = open_tile_cache(ctx, cache, index, cache_dir=config.cache_dir, decoding=decoding)
    tiles = TiledIndex(index, index.tile, hyp=hyp, overlap=overlap)
    return TileReader(tiles, imgsz=_letterboxed_side(config), image_cache=images)


def _letterboxed_side(config: TrainConfig | ValConfig) -> int | None:
    """Returns the longer side of letterboxed images; None with `ValConfig.tile`, which keeps their full size."""
    return None if isinstance(config, ValConfig) and config.tile else config.imgsz


def _device_rendering(
    ctx: DistributedContext, config: TrainConfig, samples: AugmentedImages, workers: int
) -> tuple[Callable[[BatchRequest], PlannedBatch], DeviceRenderer]:
    """Returns the two halves of ``--render-on device``: what plans batches in the workers, and what renders them in
    this process. Opens the cache of ``--cache device``."""
    layout = None
    pixels = None
    if config.cache == "device":
        layout = PyramidLayout.of(samples.reader.source_hw)
        decoding = Decoding(max(workers, 2), ctx.is_main)  # each process decodes a shard of the images
        pixels = open_device_cache(ctx, samples.sample_index, layout, decoding)
    fuse = ctx.device.type == "cuda" and not config.deterministic
    return partial(plan_batch, samples, layout), DeviceRenderer(ctx.device, pixels, fuse=fuse)
