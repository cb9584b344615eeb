"""Logs the optimizer, its learning rates and the number of steps before the first step of a run."""

from __future__ import annotations

import torch

from engine.optim.build import RULES
from engine.optim.schedule import StepPlan, few_steps_warning
from engine.train.resume import Remaining, TrainingRun
from engine.train.step import TrainStep
from utils.config.settings import Hyperparameters
from utils.logger import get_logger
from utils.strings import counted


def log_start(run: TrainingRun, step: TrainStep, steps: StepPlan, optimizer_reason: str) -> None:
    """Logs the optimizer and its rates with the reasons for them, the number and size of steps, and that the training
    starts. Warns of a run with too few steps for a good detector, unless ``--time`` decides their number. Logs nothing
    for a run that has no step left, but only has to score its last epoch or to write its report.

    ``optimizer_reason``: see `engine.assembly.choices.ChosenSettings`.
    """
    if run.remaining is not Remaining.STEPS:
        return
    config = run.config
    log = get_logger()
    warning = few_steps_warning(steps, from_weights=bool(config.weights))
    if warning and step.ctx.is_main and not config.time:
        log.warning("%s", warning)
    length = f"{counted(steps.total, 'step')} ({counted(config.epochs, 'epoch')} of {steps.per_epoch})"
    if steps.is_timed:  # the number of epochs is not known yet
        length = f"{counted(steps.per_epoch, 'step')} per epoch, for {config.time:g} hours (--time)"
    optimizer = f"{step.optimizer.name} ({optimizer_reason or _reason_for_optimizer(run)})"
    log.info("%s, learning rate %s", optimizer, _described_rates(run.hyp, step))
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


def _reason_for_optimizer(run: TrainingRun) -> str:
    """Returns why a run has its optimizer, which its settings name."""
    started_from = run.started_from
    if started_from is not None and started_from.description.config.optimizer == run.config.optimizer:
        return "as when the run began"
    return "--optimizer"


def _described_rates(hyp: Hyperparameters, step: TrainStep) -> str:
    """Describes the initial learning rates, and in brackets what they follow from."""
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
