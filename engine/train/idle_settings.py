"""Settings that are given and have no effect on a run. Each gets a line in the log."""

from __future__ import annotations

import math
from collections.abc import Iterator

from models.heads.base import DetectionHead
from utils.config.settings import Hyperparameters, TrainConfig, closing_epochs
from utils.distributed.context import DistributedContext
from utils.strings import counted


def idle_settings(ctx: DistributedContext, config: TrainConfig, hyp: Hyperparameters) -> list[str]:
    """A line for each setting that is not at its default and has no effect on these processes."""
    asked = {item.partition("=")[0].strip() for item in config.override}
    found = [*_idle_on_one_process(ctx, config), *_idle_in_steps(config), *_idle_in_epochs(config, hyp)]
    return [*found, *_idle_in_pictures(config, hyp, asked), *_idle_rates(config, hyp, asked)]


def idle_on_head(head: DetectionHead, config: TrainConfig, hyp: Hyperparameters) -> list[str]:
    """As `idle_settings`, for settings that have no effect with this head."""
    asked, unused = [item.partition("=")[0].strip() for item in config.override], head.unused_hyperparameters
    lines = [f"--set {name} does nothing: the model's loss does not use it" for name in asked if name in unused]
    if config.noautoanchor and head.anchors is None:
        lines.append("--noautoanchor does nothing: the model has no anchors")
    if "close_mosaic" in asked and not head.refines and (config.rect or not (hyp.mosaic or hyp.mixup)):
        lines.append("--set close_mosaic does nothing: there is no mosaic or mixup")
    return lines


def _idle_on_one_process(ctx: DistributedContext, config: TrainConfig) -> Iterator[str]:
    if config.spawn == 1:
        yield "--spawn 1 does nothing: one process trains anyway"
    if config.sync_bn and 0 < config.sync_bn_group < ctx.world_size:
        yield f"--sync-bn does nothing: --sync-bn-group {config.sync_bn_group} says over which processes"
    if ctx.world_size > 1:
        if config.sync_bn_group == 1:
            yield "--sync-bn-group 1 does nothing: each process has its own statistics anyway"
        if config.deterministic and config.virtual_ranks == ctx.world_size:
            yield f"--virtual-ranks {config.virtual_ranks} does nothing: --deterministic cuts batches by process anyway"
        return
    if config.zero:
        yield "--zero does nothing: one process holds the whole state of the optimizer"
    if config.sync_bn or config.sync_bn_group:
        yield "--sync-bn does nothing: one process sees the whole batch"
    if config.virtual_ranks == 1:
        yield "--virtual-ranks 1 does nothing: one process processes whole batches anyway"


def _idle_in_steps(config: TrainConfig) -> Iterator[str]:
    accumulate, nominal = f"--accumulate {config.accumulate}", f"--nominal-batch {config.nominal_batch}"
    if not config.nominal_batch:
        return
    by_nominal = round(config.nominal_batch / config.batch_size)
    if by_nominal <= 1 and config.accumulate == 1:
        yield f"{nominal} does nothing: a batch has {counted(config.batch_size, 'image')} already"
    elif config.accumulate >= by_nominal:
        yield f"{nominal} does nothing: {accumulate} is as much or more"
    elif config.accumulate > 1:
        yield f"{accumulate} does nothing: {nominal} makes it {by_nominal}"


def _idle_in_epochs(config: TrainConfig, hyp: Hyperparameters) -> Iterator[str]:
    closing, length = closing_epochs(hyp.close_mosaic, config.epochs), counted(config.epochs, "epoch")
    epochs = math.inf if config.time else config.epochs
    if epochs <= closing and (hyp.mosaic or hyp.mixup) and not config.rect:
        yield f"mosaic and mixup do nothing: close_mosaic is {closing} and the run has {length}"
    if config.save_period > epochs:
        yield f"--save-period {config.save_period} does nothing: the run has {length}"
    if config.patience >= epochs:
        yield f"--patience {config.patience} does nothing: the run has {length}"
    elif config.min_gain and not config.patience:
        yield f"--min-gain {config.min_gain:g} does nothing without --patience"
    elif config.patience and config.val_every == 0:
        yield f"--patience {config.patience} does nothing: --val-every 0 validates after the last epoch only"
    if config.tracker_weights and not config.tracker:
        yield "--tracker-weights does nothing without --tracker"


def _idle_in_pictures(config: TrainConfig, hyp: Hyperparameters, asked: set[str]) -> Iterator[str]:
    by_hand = sorted(asked & {"mosaic", "mixup"})
    if config.rect and any(getattr(hyp, name) for name in by_hand):
        yield f"--set {by_hand[0]} does nothing: --rect leaves mosaic and mixup out"
    if "close_scale" in asked and not hyp.scale:
        yield "--set close_scale does nothing: scale is 0"
    if "multi_scale_range" in asked and not config.multi_scale:
        yield "--set multi_scale_range does nothing without --multi-scale"
    if "mosaic_block" in asked and (config.rect or not (hyp.mosaic or hyp.mixup)):
        yield "--set mosaic_block does nothing: no picture is made of several"


def _idle_rates(config: TrainConfig, hyp: Hyperparameters, asked: set[str]) -> Iterator[str]:
    if "lr_mult" in asked and not config.weights:
        yield "--set lr_mult does nothing without --weights"
    if config.cos_lr and hyp.lrf == 1:
        yield "--cos-lr does nothing: lrf 1 keeps the learning rate where it is"
    if "warmup_epochs" in asked and hyp.warmup_epochs > config.epochs / 4 and not config.time:
        yield (
            f"--set warmup_epochs={hyp.warmup_epochs:g} is cut: the warm-up takes at most a quarter of the run, here "
            f"{config.epochs / 4:g} epochs"
        )
    for name in ("warmup_momentum", "warmup_bias_lr"):
        if name in asked and hyp.warmup_epochs == 0:
            yield f"--set {name} does nothing: warmup_epochs is 0"
