"""Checks a run's loader settings before its data is read, and afterwards that all processes have read the same data."""

from __future__ import annotations

from data.index.index import DatasetIndex, digest_of_arrays
from data.render.user_transforms import UserTransforms
from utils.config.settings import Hyperparameters, TrainConfig
from utils.distributed.agreement import check_agreement
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.machine.packages import require_package
from utils.strings import counted


def check_loader_settings(config: TrainConfig, hyp: Hyperparameters) -> None:
    """Raises UserError for settings that are wrong for every data set and batch size. Reads no data."""
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
    """Raises UserError if a batch, whose size must be known, cannot be divided among the processes."""
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
