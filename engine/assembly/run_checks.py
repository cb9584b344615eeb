"""Refuses a run before it has a folder: settings that exclude each other, a model that cannot be trained with them,
data that cannot be scored."""

from __future__ import annotations

from data.index.index import DatasetIndex
from data.index.shared_images import warn_of_shared_images
from data.loading.checks import check_loader_settings, check_shards
from engine.assembly.batch_size import check_batch_search
from engine.assembly.build_step import check_step_settings
from engine.assembly.process_setup import check_kernels
from engine.assembly.run_data import RunData
from engine.export.options import require_packages
from engine.issues.small_boxes import warn_of_small_boxes
from engine.run.run import RunSettings
from engine.train.validation import check_eval_ranks
from models.detector import Detector
from utils.config.settings import FIND_BATCH_SIZE, TrainConfig
from utils.distributed.context import DistributedContext


def check_settings(ctx: DistributedContext, settings: RunSettings) -> None:
    """Raises UserError for what the settings and the processes alone rule out: at once, not after hours of copying or
    scanning images."""
    config = settings.config
    if config.export and ctx.is_main:
        require_packages(config.export)
    check_batch_size(ctx, config)
    check_step_settings(ctx, config)
    check_eval_ranks(ctx, config)
    check_loader_settings(config, settings.hyp)


def check_batch_size(ctx: DistributedContext, config: TrainConfig) -> None:
    """Raises UserError for a batch size that these processes cannot have, or for which they cannot search."""
    if config.batch_size == FIND_BATCH_SIZE:
        check_batch_search(ctx, config)
    else:
        check_shards(ctx, config)


def check_model(ctx: DistributedContext, settings: RunSettings, model: Detector, data: RunData) -> None:
    """Raises UserError for layers that the settings rule out, and for a model that cannot learn from its teacher."""
    check_kernels(settings.config, model, ctx.device)
    if data.teacher is not None:
        data.teacher.check(data.spec, model)


def check_splits(
    ctx: DistributedContext, data: RunData, train: DatasetIndex, val: DatasetIndex, *, imgsz: int, stride: int
) -> None:
    """Raises UserError if the validation split has no objects for ``--fitness``. Warns about data that would spoil the
    result."""
    data.fitness.check_objects(val.ground_truth())
    if ctx.is_main:
        warn_of_shared_images(data.spec, train, val)
        warn_of_small_boxes(train, imgsz=imgsz, stride=stride)
