"""Decides what the settings of a new run leave open. `engine.run.starts` makes the choices in the order in which they
depend on each other; a run that continues keeps them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data.index import DatasetIndex
from data.samples.dataset import AugmentedImages
from engine.optim.build import SHORT_RUN, LoadedParameters, resolve_optimizer
from engine.optim.schedule import StepPlan
from engine.train.batch_size import find_batch_size
from engine.train.lr_probe import REFERENCE_EPOCHS, WeightsProbe, lr_mult_by_score
from engine.train.step import TrainStep
from models.autoanchor import fitted_anchors
from models.detector import Detector
from models.losses.base import class_weights
from models.losses.distillation import Teacher
from utils.config.settings import FIND_BATCH_SIZE, Hyperparameters, RunSettings, TrainConfig
from utils.distributed.context import DistributedContext, broadcast_object
from utils.logger import get_logger
from utils.mirrored_classes import mirrored_classes
from utils.strings import counted, listed


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The settings of a run, of which none is open, and what follows from them and its data. Equal on all ranks but for
    the settings that are each process's own."""

    settings: RunSettings
    anchors: Tensor | None  # (L, A, 2), that replace those of the model; None: these are kept
    class_weights: Tensor | None  # (C,) in the loss, on the CPU; None: all are equal
    loaded: LoadedParameters  # how fast loaded weights and new ones learn
    optimizer_reason: str  # why the run has this optimizer
    lr_reason: str = ""  # why loaded weights learn at their rate: a sentence about them; "": not known
    messages: Sequence[str] = ()  # other choices, for the log


def choose_flips(hyp: Hyperparameters, names: Sequence[str], given: Collection[str]) -> tuple[dict[str, Any], str]:
    """Returns the flips to turn off, and a log line about flips: by default those are off that exchange two of the
    classes ``names``, such as "left arrow" and "right arrow", unless the user has ``given`` their probability."""
    off: dict[str, Any] = {}
    reasons = []
    for flip in ("fliplr", "flipud"):
        probability = getattr(hyp, flip)
        pairs = mirrored_classes(names, flip)
        if not probability or not pairs:
            continue
        exchanged = listed([f"'{one}' and '{other}'" for one, other in pairs], 1)
        reason = f"a flipped image exchanges the classes {exchanged}"
        if probability == getattr(Hyperparameters, flip) and flip not in given:
            off[flip] = 0.0
            reasons.append(f"{flip} is turned off: {reason}; --set {flip}={probability:g} turns it on")
        else:
            reasons.append(f"{flip} is {probability:g}, but {reason}; --set {flip}=0 turns it off")
    return off, "; ".join(reasons)


def choose_batch_size(
    ctx: DistributedContext, settings: RunSettings, model: Detector, teacher: Teacher | None, samples: AugmentedImages
) -> tuple[int, str]:
    """Returns the batch size of the settings, or for -1 the largest that fits on the GPUs, and then a log line."""
    config = settings.config
    if config.batch_size != FIND_BATCH_SIZE:
        return config.batch_size, ""
    loss = model.head.build_loss(settings.hyp, teacher=teacher, label_smoothing=config.label_smoothing)
    batch_size = find_batch_size(ctx, settings, model, loss.to(ctx.device), samples)
    return batch_size, f"--batch-size -1: {batch_size}, the largest that fits"


def choose_optimizer(config: TrainConfig, steps: StepPlan) -> tuple[str, str]:
    """Returns the optimizer, which for ``auto`` depends on the planned steps, and why."""
    reason = "--optimizer"
    if config.optimizer == "auto" and steps.is_timed:
        reason = "as --time leaves the number of steps open"
    elif config.optimizer == "auto":
        length = "at most" if steps.total <= SHORT_RUN else "more than"
        reason = f"as in all runs of {length} {SHORT_RUN:,} steps"
    return resolve_optimizer(config.optimizer, steps.planned_steps), reason


def choose_lr_mult(
    config: TrainConfig, hyp: Hyperparameters, steps: StepPlan, probe: WeightsProbe | None
) -> tuple[float, str]:
    """Returns the learning rate factor of loaded weights, that of the settings or by how well these detect, and why:
    a sentence about them."""
    if hyp.lr_mult is not None:
        return hyp.lr_mult, f"lr_mult is {hyp.lr_mult:g}"
    if probe is None:
        return 1.0, ""
    epochs = REFERENCE_EPOCHS if steps.is_timed else config.epochs
    lr_mult, reason = lr_mult_by_score(probe.score, epochs, steps.planned_steps)
    return lr_mult, f"{reason} ({probe.details})"


def choose_anchors(
    ctx: DistributedContext,
    config: TrainConfig,
    hyp: Hyperparameters,
    model: Detector,
    train: DatasetIndex,
    probe: WeightsProbe | None,
) -> tuple[Tensor | None, str]:
    """Returns anchors that replace the model's, if it has any and they fit the boxes of the training split badly, and
    a log line about its anchors.

    Loaded weights predict boxes relative to their anchors, so weights that detect the objects keep them. All ranks use
    the anchors of rank 0: the search compares sums of floats, which other processors may round differently.
    """
    if model.head.anchors is None:
        return None, ""
    reason_to_keep = ""
    if not config.autoanchor:
        reason_to_keep = "refitting is off"
    elif probe is not None and probe.detects:
        reason_to_keep = f"{probe.source} detects training objects with them ({probe.details})"
    reason, fitted = "", None
    if ctx.is_main:
        reason, fitted = fitted_anchors(
            train.sides_at(config.imgsz),
            model.head,
            anchor_t=hyp.anchor_t,
            reason_to_keep=reason_to_keep,
            seed=config.seed,
        )
    return broadcast_object(ctx, fitted), reason


def choose_class_weights(config: TrainConfig, model: Detector, train: DatasetIndex) -> tuple[Tensor | None, str]:
    """Returns the weights of the classes in the loss for ``--cls-pw``, float32 (C,), and a line that lists them; None
    if all are equal."""
    if not config.cls_pw:
        return None, ""
    weights = class_weights(train.boxes_per_class(model.num_classes), config.cls_pw)
    by_weight = weights.argsort(descending=True, stable=True).tolist()
    shown = [f"{model.names[c]} {weights[c]:.3g}" for c in by_weight]
    return weights, f"--cls-pw {config.cls_pw:g}: weights in the loss: {listed(shown)}"


def log_choices(choices: Choices, steps: StepPlan, step: TrainStep) -> None:
    """Logs what a run has chosen, with the reasons, and the number and size of its steps."""
    config = choices.settings.config
    optimizer = step.optimizer
    log = get_logger()
    for message in choices.messages:
        log.info("%s", message)
    factors = {group["is_new"]: group["lr_mult"] for group in optimizer.param_groups}
    new_factor = factors.get(True, 1.0)
    length = f"{counted(steps.total, 'step')} ({counted(config.epochs, 'epoch')} of {steps.per_epoch})"
    if steps.is_timed:  # the number of epochs is not known yet
        length = f"{counted(steps.per_epoch, 'step')} per epoch, for {config.time:g} hours (--time)"
    batches = "" if steps.accumulate == 1 else f"{steps.accumulate} batches of "
    log.info(
        "%s, each of %s%s at %d px, in %s, with %s (%s), learning rate %g%s%s",
        length,
        batches,
        counted(config.batch_size, "image"),
        config.imgsz,
        str(step.amp_dtype or torch.float32).removeprefix("torch."),
        optimizer.name,
        choices.optimizer_reason,
        optimizer.lr * new_factor,
        " (raised for few steps)" if new_factor > 1 else "",
        "; the first step compiles the model" if config.compile else "",
    )
    factor = factors.get(False, new_factor)  # of loaded weights
    if factor == new_factor:
        return
    if factor == 0:
        text = "loaded weights do not learn"
    elif factor > new_factor:
        text = f"loaded weights learn {factor / new_factor:.3g} times faster"
    else:
        text = f"loaded weights learn {new_factor / factor:.3g} times slower"
    log.info("%s", f"{text}: {choices.lr_reason}" if choices.lr_reason else text)
