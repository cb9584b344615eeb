"""Chooses the settings that a command may leave open, once data and model are known.

`choose_flips`, `choose_batch_size` and `choose_remaining` fill in the settings of the run, so that settings.yaml,
checkpoints, trackers and callbacks contain all choices. A run that continues uses those in its checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from data.loading.build import build_train_sampler
from data.loading.sampler import KeyedDistributedSampler
from data.samples.dataset import AugmentedImages
from engine.assembly.batch_size import BatchSearch, batch_that_fits
from engine.assembly.run_checks import check_batch_size
from engine.assembly.weights_probe import WeightsProbe
from engine.optim.build import SHORT_RUN, resolve_optimizer
from engine.optim.schedule import StepPlan, step_plan
from models.detector import Detector
from models.losses.base import Criterion
from utils.config.settings import FIND_BATCH_SIZE, Hyperparameters, RunSettings, TrainConfig
from utils.distributed.context import DistributedContext
from utils.logger import get_logger
from utils.mirrored_classes import mirrored_classes
from utils.strings import listed


class ChosenSettings(NamedTuple):
    """The settings of a run, of which none is left open."""

    settings: RunSettings
    optimizer_reason: str  # why this optimizer was chosen; "": the settings named it


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


def choose_batch_size(
    ctx: DistributedContext, settings: RunSettings, model: Detector, criterion: Criterion, samples: AugmentedImages
) -> RunSettings:
    """Chooses the largest batch size that fits on the GPUs and suits the data set, for ``--batch-size -1``."""
    if settings.config.batch_size != FIND_BATCH_SIZE:
        return settings

    def build_sampler(config: TrainConfig) -> KeyedDistributedSampler:
        return build_train_sampler(ctx, config, settings.hyp, samples, stride=model.stride)

    def plan_steps(config: TrainConfig) -> StepPlan:
        return step_plan(config, epoch_batches=len(build_sampler(config)))

    search = BatchSearch(
        ctx=ctx,
        settings=settings,
        model=model,
        criterion=criterion,
        plan_steps=plan_steps,
        pixels=samples.sample_index.pixels,
    )
    batch_size = batch_that_fits(search, epoch_samples=len(build_sampler(settings.config).order))
    config = replace(settings.config, batch_size=batch_size)
    check_batch_size(ctx, config)
    return replace(settings, config=config)


def choose_remaining(settings: RunSettings, probe: WeightsProbe | None, steps: StepPlan) -> ChosenSettings:
    """Chooses the optimizer and ``lr_mult``, which depend on the planned steps. The settings do not change
    afterwards.

    ``probe``: that of the weights; None for a run that needs none.
    """
    reason = _reason_for_auto(steps) if settings.config.optimizer == "auto" else ""
    config = replace(settings.config, optimizer=resolve_optimizer(settings.config.optimizer, steps.planned_steps))
    lr_mult = settings.hyp.lr_mult
    if lr_mult is None:
        lr_mult = 1.0 if probe is None else probe.choose_lr_mult(config, steps)
    return ChosenSettings(replace(settings, config=config, hyp=replace(settings.hyp, lr_mult=lr_mult)), reason)


def _reason_for_auto(steps: StepPlan) -> str:
    """Returns why ``--optimizer auto`` chooses as it does, see `resolve_optimizer`."""
    if steps.is_timed:
        return "auto: --time leaves the number of steps open"
    length = "at most" if steps.total <= SHORT_RUN else "more than"
    return f"auto: {length} {SHORT_RUN:,} steps"
