"""Builds the loaders of a run from its settings."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from data.cache.decoding import Decoding
from data.cache.ram import RamCache, open_ram_cache
from data.index.index import DatasetIndex
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.loading.class_balance import logged_repeat_factors
from data.loading.loader import InfiniteDataLoader, ValidationLoader, WorkerSettings
from data.loading.on_device import render_on_device
from data.loading.sampler import EpochOrder, KeyedDistributedSampler
from data.render.letterbox import CanvasRule
from data.samples.augmented import AugmentedImages
from data.samples.dataset import LoadImagesAndLabels
from data.samples.tiled_index import TiledIndex
from data.samples.tiles import AugmentedTiles, TiledImages, open_image_cache
from data.source.dataset_spec import DatasetSpec
from utils.boxes import TILE_OVERLAP
from utils.config.parser import check_image_size
from utils.config.settings import FIND_BATCH_SIZE, Hyperparameters, TrainConfig, ValConfig
from utils.distributed.agreement import check_agreement
from utils.distributed.context import DistributedContext, torch_distributed_zero_first
from utils.distributed.groups import one_per_node_group
from utils.errors import UserError
from utils.logger import get_logger
from utils.machine.packages import require_package
from utils.machine.resources import available_cores
from utils.strings import counted

# Largest validation batch, which one process evaluates. In float32 an image takes up to two sevenths of the memory that
# it takes in training in bfloat16 (yolov8n at 640 px), so one GPU may lack the memory for the global training batch of
# eight.
MAX_VALIDATION_BATCH = 32
# Per rank. A worker renders about 600 images per second at 640 px (benchmarks/LOG.md). More workers would only keep
# more batches in memory.
MAX_WORKERS = 8
MAX_WORKERS_CUDA = 16
MAX_DECODING_THREADS = 64

if TYPE_CHECKING:
    from data.cache.disk import DiskCache


@dataclass(frozen=True)
class TrainSamples:
    """The opened training split."""

    dataset: AugmentedImages
    repeats: np.ndarray | None  # float64 (N,), how often each sample comes in an epoch; None for once
    workers: int  # number of processes of the loader that will read it


def open_train_samples(
    ctx: DistributedContext, config: TrainConfig, hyp: Hyperparameters, spec: DatasetSpec, *, stride: int
) -> TrainSamples:
    """Opens the augmented samples of the training split, whatever the batch size.

    Every process of the run must call this. The first one of each node scans and caches; the others read the results.
    Raises UserError: an unsuitable image size, no images, processes that read different data, errors of scan or cache.
    """
    check_image_size(config.imgsz, stride)
    workers = loader_workers(config.workers, ctx, "train")
    index = _open_index(ctx, config, spec, "train", workers)
    dataset = _open_training_samples(ctx, config, hyp, index, workers)
    if len(dataset) == 0:
        raise UserError(f"{spec.source}: train has no images to train on")
    repeats = dataset.repeats()
    if config.repeat_factor:
        factors = logged_repeat_factors(config.repeat_factor, dataset.index)
        repeats = factors if repeats is None else factors * repeats
    return TrainSamples(dataset, repeats, workers)


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
        index = _open_index(ctx, config, spec, split, workers)
    else:
        _check_agreement(ctx, split, index)
    dataset: LoadImagesAndLabels
    if tile:
        dataset = _open_tiles(ctx, config, hyp or Hyperparameters(), replace(index, tile=tile), workers)
    else:
        dataset = _open_letterboxed(ctx, config, index, workers)
    requests = dataset.requests(batch_size, canvases, rank=ctx.rank, world_size=ctx.world_size)
    return ValidationLoader(dataset, requests, WorkerSettings(workers, pin_memory=ctx.device.type == "cuda"))


def check_loader_settings(ctx: DistributedContext, config: TrainConfig, hyp: Hyperparameters) -> None:
    """Raises UserError for settings that are wrong with any data set. Reads no data."""
    shards = ctx.world_size // config.pipeline
    batch_size = config.batch_size
    processes = counted(shards, "process") if config.pipeline == 1 else f"{counted(shards, 'pair')} of processes"
    if batch_size != FIND_BATCH_SIZE and batch_size < shards:  # the search tries only valid sizes
        raise UserError(
            f"--batch-size {batch_size}: is the total over {processes}, and each needs at least one image; use "
            f"{shards} or more"
        )
    if batch_size != FIND_BATCH_SIZE and config.quad and batch_size % (4 * shards):
        raise UserError(f"--quad with --batch-size {batch_size} on {processes}: needs a multiple of {4 * shards}")
    if config.render_on == "device" and hyp.albumentations:
        raise UserError(
            "--render-on device: the hyper-parameter albumentations needs images on the host; empty it, or use "
            "--render-on host"
        )
    if config.cache == "device" and config.render_on != "device":
        raise UserError("--cache device: images on the device can only be rendered there; add --render-on device")
    if config.image_weights and config.repeat_factor:
        raise UserError("--image-weights and --repeat-factor both choose how often images are seen; remove one")
    if config.cache == "disk":
        require_package("lmdb", "--cache disk", "use --cache ram")
    if hyp.albumentations:
        from data.render.user_transforms import UserTransforms

        UserTransforms(hyp.albumentations, config.seed)  # raises UserError if they are wrong


def data_facts(split: str, index: DatasetIndex) -> dict[str, object]:
    """Returns facts, by their names in messages, that agree between processes that read the same data as ``split``.

    File stamps are not among them, as machines may have separate copies.
    """
    return {
        f"the number of {split} images": len(index),
        "the class names": list(index.names),
        "the channels and bits of the images": str(index.pixels),
        "the size of tiles": index.tile,
        f"the list of {split} images": _digest(index.paths.data, index.paths.offsets),
        f"the sizes of the {split} images": _digest(index.image_hw),
        f"the {split} labels": _digest(index.offsets, index.boxes_xywh_px, index.classes, index.crowd),
    }


def _digest(*arrays: np.ndarray) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def loader_workers(requested: int, ctx: DistributedContext, split: str) -> int:
    """Returns the number of workers for the loader of ``split``: ``requested``, or for -1 an equal share of the cores.

    The share is at most `MAX_WORKERS`. With GPUs two cores stay free for the processes themselves, and the limit is
    `MAX_WORKERS_CUDA`.
    """
    cores = available_cores()
    processes = ctx.local_world_size
    if requested >= 0:
        if ctx.is_main and requested * processes > cores:
            workers = counted(requested * processes, "worker")
            message = "--workers %d (%s): %s on %s; about one per core is fastest"
            get_logger().warning(message, requested, split, workers, counted(cores, "core"))
        return requested
    if ctx.device.type == "cuda":
        share = min(max((cores - 2) // processes, 1), MAX_WORKERS_CUDA)
    else:
        share = min(max(cores // processes, 1), MAX_WORKERS)
    node = f"{counted(cores, 'core')}, {counted(processes, 'process')} on this node"
    get_logger().info("--workers (%s): %d per process (%s)", split, share, node)
    return share


def warn_of_shared_images(spec: DatasetSpec, train: DatasetIndex, val: DatasetIndex) -> None:
    """Warns about images that are in both splits."""
    if spec.held_out:
        return
    train_folders = {os.path.realpath(folder) for folder in spec.split("train").images}
    val_folders = {os.path.realpath(folder) for folder in spec.split("val").images}
    val_paths = set(val.paths)
    if val_folders and train_folders == val_folders:  # joined data sets have no folders here
        shared = len(val_paths)
    else:
        shared = sum(path in val_paths for path in train.paths)
    if shared:
        count = f"{shared:,}" if shared < len(val_paths) else "all"
        message = "%s: %s of the %s validation images are training images too; scores say little about other images"
        get_logger().warning(message, spec.source, count, f"{len(val_paths):,}")


def _open_index(
    ctx: DistributedContext, config: TrainConfig | ValConfig, spec: DatasetSpec, split: str, workers: int
) -> DatasetIndex:
    """Opens the index of a split, the same on all processes. Every process of the run must call this.

    ``workers``: number of workers of the loader that will read the split.
    """
    settings = IndexSettings(
        cache_dir=config.cache_dir,
        workers=max(workers, 1),
        max_bad=config.max_bad,
        single_cls=config.single_cls,
        progress=ctx.is_node_leader,
    )
    if isinstance(config, TrainConfig) and split == "train":
        settings = replace(settings, fraction=config.fraction, seed=config.seed, repeats=False)
    with torch_distributed_zero_first(ctx):
        index = load_index(spec, split, settings)
    _check_agreement(ctx, split, index)
    return index


def _check_agreement(ctx: DistributedContext, split: str, index: DatasetIndex) -> None:
    """Raises UserError if processes have read different data, before nodes exchange images."""
    if ctx.world_size > 1:
        check_agreement(ctx, data_facts(split, index))


def _decoding(ctx: DistributedContext, workers: int, *, reduces: bool = True) -> Decoding:
    """Returns how caches are filled: with the threads of all processes of this node, as the others wait meanwhile."""
    threads = min(max(workers, 2) * ctx.local_world_size, MAX_DECODING_THREADS)
    return Decoding(threads, ctx.is_main, reduces=reduces)


def _open_training_samples(
    ctx: DistributedContext, config: TrainConfig, hyp: Hyperparameters, index: DatasetIndex, workers: int
) -> AugmentedImages:
    """Opens the augmented samples of the training split. Every process of the run must call this."""
    if index.tile:
        tiles = TiledIndex(index, index.tile, hyp=hyp, seed=config.seed)
        images = open_image_cache(ctx, index, config.cache, config.cache_dir, _decoding(ctx, workers))
        return AugmentedTiles(
            tiles,
            imgsz=config.imgsz,
            image_cache=images,
            hyp=hyp,
            seed=config.seed,
            epochs=config.epochs,
            rect=config.rect,
        )
    kind = "none" if config.cache == "device" else config.cache  # `render_on_device` opens the cache on the device
    return AugmentedImages(
        index,
        imgsz=config.imgsz,
        image_cache=_open_cache(kind, ctx, config, index, _decoding(ctx, workers)),
        hyp=hyp,
        seed=config.seed,
        epochs=config.epochs,
        rect=config.rect,
    )


def _open_tiles(
    ctx: DistributedContext, config: TrainConfig | ValConfig, hyp: Hyperparameters, index: DatasetIndex, workers: int
) -> TiledImages:
    """Opens the tiles of a validation split. Every process of the run must call this."""
    cache = "none"
    overlap = TILE_OVERLAP
    if isinstance(config, TrainConfig):
        cache = config.cache
    elif config.overlap:
        overlap = config.overlap
    images = open_image_cache(ctx, index, cache, config.cache_dir, _decoding(ctx, workers))
    tiles = TiledIndex(index, index.tile, hyp=hyp, overlap=overlap)
    return TiledImages(tiles, imgsz=_letterboxed_side(config), image_cache=images)


def _open_letterboxed(
    ctx: DistributedContext, config: TrainConfig | ValConfig, index: DatasetIndex, workers: int
) -> LoadImagesAndLabels:
    """Opens the letterboxed images of a validation split. Every process of the run must call this."""
    image_cache = None
    if isinstance(config, TrainConfig):
        kind = "ram" if config.cache == "device" else config.cache  # the device holds only training images
        image_cache = _open_cache(kind, ctx, config, index, _decoding(ctx, workers, reduces=False))
    return LoadImagesAndLabels(index, imgsz=_letterboxed_side(config), image_cache=image_cache, reduces=False)


def _letterboxed_side(config: TrainConfig | ValConfig) -> int | None:
    """Returns the longer side of letterboxed images; None with `ValConfig.tile`, which keeps their full size."""
    return None if isinstance(config, ValConfig) and config.tile else config.imgsz


def _open_cache(
    kind: str, ctx: DistributedContext, config: TrainConfig, index: DatasetIndex, decoding: Decoding
) -> RamCache | DiskCache | None:
    """Opens a cache of decoded images and fills it; returns None for the kind "none".

    Every process of the run must call this.
    """
    if kind == "none" or not len(index):
        return None
    if kind == "ram":
        with torch_distributed_zero_first(ctx):
            return open_ram_cache(index, config.imgsz, decoding, ctx)
    from data.cache.disk import open_disk_cache  # needs lmdb

    leaders = None  # the first processes of several nodes, which fill their caches together
    if not config.stage and ctx.is_distributed and ctx.local_world_size < ctx.world_size:
        leaders = one_per_node_group(ctx)
    with torch_distributed_zero_first(ctx):
        return open_disk_cache(index, config.cache_dir, config.imgsz, decoding, ctx, leaders)
