"""The loaders of a training run, from its settings."""

from __future__ import annotations

import os

from data.index.dataset_yaml import DatasetSpec
from data.index.index import DatasetIndex
from data.loading.build import check_batch_size, check_rendering, create_dataloader
from data.loading.loader import InfiniteDataLoader
from data.user_transforms import PixelTransforms
from utils.config.settings import FIND_BATCH_SIZE, Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext
from utils.logger import get_logger
from utils.machine.limits import require_package
from utils.machine.resources import loader_workers

# Images of a validation batch. One process has it whole, and an image takes a seventh of the memory that it takes in
# training (yolov8n at 640 px): the global batch that fills eight GPUs is too large for one.
MOST_VALIDATED = 64


def check_loader_settings(ctx: DistributedContext, config: TrainConfig, hyp: Hyperparameters) -> None:
    """Raises UserError for what no data set could be loaded with, before one is read."""
    if config.batch_size != FIND_BATCH_SIZE:  # then it will be found as the processes can share it out
        check_batch_size(ctx, config.batch_size, quad=config.quad)
    check_rendering(config.render_on, config.cache, hyp)
    if config.cache == "disk":
        require_package("lmdb", "--cache disk", "use --cache ram")
    if hyp.albumentations:
        PixelTransforms(hyp.albumentations, config.seed)  # which checks them


def build_loaders(
    ctx: DistributedContext, config: TrainConfig, hyp: Hyperparameters, spec: DatasetSpec, *, stride: int
) -> tuple[InfiniteDataLoader, InfiniteDataLoader]:
    """For training and for validation. ``stride``: the model's largest."""
    shared = {
        "ctx": ctx,
        "imgsz": config.imgsz,
        "stride": stride,
        "hyp": hyp,
        "seed": config.seed,
        "epochs": config.epochs,
        "single_cls": config.single_cls,
        "cache": config.cache,
        "render_on": config.render_on,
        "fuse": not config.deterministic,
        "cache_dir": config.cache_dir,
        "local_data": bool(config.stage),
        "workers": loader_workers(config.workers, ctx.local_world_size),
        "max_bad": config.max_bad,
        "verify": config.verify,
        "pin_memory": ctx.device.type == "cuda",
    }
    train_loader, _ = create_dataloader(
        spec,
        "train",
        batch_size=config.batch_size,
        augment=True,
        rect=config.rect,
        image_weights=config.image_weights,
        quad=config.quad,
        multi_scale=config.multi_scale,
        **shared,
    )
    # Whole batches are dealt out to the ranks: their size must not depend on how many there are.
    at_once = min(config.batch_size, MOST_VALIDATED)
    val_loader, _ = create_dataloader(spec, "val", batch_size=at_once, augment=False, rect=True, **shared)
    if ctx.is_main:
        _warn_of_shared_images(spec, train_loader.index, val_loader.index)
    return train_loader, val_loader


def _warn_of_shared_images(spec: DatasetSpec, train: DatasetIndex, val: DatasetIndex) -> None:
    """Says when images are both trained and validated on: the scores then tell nothing about other images."""
    folders = [frozenset(map(os.path.realpath, spec.split(split).images)) for split in ("train", "val")]
    of_val = set(val.paths)
    shared = len(of_val) if folders[0] == folders[1] else sum(path in of_val for path in train.paths)
    if shared:
        get_logger().warning(
            "%s: %s of the %s validation images are training images too; scores say little about other images",
            spec.source, f"{shared:,}" if shared < len(of_val) else "all", f"{len(of_val):,}",
        )  # fmt: skip
