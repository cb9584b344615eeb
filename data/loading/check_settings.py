"""Checks what a run's loaders are asked for, before and after its data is read."""

from __future__ import annotations

import os
from collections.abc import Iterator

from data.index.index import DatasetIndex
from data.render.user_transforms import UserTransforms
from data.source.dataset_spec import DatasetSpec
from utils.config.settings import Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.paths import path_of
from utils.logger import get_logger
from utils.machine.packages import require_package
from utils.strings import counted


def check_loader_settings(ctx: DistributedContext, config: TrainConfig, hyp: Hyperparameters) -> None:
    """Raises UserError for settings that are wrong with any data set and batch size. Reads no data."""
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
        UserTransforms(hyp.albumentations, config.seed)  # raises UserError if they are wrong


def check_shards(ctx: DistributedContext, config: TrainConfig) -> None:
    """Raises UserError for a batch size, a known one, whose images cannot be divided among the processes."""
    shards = ctx.world_size // config.pipeline
    batch_size = config.batch_size
    processes = counted(shards, "process") if config.pipeline == 1 else f"{counted(shards, 'pair')} of processes"
    if batch_size < shards:
        raise UserError(
            f"--batch-size {batch_size}: is the total over {processes}, and each needs at least one image; use "
            f"{shards} or more"
        )
    if config.quad and batch_size % (4 * shards):
        raise UserError(f"--quad with --batch-size {batch_size} on {processes}: needs a multiple of {4 * shards}")


def warn_of_shared_images(spec: DatasetSpec, train: DatasetIndex, val: DatasetIndex) -> None:
    """Warns about images that are in both splits."""
    if spec.held_out:
        return
    val_paths = set(_real_paths(val))
    shared = len(val_paths.intersection(_real_paths(train)))
    if shared:
        count = f"{shared:,}" if shared < len(val_paths) else "all"
        message = "%s: %s of the %s validation images are training images too; scores say little about other images"
        get_logger().warning(message, spec.source, count, f"{len(val_paths):,}")


def _real_paths(index: DatasetIndex) -> Iterator[str]:
    """Yields the path of each image, with symbolic links to folders followed, but not those to images."""
    real_folders: dict[str, str] = {}
    for path in index.paths:
        folder, _, name = path.rpartition("/")
        if folder not in real_folders:
            real_folders[folder] = os.path.realpath(path_of(folder, index.root))
        yield f"{real_folders[folder]}/{name}"
