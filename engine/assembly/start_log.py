"""Logs the optimizer, its learning rates and the number of steps before the first step of a run."""

from __future__ import annotations

import torch

from engine.optim.build import RULES, SHORT_RUN
from engine.optim.schedule import StepPlan, few_steps_warning
from engine.run.run import ContinuedRun, Remaining, RunPlan, RunSettings
from engine.train.step import TrainStep
from utils.logger import get_logger
from utils.strings import counted


def log_start(plan: RunPlan, settings: RunSettings, step: TrainStep, steps: StepPlan) -> None:
    """Logs the optimizer and its rates with the reasons for them, the number and size of steps, and that the training
    starts. Warns of a run with too few steps for a good detector, unless ``--time`` decides their number. Logs nothing
    for a run that has no step left, but only has to score its last epoch or to write its report.

    ``settings``: those of ``plan``, with the open ones chosen.
    """
    if plan.remaining is not Remaining.STEPS:
        return
    config = settings.config
    log = get_logger()
    warning = few_steps_warning(steps, from_weights=bool(config.weights))
    if warning and step.ctx.is_main and not config.time:
        log.warning("%s", warning)
    length = f"{counted(steps.total, 'step')} ({counted(config.epochs, 'epoch')} of {steps.per_epoch})"
    if steps.is_timed:  # the number of epochs is not known yet
        length = f"{counted(steps.per_epoch, 'step')} per epoch, for {config.time:g} hours (--time)"
    optimizer = f"{step.optimizer.name} ({_reason_for_optimizer(plan, steps)})"
    log.info("%s, learning rate %s", optimizer, _described_rates(settings, step))
    log.info(
        "%s, each of %s of %s at %d px, in %s",
        length,
        counted(steps.accumulate, "batch"),
        counted(config.batch_size, "image"),
        config.imgsz,
        str(step.amp_dtype or torch.float32).removeprefix("torch."),
    )
    compiles = " and compiles the model" if config.compile else ""
    log.info("starting; the first step is the slowest: it waits for the first batch%s", compiles)


def _reason_for_optimizer(plan: RunPlan, steps: StepPlan) -> str:
    config = plan.settings.config
    if config.optimizer == "auto":
        if steps.is_timed:
            return "auto: --time leaves the number of steps open"
        length = "at most" if steps.total <= SHORT_RUN else "more than"
        return f"auto: {length} {SHORT_RUN:,} steps"
    if isinstance(plan, ContinuedRun) and plan.started_from.description.config.optimizer == config.optimizer:
        return "as when the run began"
    return "--optimizer"


def _described_rates(settings: RunSettings, step: TrainStep) -> str:
    """Describes the initial learning rates, and in brackets what they follow from."""
    hyp = settings.hyp
    rates = {group["is_new"]: group["initial_lr"] for group in step.optimizer.param_groups}
    base = RULES[step.optimizer.name].lr if hyp.lr0 is None else hyp.lr0
    reasons = [f"default {base:g}" if hyp.lr0 is None else "lr0"]
    if rates.get(True, base) > base:
        reasons.append("raised for new layers in few steps")
    if hyp.lr_factor != 1:
        reasons.append(f"lr_factor {hyp.lr_factor:g}")
    if False in rates:
        reasons.append(f"lr_mult {hyp.lr_mult:g}")
    if len(rates) == 2:
        rate = f"{rates[True]:g} for new layers, {rates[False]:g} for loaded ones"
    else:
        rate = f"{min(rates.values()):g}"
    return f"{rate} ({', '.join(reasons)})"
