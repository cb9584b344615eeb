"""Finds settings of a run, other than the defaults, that have no effect in it, and the reasons."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from engine.optim.schedule import step_plan
from models.heads.base import DetectionHead
from utils.config.epochs import closing_epochs
from utils.config.flags import as_flag, flag_name
from utils.config.settings import ALL_RANKS, RunSettings, changed_settings
from utils.distributed.context import DistributedContext
from utils.logger import get_logger
from utils.strings import counted

COLOR_SETTINGS = ("hsv_h", "hsv_s", "hsv_v")
MIXING_SETTINGS = ("mosaic", "mixup")
WARMUP_SETTINGS = ("warmup_momentum", "warmup_bias_lr")
TILE_SETTINGS = ("tile_visibility", "tile_backgrounds")


@dataclass(frozen=True)
class SettingRule:
    """A setting, whether it has no effect in a run, and the reason."""

    setting: str
    is_unused: bool
    reason: str  # follows "--flag does nothing: "; one that begins with "without" needs no colon


@dataclass(frozen=True)
class RuleContext:
    """The properties of a run that the rules depend on."""

    ctx: DistributedContext
    settings: RunSettings
    head: DetectionHead
    channels: int  # per image
    tile: int  # side of the tiles of the data set's images, pixels; 0: whole images

    @property
    def epochs(self) -> float:
        """Number of epochs; infinite if ``--time`` decides it."""
        config = self.settings.config
        return math.inf if config.time else config.epochs

    @property
    def last_early_validation(self) -> float:
        """The last epoch before the end of the run that is validated; 0: there is none."""
        val_every = self.settings.config.val_every
        if val_every == 0:
            return 0
        if math.isinf(self.epochs):
            return math.inf
        return (self.epochs - 1) // val_every * val_every

    @property
    def mixes_images(self) -> bool:
        """True if some training images are made of several."""
        settings = self.settings
        return not settings.config.rect and any(getattr(settings.hyp, name) > 0 for name in MIXING_SETTINGS)


def warn_of_unused_settings(
    ctx: DistributedContext, settings: RunSettings, head: DetectionHead, *, channels: int, tile: int
) -> None:
    """Logs a warning for each of `unused_settings`."""
    if ctx.is_main:
        for line in unused_settings(ctx, settings, head, channels=channels, tile=tile):
            get_logger().warning("%s", line)


def unused_settings(
    ctx: DistributedContext, settings: RunSettings, head: DetectionHead, *, channels: int = 3, tile: int = 0
) -> list[str]:
    """Returns a line for each setting that differs from its default and has no effect in this run. ``channels``,
    ``tile``: see `RuleContext`."""
    context = RuleContext(ctx, settings, head, channels, tile)
    changed = _changed_flags(settings)
    reasons: dict[str, str] = {}
    for rule in (
        *_loss_rules(context),
        *_augmentation_rules(context),
        *_process_rules(context),
        *_schedule_rules(context),
    ):
        if rule.is_unused and rule.setting in changed:
            reasons.setdefault(rule.setting, rule.reason)
    lines = []
    for setting, reason in reasons.items():
        separator = " " if reason.startswith("without ") else ": "
        lines.append(f"{changed[setting]} does nothing{separator}{reason}")
    return lines + _shortened_settings(context)


def _changed_flags(settings: RunSettings) -> dict[str, str]:
    """Returns the flags of the settings that differ from the defaults, by the name of the setting."""
    flags = {name: f"--set {name}" for name in settings.overridden}
    for name, value in changed_settings(settings.config).items():
        flags[name] = flag_name(name) if value == ALL_RANKS else as_flag(name, value)
    return flags


def _loss_rules(context: RuleContext) -> Iterator[SettingRule]:
    """Yields the rules of settings of the loss and the model."""
    config = context.settings.config
    head = context.head
    for name in sorted(head.unused_hyperparameters):
        yield SettingRule(name, True, "the model's loss does not use it")
    yield SettingRule("one2one", not head.is_dual, "the model's loss does not use it")
    yield SettingRule("distill", not (config.keep_old or config.teacher), "without --teacher or --keep-old")
    yield SettingRule("cls_pw", head.num_classes == 1, "the model has one class")
    yield SettingRule("autoanchor", head.anchors is None, "the model has no anchors")


def _augmentation_rules(context: RuleContext) -> Iterator[SettingRule]:
    """Yields the rules of settings of augmentations and tiles."""
    config = context.settings.config
    hyp = context.settings.hyp
    for name in COLOR_SETTINGS:
        yield SettingRule(name, context.channels != 3, "images without three channels have no color")
    for name in MIXING_SETTINGS:
        yield SettingRule(name, config.rect and getattr(hyp, name) > 0, "--rect leaves mosaic and mixup out")
    yield SettingRule("mosaic_block", not context.mixes_images, "no image is made of several")
    yield SettingRule(
        "close_mosaic", not context.mixes_images and not context.head.refines, "there is no mosaic or mixup"
    )
    yield SettingRule("close_scale", hyp.scale == 0, "scale is 0")
    for name in TILE_SETTINGS:
        yield SettingRule(name, not context.tile, "the data set's YAML has no 'tile'")


def _process_rules(context: RuleContext) -> Iterator[SettingRule]:
    """Yields the rules of settings that matter with several processes."""
    config = context.settings.config
    ranks = context.ctx.world_size
    yield SettingRule("spawn", config.spawn == 1, "one process trains anyway")
    yield SettingRule(
        "eval_ranks", context.last_early_validation == 0, "the training processes validate after the last epoch"
    )
    yield SettingRule(
        "eval_ranks", config.patience == 1, "--patience 1 needs the result of every epoch before the next"
    )
    yield SettingRule("sync_bn", ranks == 1, "one process sees the whole batch")
    yield SettingRule("sync_bn", config.sync_bn == 1, "each process has its own statistics anyway")
    yield SettingRule("zero", ranks == 1, "one process holds the whole state of the optimizer")
    is_one_shard = config.virtual_ranks == 1 and ranks == 1
    yield SettingRule("virtual_ranks", is_one_shard, "one process processes whole batches anyway")
    is_one_each = config.virtual_ranks == ranks and config.deterministic
    yield SettingRule("virtual_ranks", is_one_each, "--deterministic cuts batches by process anyway")


def _schedule_rules(context: RuleContext) -> Iterator[SettingRule]:
    """Yields the rules of settings of the schedule: epochs, rates, validation and saves."""
    config = context.settings.config
    hyp = context.settings.hyp
    length = counted(config.epochs, "epoch")
    yield SettingRule("lr_mult", not config.weights, "without --weights")
    for name in WARMUP_SETTINGS:
        yield SettingRule(name, hyp.warmup_epochs == 0, "warmup_epochs is 0")
    is_one_batch = step_plan(config, epoch_batches=1).accumulate == 1
    yield SettingRule("nominal_batch", is_one_batch, f"rounds to one batch of {counted(config.batch_size, 'image')}")
    yield SettingRule("cos_lr", hyp.lrf == 1, "lrf 1 keeps the learning rate where it is")
    yield SettingRule("patience", config.val_every == 0, "--val-every 0 validates after the last epoch only")
    longest_wait = context.last_early_validation - config.val_every  # the best epoch is the first validated one
    validated = length if config.val_every == 1 else f"{length}, validated every {config.val_every}"
    yield SettingRule("patience", config.patience > longest_wait, f"the run has {validated}")
    yield SettingRule("save_period", config.save_period > context.epochs, f"the run has {length}")


def _shortened_settings(context: RuleContext) -> list[str]:
    """Returns a line for each setting whose effect a short run shortens or removes."""
    config = context.settings.config
    hyp = context.settings.hyp
    lines = []
    closing = closing_epochs(hyp.close_mosaic, config.epochs)
    if context.mixes_images and context.epochs <= closing:
        length = counted(config.epochs, "epoch")
        lines.append(f"mosaic and mixup do nothing: close_mosaic is {closing} and the run has {length}")
    if "warmup_epochs" in context.settings.overridden and hyp.warmup_epochs > context.epochs / 4:
        lines.append(
            f"--set warmup_epochs={hyp.warmup_epochs:g} is shortened: the warm-up takes at most a quarter of the run, "
            f"here {context.epochs / 4:g} epochs"
        )
    return lines
