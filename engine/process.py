"""What each process of a run sets up before it trains: the log, threads and kernels; and settings without effect."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch

from engine.parallel.ddp import resolve_virtual_ranks
from models.heads.base import DetectionHead
from utils.config.settings import (
    ALL_RANKS,
    Hyperparameters,
    TrainConfig,
    changed_settings,
    closing_epochs,
)
from utils.distributed.context import DistributedContext
from utils.logger import configure_logging, get_logger
from utils.strings import counted


def prepare_process(
    ctx: DistributedContext, config: TrainConfig, hyp: Hyperparameters, lines: Sequence[str] = ()
) -> None:
    """Sets up logging, threads and determinism, and logs ``lines`` and the settings that differ from the defaults."""
    configure_logging(ctx.is_main, file_follows=True)
    if config.threads or (resolve_virtual_ranks(ctx, config) and ctx.device.type == "cpu"):
        # How many threads share a sum decides its rounding, so every number of processes must use as many.
        torch.set_num_threads(config.threads or 1)
    choose_kernels(config)
    log = get_logger()
    for line in lines:
        log.info("%s", line)
    log.info("%s on %s, torch %s", counted(ctx.world_size, "process"), ctx.device, torch.__version__)
    changed = [changed_settings(config), changed_settings(hyp)]
    changed[0].pop("override", None)  # is in the hyper-parameters
    lists = [", ".join(f"{k}={'null' if v is None else v}" for k, v in part.items()) or "defaults" for part in changed]
    log.info("settings: %s; hyper-parameters: %s", *lists)


def unused_settings(
    ctx: DistributedContext,
    config: TrainConfig,
    hyp: Hyperparameters,
    head: DetectionHead,
    *,
    channels: int = 3,
    tile: int = 0,
) -> list[str]:
    """A line for each given setting that has no effect in this run. ``tile``: see `DatasetSpec`."""
    ranks = ctx.world_size
    given = {item.partition("=")[0].strip() for item in config.override}
    length, batch = counted(config.epochs, "epoch"), counted(config.batch_size, "image")
    epochs = math.inf if config.time else config.epochs
    mixes = not config.rect and (hyp.mosaic > 0 or hyp.mixup > 0)
    virtual = config.virtual_ranks
    rules: list[tuple[str, bool, str]] = [  # a setting, whether it has no effect, and why; the first rule that holds
        *((name, True, "the model's loss does not use it") for name in sorted(head.unused_hyperparameters)),
        *((name, channels != 3, "images without three channels have no color") for name in ("hsv_h", "hsv_s", "hsv_v")),
        ("lr_mult", not config.weights, "without --weights"),
        ("distill", not (config.keep_old or config.teacher), "without --teacher or --keep-old"),
        ("cls_pw", head.num_classes == 1, "the model has one class"),
        ("warmup_momentum", hyp.warmup_epochs == 0, "warmup_epochs is 0"),
        ("warmup_bias_lr", hyp.warmup_epochs == 0, "warmup_epochs is 0"),
        ("mosaic", config.rect and hyp.mosaic > 0, "--rect leaves mosaic and mixup out"),
        ("mixup", config.rect and hyp.mixup > 0, "--rect leaves mosaic and mixup out"),
        ("mosaic_block", not mixes, "no image is made of several"),
        ("close_mosaic", not mixes and not head.refines, "there is no mosaic or mixup"),
        ("close_scale", hyp.scale == 0, "scale is 0"),
        ("tile_visibility", not tile, "the data set's YAML has no 'tile'"),
        ("tile_backgrounds", not tile, "the data set's YAML has no 'tile'"),
        ("tile_backgrounds", config.image_weights, "--image-weights chooses how often tiles are seen"),
        ("spawn", config.spawn == 1, "one process trains anyway"),
        ("eval_ranks", epochs == 1 or config.val_every == 0, "the training processes validate after the last epoch"),
        ("eval_ranks", config.patience == 1, "--patience 1 needs the result of every epoch before the next"),
        ("sync_bn", ranks == 1, "one process sees the whole batch"),
        ("sync_bn", config.sync_bn == 1, "each process has its own statistics anyway"),
        ("zero", ranks == 1, "one process holds the whole state of the optimizer"),
        ("virtual_ranks", virtual == ranks == 1, "one process processes whole batches anyway"),
        ("virtual_ranks", virtual == ranks and config.deterministic, "--deterministic cuts batches by process anyway"),
        ("nominal_batch", round(config.nominal_batch / config.batch_size) <= 1, f"a batch has {batch} already"),
        ("cos_lr", hyp.lrf == 1, "lrf 1 keeps the learning rate where it is"),
        ("patience", config.patience >= epochs, f"the run has {length}"),
        ("patience", config.val_every == 0, "--val-every 0 validates after the last epoch only"),
        ("save_period", config.save_period > epochs, f"the run has {length}"),
        ("noautoanchor", head.anchors is None, "the model has no anchors"),
    ]
    shown = {name: f"--set {name}" for name in given}
    for name, value in changed_settings(config).items():
        shown[name] = f"--{name.replace('_', '-')}" + ("" if value is True or value == ALL_RANKS else f" {value}")
    reasons = {name: why for name, is_unused, why in reversed(rules) if is_unused and name in shown}
    lines = [
        f"{shown[name]} does nothing{' ' if why.startswith('without ') else ': '}{why}" for name, why in reasons.items()
    ]
    closing = closing_epochs(hyp.close_mosaic, config.epochs)
    if mixes and epochs <= closing:
        lines.append(f"mosaic and mixup do nothing: close_mosaic is {closing} and the run has {length}")
    if "warmup_epochs" in given and hyp.warmup_epochs > epochs / 4:
        lines.append(
            f"--set warmup_epochs={hyp.warmup_epochs:g} is cut: the warm-up takes at most a quarter of the run, here "
            f"{epochs / 4:g} epochs"
        )
    return lines


def choose_kernels(config: TrainConfig) -> None:
    """Deterministic kernels with ``--deterministic``."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it, or refuses matrix products
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # which nothing here reads; it takes time
