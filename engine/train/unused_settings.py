"""Warns of settings of a run, other than the defaults, that have no effect in it: one table."""

from __future__ import annotations

import math

from engine.optim.schedule import step_plan
from models.detector import Detector
from utils.config.epochs import closing_epochs, last_early_validation
from utils.config.flags import as_flag, flag_name
from utils.config.settings import ALL_RANKS, RunSettings, changed_settings
from utils.distributed.context import DistributedContext
from utils.strings import counted


def unused_settings(ctx: DistributedContext, settings: RunSettings, model: Detector, *, tile: int) -> list[str]:
    """Returns a line for each setting that differs from its default and has no effect in this run, or less.

    ``tile``: side of the tiles of the data set's images, pixels; 0: whole images.
    """
    config = settings.config
    hyp = settings.hyp
    head = model.head
    ranks = ctx.world_size
    epochs = math.inf if config.time else config.epochs
    length = counted(config.epochs, "epoch")
    mixes_images = not config.rect and (hyp.mosaic > 0 or hyp.mixup > 0)
    early = last_early_validation(epochs, config.val_every)
    # Settings, whether they have no effect, and the reason, which follows "does nothing".
    table: list[tuple[str, bool, str]] = [
        (" ".join(sorted(head.unused_hyperparameters)), True, ": the model's loss does not use it"),
        ("one2one", not head.is_dual, ": the model's loss does not use it"),
        ("distill", not (config.keep_old or config.teacher), " without --teacher or --keep-old"),
        ("cls_pw", head.num_classes == 1, ": the model has one class"),
        ("autoanchor", head.anchors is None, ": the model has no anchors"),
        ("hsv_h hsv_s hsv_v", model.channels != 3, ": images without three channels have no color"),
        ("mosaic", config.rect and hyp.mosaic > 0, ": --rect leaves mosaic and mixup out"),
        ("mixup", config.rect and hyp.mixup > 0, ": --rect leaves mosaic and mixup out"),
        ("mosaic_block", not mixes_images, ": no image is made of several"),
        ("close_mosaic", not mixes_images and not head.refines, ": there is no mosaic or mixup"),
        ("close_scale", hyp.scale == 0, ": scale is 0"),
        ("tile_visibility tile_backgrounds", not tile, ": the data set's YAML has no 'tile'"),
        ("spawn", config.spawn == 1, ": one process trains anyway"),
        ("eval_ranks", early == 0 or config.patience == 1, ": the training processes wait for every validation"),
        ("sync_bn", ranks == 1 or config.sync_bn == 1, ": each process has its own statistics anyway"),
        ("zero", ranks == 1, ": one process holds the whole state of the optimizer"),
        ("virtual_ranks", config.virtual_ranks == ranks == 1, ": one process processes whole batches anyway"),
        ("lr_mult", not config.weights, " without --weights"),
        ("warmup_momentum warmup_bias_lr", hyp.warmup_epochs == 0, ": warmup_epochs is 0"),
        ("nominal_batch", step_plan(config, epoch_batches=1).accumulate == 1, ": rounds to one batch"),
        ("cos_lr", hyp.lrf == 1, ": lrf 1 keeps the learning rate where it is"),
        ("patience", config.patience > early - config.val_every, ": no validation comes so late in the run"),
        ("save_period", config.save_period > epochs, f": the run has {length}"),
    ]
    flags = {name: f"--set {name}" for name in settings.overridden}
    for name, value in changed_settings(config).items():
        flags[name] = flag_name(name) if value == ALL_RANKS else as_flag(name, value)
    lines = [
        f"{flags[name]} does nothing{reason}"
        for names, is_unused, reason in table
        for name in names.split()
        if is_unused and name in flags
    ]
    closing = closing_epochs(hyp.close_mosaic, config.epochs)
    if mixes_images and epochs <= closing:
        lines.append(f"mosaic and mixup do nothing: close_mosaic is {closing} and the run has {length}")
    if "warmup_epochs" in settings.overridden and hyp.warmup_epochs > epochs / 4:
        lines.append(f"--set warmup_epochs={hyp.warmup_epochs:g} is shortened to a quarter of the run")
    return lines
