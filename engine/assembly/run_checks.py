"""Rejects settings that exclude each other, or that these processes do not support, before any file is opened."""

from __future__ import annotations

from data.loading.build import check_loader_settings, check_shards
from engine.assembly.batch_size import check_batch_search
from engine.assembly.build_step import check_step_settings
from engine.export.formats import require_packages
from engine.run.run import RunSettings
from engine.train.validation import check_eval_ranks
from utils.config.settings import FIND_BATCH_SIZE, TrainConfig
from utils.distributed.context import DistributedContext


def check_settings(ctx: DistributedContext, settings: RunSettings) -> None:
    """Raises UserError for settings that conflict with each other or with the processes. Needs no data, so a mistake
    does not surface after hours of copying or scanning images."""
    config = settings.config
    if config.export and ctx.is_main:
        require_packages(config.export)
    check_batch_size(ctx, config)
    check_step_settings(ctx, config)
    check_eval_ranks(ctx, config)
    check_loader_settings(config, settings.hyp)


def check_batch_size(ctx: DistributedContext, config: TrainConfig) -> None:
    """Raises UserError for a batch size that these processes cannot use, or cannot search for."""
    if config.batch_size == FIND_BATCH_SIZE:
        check_batch_search(ctx)
    else:
        check_shards(ctx, config)
