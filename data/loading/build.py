"""Opens the splits of a run, and builds their loaders from its settings.

A loader starts workers that render samples, whole images or tiles, which a reader takes from the index of a split and
its cache. Every process of a run must call these functions: the first one of each node scans and caches, and the others
read the results.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from data.cache.disk import DiskCache, open_disk_cache, open_full_size_cache
from data.cache.mapped import Decoding, MappedImages, open_ram_cache
from data.index import DatasetIndex, IndexSettings, digest_of_arrays
from data.load import load_split
from data.loading.loader import InfiniteDataLoader, ValidationLoader
from data.loading.sampler import DistributedSampler, EpochOrder, TrainCanvases, count_batches
from data.render.letterbox import CanvasRule
from data.samples.dataset import AugmentedImages, LoadImagesAndLabels
from data.samples.readers import ImageReader, SampleReader, TileReader
from data.samples.tiles import TiledIndex
from data.samples.weights import sample_weights
from data.spec import DatasetSpec
from utils.config.image_size import check_image_size
from utils.config.settings import Hyperparameters, TrainConfig, ValConfig
from utils.distributed.agreement import check_agreement
from utils.distributed.context import DistributedContext, torch_distributed_zero_first
from utils.errors import UserError
from utils.logger import get_logger
from utils.machine.limits import require_posix
from utils.machine.resources import available_cores
from utils.process.spawn import is_daemonic
from utils.strings import counted

# Largest validation batch, which one process evaluates. In float32 an image takes up to two sevenths of the memory that
# it takes in training in bfloat16 (yolov8n at 640 px), so one GPU may lack the memory for the global training batch of
# eight GPUs.
MAX_VALIDATION_BATCH = 32
# Workers per rank. More would only keep more batches in memory.
MAX_WORKERS = 8
MAX_WORKERS_CUDA = 16
MAX_DECODING_THREADS = 64


def loader_workers(requested: int, ctx: DistributedContext) -> int:
    """Returns the number of workers of a loader: ``requested``, or for -1 an equal share of the cores; 0 in a daemonic
    process.

    The share is at most `MAX_WORKERS`. With GPUs two cores of the node stay free for the training processes, and the
    limit is `MAX_WORKERS_CUDA`.
    """
    if is_daemonic():
        return 0
    if requested >= 0:
        return requested
    cores = available_cores()
    processes = ctx.local_world_size
    if ctx.device.type == "cuda":
        return min(max((cores - 2) // processes, 1), MAX_WORKERS_CUDA)
    return min(max(cores // processes, 1), MAX_WORKERS)


def warn_about_workers(requested: int, ctx: DistributedContext, split: str) -> None:
    """Warns if more workers are requested for the loader of ``split`` than there are cores, or than may be started."""
    if ctx.is_main and requested and is_daemonic():
        get_logger().warning("%s: loaded without workers, as a daemonic process may not start others", split)
        return
    total = requested * ctx.local_world_size
    if total > available_cores():
        message = "--workers %d (%s): %s on %s; about one per core is fastest"
        cores = counted(available_cores(), "core")
        get_logger().warning(message, requested, split, counted(total, "worker"), cores)


def open_train_reader(
    ctx: DistributedContext, config: TrainConfig, hyp: Hyperparameters, spec: DatasetSpec
) -> SampleReader:
    """Opens the reader of the training split. Raises UserError if it has no images."""
    warn_about_workers(config.workers, ctx, "train")
    index = _open_index(ctx, config, spec, "train", fraction=config.fraction, seed=config.seed, repeats=False)
    check_has_images(index, spec, "train", "train on")
    if index.tile:
        tiles = TiledIndex(index, index.tile, hyp=hyp, seed=config.seed)
        return open_tile_reader(ctx, config, tiles, imgsz=config.imgsz, kind=config.cache)
    return _open_image_reader(ctx, config, index, antialias=True)


def open_run_val_reader(
    ctx: DistributedContext, config: TrainConfig, hyp: Hyperparameters, spec: DatasetSpec
) -> SampleReader:
    """Opens the reader of a training run's validation split, of tiles if the run trains on tiles."""
    warn_about_workers(config.workers, ctx, "val")
    index = open_val_index(ctx, config, spec, "val")
    if index.tile:
        check_has_images(index, spec, "val", "cut into tiles")
        tiles = TiledIndex(index, index.tile, hyp=hyp)
        return open_tile_reader(ctx, config, tiles, imgsz=config.imgsz, kind=config.cache)
    return _open_image_reader(ctx, config, index, antialias=False)


def _open_image_reader(
    ctx: DistributedContext, config: TrainConfig, index: DatasetIndex, *, antialias: bool
) -> ImageReader:
    """Opens the reader of whole images, from their files or from the cache that ``--cache`` selects."""
    cache: MappedImages | DiskCache | None = None
    if config.cache != "none" and len(index):
        require_posix(f"--cache {config.cache}")
        decoding = _decoding_for(ctx, config, antialias=antialias)
        with torch_distributed_zero_first(ctx):
            if config.cache == "ram":
                cache = open_ram_cache(ctx, index, config.imgsz, decoding)
            else:
                cache = open_disk_cache(index, config.imgsz, decoding, cache_dir=config.cache_dir)
    return ImageReader(index, imgsz=config.imgsz, image_cache=cache, antialias=antialias)


def open_tile_reader(
    ctx: DistributedContext, config: TrainConfig | ValConfig, tiles: TiledIndex, *, imgsz: int, kind: str
) -> TileReader:
    """Opens the reader of tiles, which are scaled to ``imgsz``. They are cut from images decoded once at full size, in
    memory for the ``kind`` "ram" of cache, otherwise in a file on the disk."""
    require_posix("tile: training on tiles")
    decoding = _decoding_for(ctx, config, antialias=True)
    with torch_distributed_zero_first(ctx):
        if kind == "ram":
            images = open_ram_cache(ctx, tiles.image_index, 0, decoding)
        else:
            images = open_full_size_cache(tiles.image_index, decoding, cache_dir=config.cache_dir)
    return TileReader(tiles, imgsz=imgsz, image_cache=images)


def _decoding_for(ctx: DistributedContext, config: TrainConfig | ValConfig, *, antialias: bool) -> Decoding:
    """Returns a `Decoding` with the threads of all processes of this node: the others wait while one decodes."""
    workers = loader_workers(config.workers, ctx)
    threads = min(max(workers, 2) * ctx.local_world_size, MAX_DECODING_THREADS)
    return Decoding(threads, ctx.is_main, antialias=antialias)


def open_val_index(
    ctx: DistributedContext, config: TrainConfig | ValConfig, spec: DatasetSpec, split: str
) -> DatasetIndex:
    """Opens the index of a split to validate on, with all of its images."""
    return _open_index(ctx, config, spec, split)


def check_has_images(index: DatasetIndex, spec: DatasetSpec, split: str, purpose: str) -> None:
    """Raises UserError if a split has no images. ``purpose``: intended use of the images, for the message."""
    if len(index) == 0:
        raise UserError(f"{spec.source}: {split} has no images to {purpose}")


def _open_index(
    ctx: DistributedContext, config: TrainConfig | ValConfig, spec: DatasetSpec, split: str, **selection: Any
) -> DatasetIndex:
    """Opens the index of a split, the same on all processes. The first process of each node lists and scans the split,
    and publishes its cache files, which the others map. ``selection``: of `IndexSettings`."""
    workers = loader_workers(config.workers, ctx)
    settings = replace(IndexSettings.of_run(config, workers=workers, progress=ctx.is_node_leader), **selection)
    key = f"index/{ctx.first_rank}/{ctx.node_rank}/{split}"
    with torch_distributed_zero_first(ctx):
        known_files = None
        if ctx.store is not None and not ctx.is_node_leader:
            known_files = json.loads(ctx.store.get(key))
        loaded = load_split(spec, split, settings, known_files, max_bad=config.max_bad)
        if ctx.store is not None and ctx.is_node_leader:
            ctx.store.set(key, json.dumps(loaded.cache_files))
    check_same_data(ctx, split, loaded.used)  # nodes may have separate copies
    return loaded.used


def check_same_data(ctx: DistributedContext, split: str, index: DatasetIndex) -> None:
    """Raises UserError if processes have read different data. Every process of the run must call this."""
    if ctx.world_size > 1:
        check_agreement(ctx, data_facts(split, index))


def data_facts(split: str, index: DatasetIndex) -> dict[str, object]:
    """Returns facts about ``split``, by their names in messages, that are equal on processes that read the same data.

    File stamps are not among them, because machines may have separate copies.
    """
    return {
        f"the number of {split} images": len(index),
        "the class names": list(index.names),
        "the channels and bits of the images": str(index.pixels),
        "the size of tiles": index.tile,
        f"the list of {split} images": digest_of_arrays(index.paths.data, index.paths.offsets),
        f"the sizes of the {split} images": digest_of_arrays(index.image_hw),
        f"the {split} labels": digest_of_arrays(
            index.offsets, index.boxes_xywh_px, index.classes, index.crowd, index.incomplete
        ),
    }


def open_train_samples(
    ctx: DistributedContext, config: TrainConfig, hyp: Hyperparameters, spec: DatasetSpec, *, stride: int
) -> AugmentedImages:
    """Opens the augmented samples of the training split, whatever the batch size.

    Raises UserError for an unsuitable image size, a split without images or with too few for ``--quad``, if processes
    have read different data, and if the scan or the cache fails.
    """
    check_image_size(config.imgsz, stride)
    reader = open_train_reader(ctx, config, hyp, spec)
    weights = sample_weights(reader, tile_backgrounds=hyp.tile_backgrounds, repeat_factor=config.repeat_factor)
    samples = AugmentedImages(reader, hyp=hyp, seed=config.seed, rect=config.rect, weights=weights)
    if config.quad and samples.per_epoch < 4:
        raise UserError(f"--quad: needs at least 4 training images, train has {samples.per_epoch}")
    return samples


def count_train_batches(config: TrainConfig, samples: AugmentedImages) -> int:
    """Returns how many batches of ``samples`` an epoch has on each rank, see `count_batches`."""
    return count_batches(samples.per_epoch, config.batch_size, quad=config.quad)


def build_train_loader(
    ctx: DistributedContext, config: TrainConfig, hyp: Hyperparameters, samples: AugmentedImages, *, stride: int
) -> InfiniteDataLoader:
    """Builds the endless loader of this process's shards of the training batches, shuffled and augmented. Raises
    UserError if a transform of the user fails on the smallest or largest canvas."""
    image_hw = samples.sample_index.image_hw if config.rect else None
    order = EpochOrder(
        samples.weights,
        seed=config.seed,
        batch_size=config.batch_size,
        canvases=TrainCanvases(config.imgsz, stride, image_hw),
        block=0 if config.rect else hyp.mosaic_block,
    )
    sampler = DistributedSampler(
        order,
        rank=ctx.rank // config.pipeline,
        world_size=ctx.world_size // config.pipeline,
        run_epochs=config.epochs,
        quad=config.quad,
        multi_scale=config.multi_scale,
    )
    samples.check_transforms(sampler.extreme_canvases())
    return InfiniteDataLoader(
        samples,
        sampler,
        workers=loader_workers(config.workers, ctx),
        pin_memory=ctx.device.type == "cuda",
        weighted=config.image_weights,
        stops_after_epoch=config.time > 0,
    )


def build_run_val_loader(
    ctx: DistributedContext, config: TrainConfig, reader: SampleReader, canvases: CanvasRule
) -> ValidationLoader:
    """Builds the validation loader of a training run; see `build_val_loader`."""
    check_image_size(canvases.imgsz, canvases.stride)
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
    pin_memory = ctx.device.type == "cuda"
    return ValidationLoader(samples, requests, workers=loader_workers(workers, ctx), pin_memory=pin_memory)
