"""Decides what the settings of a new run leave open, and logs why. A run that continues keeps these choices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from data.index import DatasetIndex
from data.samples.dataset import AugmentedImages
from engine.optim.build import SHORT_RUN, resolve_optimizer
from engine.optim.schedule import StepPlan
from engine.train.batch_size import find_batch_size
from engine.train.checkpoint import RunDescription
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


class Choices(NamedTuple):
    """A run whose settings leave nothing open, and why. Equal on all ranks but for the settings that are each process's
    own."""

    description: RunDescription
    optimizer_reason: str  # why the run has this optimizer
    lr_reason: str = ""  # why loaded weights learn at their rate: a sentence about them; "": not known


def choose_flips(hyp: Hyperparameters, names: Sequence[str], given: Collection[str]) -> dict[str, Any]:
    """Returns the flips to turn off: by default those that exchange two of the classes ``names``, such as "left arrow"
    and "right arrow", unless the user has ``given`` their probability."""
    off: dict[str, Any] = {}
    for flip in ("fliplr", "flipud"):
        probability = getattr(hyp, flip)
        pairs = mirrored_classes(names, flip)
        if not probability or not pairs:
            continue
        exchanged = listed([f"'{one}' and '{other}'" for one, other in pairs], 1)
        reason = f"a flipped image exchanges the classes {exchanged}"
        if probability == getattr(Hyperparameters, flip) and flip not in given:
            off[flip] = 0.0
            message = f"{flip} is turned off: {reason}; --set {flip}={probability:g} turns it on"
        else:
            message = f"{flip} is {probability:g}, but {reason}; --set {flip}=0 turns it off"
        get_logger().info("%s", message)
    return off


def choose_batch_size(
    ctx: DistributedContext, settings: RunSettings, model: Detector, teacher: Teacher | None, samples: AugmentedImages
) -> int:
    """Returns the batch size of the settings, or for -1 the largest that fits on the GPUs."""
    config = settings.config
    if config.batch_size != FIND_BATCH_SIZE:
        return config.batch_size
    loss = model.head.build_loss(settings.hyp, teacher=teacher, label_smoothing=config.label_smoothing)
    batch_size = find_batch_size(ctx, settings, model, loss.to(ctx.device), samples)
    get_logger().info("--batch-size -1: %d, the largest that fits", batch_size)
    return batch_size


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
) -> None:
    """Replaces the model's anchors, if it has any and they fit the boxes of the training split badly.

    Loaded weights predict boxes relative to their anchors, so weights that detect the objects keep them. All ranks use
    the anchors of rank 0: the search compares sums of floats, which other processors may round differently.
    """
    if model.head.anchors is None:
        return
    reason_to_keep = ""
    if not config.autoanchor:
        reason_to_keep = "refitting is off"
    elif probe is not None and probe.detects:
        reason_to_keep = f"{config.weights} detects training objects with them ({probe.details})"
    fitted = None
    if ctx.is_main:
        message, fitted = fitted_anchors(
            train.sides_at(config.imgsz),
            model.head,
            anchor_t=hyp.anchor_t,
            reason_to_keep=reason_to_keep,
            seed=config.seed,
        )
        get_logger().info("%s", message)
    fitted = broadcast_object(ctx, fitted)
    if fitted is not None:
        model.head.anchors.copy_(fitted)


def choose_class_weights(config: TrainConfig, model: Detector, train: DatasetIndex) -> list[float]:
    """Returns the weights of the classes in the loss for ``--cls-pw``, by number; none if all are equal."""
    if not config.cls_pw:
        return []
    weights = class_weights(train.boxes_per_class(model.num_classes), config.cls_pw).tolist()
    by_weight = sorted(range(len(weights)), key=lambda c: -weights[c])
    shown = [f"{model.names[c]} {weights[c]:.3g}" for c in by_weight]
    get_logger().info("--cls-pw %g: weights in the loss: %s", config.cls_pw, listed(shown))
    return weights


def log_choices(choices: Choices, steps: StepPlan, step: TrainStep) -> None:
    """Logs what a run has chosen, with the reasons, and the number and size of its steps."""
    config = choices.description.config
    optimizer = step.optimizer
    log = get_logger()
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
