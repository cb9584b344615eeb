"""Chooses the settings that a command may leave open, once data and model are known, so that settings.yaml,
checkpoints, trackers and callbacks contain all choices. A run that continues has those in its checkpoint. The largest
batch size is found by batch_size.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.optim.build import SHORT_RUN, resolve_optimizer
from engine.optim.schedule import StepPlan
from engine.train.lr_probe import WeightsProbe
from utils.config.settings import Hyperparameters, RunSettings
from utils.distributed.context import DistributedContext
from utils.logger import get_logger
from utils.mirrored_classes import mirrored_classes
from utils.strings import listed


def choose_flips(ctx: DistributedContext, settings: RunSettings, names: Sequence[str]) -> RunSettings:
    """Turns ``fliplr`` off if a mirrored image exchanges two of the classes ``names``, such as "left arrow" and "right
    arrow", and it has its default, unless ``--set`` gives that. Logs this, and a warning of flips that stay on."""
    for flip in ("fliplr", "flipud"):
        pairs = mirrored_classes(names, flip)
        probability = getattr(settings.hyp, flip)
        if not pairs or probability == 0:
            continue
        exchanged = listed([f"'{one}' and '{other}'" for one, other in pairs], 1)
        reason = f"a flipped image exchanges the classes {exchanged}"
        if probability == getattr(Hyperparameters, flip) and flip not in settings.overridden:
            off: dict[str, Any] = {flip: 0.0}
            settings = replace(settings, hyp=replace(settings.hyp, **off))
            get_logger().info("%s is turned off: %s; --set %s=%g turns it on", flip, reason, flip, probability)
        elif ctx.is_main:
            get_logger().warning("%s is %g, but %s; --set %s=0 turns it off", flip, probability, reason, flip)
    return settings


def choose_optimizer(settings: RunSettings, steps: StepPlan) -> tuple[RunSettings, str]:
    """Chooses the optimizer, which depends on the planned steps. Also returns why, for the log; "" if the settings name
    it."""
    if settings.config.optimizer != "auto":
        return settings, ""
    if steps.is_timed:
        reason = "auto: --time leaves the number of steps open"
    else:
        reason = f"auto: {'at most' if steps.total <= SHORT_RUN else 'more than'} {SHORT_RUN:,} steps"
    optimizer = resolve_optimizer("auto", steps.planned_steps)
    return replace(settings, config=replace(settings.config, optimizer=optimizer)), reason


def choose_lr_mult(settings: RunSettings, steps: StepPlan, probe: WeightsProbe | None) -> RunSettings:
    """Chooses ``lr_mult`` by the ``probe`` of the weights; None for a run that needs none."""
    if settings.hyp.lr_mult is not None:
        return settings
    lr_mult = 1.0 if probe is None else probe.choose_lr_mult(settings.config, steps)
    return replace(settings, hyp=replace(settings.hyp, lr_mult=lr_mult))
