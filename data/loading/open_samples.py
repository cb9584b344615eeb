"""Opens the samples of a split: its index, the cache of its images, and what makes samples of them.

Every process of the run must call these functions: the first one of each node scans and caches, and the others read the
results.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from data.cache.decoding import Decoding
from data.cache.ram import RamCache, open_ram_cache
from data.index.index import DatasetIndex
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.loading.class_balance import logged_repeat_factors
from data.loading.worker_count import loader_workers
from data.samples.augmented import AugmentedImages
from data.samples.dataset import LoadImagesAndLabels
from data.samples.tiled_index import TiledIndex
from data.samples.tiles import AugmentedTiles, TiledImages, open_image_cache
from data.source.dataset_spec import DatasetSpec
from utils.boxes import TILE_OVERLAP
from utils.config.checks import check_image_size
from utils.config.settings import Hyperparameters, TrainConfig, ValConfig
from utils.distributed.agreement import check_agreement
from utils.distributed.context import DistributedContext, torch_distributed_zero_first
from utils.distributed.groups import one_per_node_group
from utils.errors import UserError

if TYPE_CHECKING:
    from data.cache.disk import DiskCache

MAX_DECODING_THREADS = 64


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
    index = open_index(ctx, config, spec, "train", workers)
    dataset = _open_augmented(ctx, config, hyp, index, workers)
    if len(dataset) == 0:
        raise UserError(f"{spec.source}: train has no images to train on")
    repeats = dataset.repeats()
    dataset.limit_partners(repeats)
    if config.repeat_factor:
        factors = logged_repeat_factors(config.repeat_factor, dataset.index)
        repeats = factors if repeats is None else factors * repeats
    return TrainSamples(dataset, repeats, workers)


def open_index(
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
    check_same_data(ctx, split, index)
    return index


def check_same_data(ctx: DistributedContext, split: str, index: DatasetIndex) -> None:
    """Raises UserError if processes have read different data, before nodes exchange images."""
    if ctx.world_size > 1:
        check_agreement(ctx, data_facts(split, index))


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


def _decoding(ctx: DistributedContext, workers: int, *, reduces: bool = True) -> Decoding:
    """Returns how caches are filled: with the threads of all processes of this node, as the others wait meanwhile."""
    threads = min(max(workers, 2) * ctx.local_world_size, MAX_DECODING_THREADS)
    return Decoding(threads, ctx.is_main, reduces=reduces)


def _open_augmented(
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


def open_tiles(
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


def open_letterboxed(
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
