"""Opens a run's splits: the index, the image cache, and the reader that takes samples from both.

Every process of a run must call these functions; see build.py.
"""

from __future__ import annotations

import json
from dataclasses import replace

from data.cache.open import decoding_for, open_cache, open_tile_cache
from data.dataset.spec import DatasetSpec
from data.index.index import DatasetIndex
from data.index.index_settings import IndexSettings
from data.index.load import build_index, map_index
from data.loading.checks import check_same_data
from data.loading.worker_count import loader_workers, log_loader_workers
from data.samples.readers import ImageReader, SampleReader, TileReader
from data.samples.tiled_index import TiledIndex
from utils.config.settings import Hyperparameters, TrainConfig, ValConfig
from utils.distributed.context import DistributedContext, torch_distributed_zero_first
from utils.errors import UserError


def open_train_reader(
    ctx: DistributedContext, config: TrainConfig, hyp: Hyperparameters, spec: DatasetSpec
) -> SampleReader:
    """Opens the reader of the training split. Raises UserError if it has no images."""
    log_loader_workers(config.workers, ctx, "train")
    settings = replace(_index_settings(ctx, config), fraction=config.fraction, seed=config.seed, repeats=False)
    index = _open_index(ctx, spec, "train", settings)
    check_has_images(index, spec, "train", "train on")
    if index.tile:
        tiles = TiledIndex(index, index.tile, hyp=hyp, seed=config.seed)
        return open_tile_reader(ctx, config, tiles, imgsz=config.imgsz, kind=config.cache)
    decoding = decoding_for(ctx, loader_workers(config.workers, ctx))
    kind = "none" if config.cache == "device" else config.cache  # `open_device_images` decodes for the device
    cache = open_cache(ctx, kind, index, config=config, decoding=decoding)
    return ImageReader(index, imgsz=config.imgsz, image_cache=cache)


def open_run_val_reader(
    ctx: DistributedContext, config: TrainConfig, hyp: Hyperparameters, spec: DatasetSpec
) -> SampleReader:
    """Opens the reader of a training run's validation split, of tiles if the run trains on tiles."""
    log_loader_workers(config.workers, ctx, "val")
    index = open_val_index(ctx, config, spec, "val")
    if index.tile:
        check_has_images(index, spec, "val", "cut into tiles")
        tiles = TiledIndex(index, index.tile, hyp=hyp)
        return open_tile_reader(ctx, config, tiles, imgsz=config.imgsz, kind=config.cache)
    decoding = decoding_for(ctx, loader_workers(config.workers, ctx), antialias=False)
    kind = "ram" if config.cache == "device" else config.cache  # the device holds only training images
    cache = open_cache(ctx, kind, index, config=config, decoding=decoding)
    return ImageReader(index, imgsz=config.imgsz, image_cache=cache, reduces=False)


def open_tile_reader(
    ctx: DistributedContext, config: TrainConfig | ValConfig, tiles: TiledIndex, *, imgsz: int, kind: str
) -> TileReader:
    """Opens the reader of tiles, which are scaled to ``imgsz``. ``kind``: see `open_tile_cache`."""
    decoding = decoding_for(ctx, loader_workers(config.workers, ctx))
    images = open_tile_cache(ctx, kind, tiles.image_index, cache_dir=config.cache_dir, decoding=decoding)
    return TileReader(tiles, imgsz=imgsz, image_cache=images)


def open_val_index(
    ctx: DistributedContext, config: TrainConfig | ValConfig, spec: DatasetSpec, split: str
) -> DatasetIndex:
    """Opens the index of a split to validate on, with all of its images."""
    return _open_index(ctx, spec, split, _index_settings(ctx, config))


def check_has_images(index: DatasetIndex, spec: DatasetSpec, split: str, purpose: str) -> None:
    """Raises UserError if a split has no images. ``purpose``: intended use of the images, for the message."""
    if len(index) == 0:
        raise UserError(f"{spec.source}: {split} has no images to {purpose}")


def _index_settings(ctx: DistributedContext, config: TrainConfig | ValConfig) -> IndexSettings:
    """Returns the settings for indexing a whole split."""
    return IndexSettings.of_run(config, workers=loader_workers(config.workers, ctx), progress=ctx.is_node_leader)


def _open_index(ctx: DistributedContext, spec: DatasetSpec, split: str, settings: IndexSettings) -> DatasetIndex:
    """Opens the index of a split, the same on all processes. The first process of each node lists and scans the split,
    and publishes its cache files, which the others map."""
    key = f"index/{ctx.first_rank}/{ctx.node_rank}/{split}"
    with torch_distributed_zero_first(ctx):
        if ctx.store is None or ctx.is_node_leader:
            index, cache_files = build_index(spec, split, settings)
            if ctx.store is not None:
                ctx.store.set(key, json.dumps(cache_files))
        else:
            index = map_index(spec, split, settings, json.loads(ctx.store.get(key)))
    check_same_data(ctx, split, index)  # nodes may have separate copies
    return index
