"""Decides what the settings of a run leave open, in the order in which the choices depend on each other.

A run that continues keeps what it has chosen: its settings leave nothing open, and its checkpoint has the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from data.index.index import DatasetIndex
from data.loading.build import build_train_sampler
from engine.optim.build import SHORT_RUN, resolve_optimizer
from engine.optim.schedule import StepPlan, new_layers_lr_mult, step_plan
from engine.train.batch_size import find_batch_size
from engine.train.lr_probe import REFERENCE_EPOCHS, WeightsProbe, lr_mult_by_score
from engine.train.resume import RunPlan
from engine.train.sources import RunData, Sources
from engine.train.starting_model import StartingModel
from models.autoanchor import fitted_anchors
from models.detector import Detector
from models.losses.base import class_weights
from utils.config.settings import FIND_BATCH_SIZE, Hyperparameters, RunSettings, TrainConfig
from utils.distributed.context import DistributedContext, broadcast_object
from utils.machine.devices import resolve_amp
from utils.mirrored_classes import mirrored_classes
from utils.strings import listed


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The settings of a run, of which none is open, and what follows from them and its data. Equal on all ranks but for
    the settings that are each process's own."""

    settings: RunSettings
    steps: StepPlan
    amp_dtype: torch.dtype | None  # type of autocast; None: no autocast
    anchors: Tensor | None  # (L, A, 2), that replace those of the model; None: these are kept
    class_weights: Tensor | None  # (C,) in the loss, on the CPU; None: all are equal
    lr_mult: float  # of the hyper-parameters
    new_lr_mult: float  # see `engine.optim.build.LoadedParameters`
    because: dict[str, str]  # by choice, why: a line of the log, or a part of one

    @property
    def config(self) -> TrainConfig:
        return self.settings.config

    @property
    def hyp(self) -> Hyperparameters:
        return self.settings.hyp


def decide(ctx: DistributedContext, plan: RunPlan, sources: Sources, data: RunData, start: StartingModel) -> Choices:
    """Makes all choices of a run. Every rank must call this. Raises UserError if no batch fits on the GPUs."""
    config = plan.settings.config
    model = start.model
    stored = plan.stored
    train = data.samples.reader.image_index
    because: dict[str, str] = {}

    flips = {} if stored else choose_flips(plan.settings.hyp, sources.names, plan.given, because)
    hyp = replace(plan.settings.hyp, **flips)
    batch_size = choose_batch_size(ctx, RunSettings(config, hyp), sources, data, model, because)
    sized = replace(config, batch_size=batch_size)
    epoch_batches = len(build_train_sampler(ctx, sized, hyp, data.samples, stride=model.stride))
    steps = step_plan(sized, epoch_batches)
    optimizer = choose_optimizer(sized, steps, because)
    lr_mult = choose_lr_mult(sized, hyp, steps, start.probe, because)
    if stored:
        because |= {"optimizer": "as when the run began", "lr_mult": ""}
    amp_dtype = broadcast_object(ctx, resolve_amp(config.amp, ctx.device))
    anchors = None if stored else choose_anchors(ctx, sized, hyp, model, train, start.probe, because)
    weights: Tensor | None
    if stored and stored.class_weights:
        weights = torch.tensor(stored.class_weights)
    else:
        weights = choose_class_weights(config, model, train, because)
    return Choices(
        settings=RunSettings(replace(sized, optimizer=optimizer), replace(hyp, lr_mult=lr_mult)),
        steps=steps,
        amp_dtype=amp_dtype,
        anchors=anchors,
        class_weights=weights,
        lr_mult=lr_mult,
        new_lr_mult=stored.new_lr_mult if stored else new_layers_lr_mult(steps.planned_steps),
        because=because,
    )


def choose_flips(
    hyp: Hyperparameters, names: Sequence[str], given: Collection[str], because: dict[str, str]
) -> dict[str, Any]:
    """Returns the flips to turn off: by default those that exchange two of the classes ``names``, such as "left arrow"
    and "right arrow", unless the user has ``given`` their probability."""
    off: dict[str, Any] = {}
    for flip in ("fliplr", "flipud"):
        probability = getattr(hyp, flip)
        reason = exchanged_classes(names, flip)
        if reason and probability and probability == getattr(Hyperparameters, flip) and flip not in given:
            off[flip] = 0.0
            because[flip] = f"{flip} is turned off: {reason}; --set {flip}={probability:g} turns it on"
    return off


def exchanged_classes(names: Sequence[str], flip: str) -> str:
    """Returns a clause about the classes that a flip exchanges, "" if there are none."""
    pairs = mirrored_classes(names, flip)
    if not pairs:
        return ""
    exchanged = listed([f"'{one}' and '{other}'" for one, other in pairs], 1)
    return f"a flipped image exchanges the classes {exchanged}"


def choose_batch_size(
    ctx: DistributedContext,
    settings: RunSettings,
    sources: Sources,
    data: RunData,
    model: Detector,
    because: dict[str, str],
) -> int:
    """Returns the batch size of the settings, or for -1 the largest that fits on the GPUs."""
    if settings.config.batch_size != FIND_BATCH_SIZE:
        return settings.config.batch_size
    teacher = None if sources.teacher is None else sources.teacher.build(sources.spec, model)
    loss = model.head.build_loss(settings.hyp, teacher=teacher, label_smoothing=settings.config.label_smoothing)
    batch_size = find_batch_size(ctx, settings, model, loss.to(ctx.device), data.samples)
    because["batch_size"] = f"--batch-size -1: {batch_size}, the largest that fits"
    return batch_size


def choose_optimizer(config: TrainConfig, steps: StepPlan, because: dict[str, str]) -> str:
    """Returns the optimizer, which for ``auto`` depends on the planned steps."""
    because["optimizer"] = "--optimizer"
    if config.optimizer == "auto" and steps.is_timed:
        because["optimizer"] = "as --time leaves the number of steps open"
    elif config.optimizer == "auto":
        length = "at most" if steps.total <= SHORT_RUN else "more than"
        because["optimizer"] = f"as in all runs of {length} {SHORT_RUN:,} steps"
    return resolve_optimizer(config.optimizer, steps.planned_steps)


def choose_lr_mult(
    config: TrainConfig, hyp: Hyperparameters, steps: StepPlan, probe: WeightsProbe | None, because: dict[str, str]
) -> float:
    """Returns the learning rate factor of loaded weights: that of the settings, or by how well these detect."""
    if hyp.lr_mult is not None:
        because["lr_mult"] = " (lr_mult)"
        return hyp.lr_mult
    if probe is None:
        return 1.0
    epochs = REFERENCE_EPOCHS if steps.is_timed else config.epochs
    lr_mult, reason = lr_mult_by_score(probe.score, epochs, steps.planned_steps)
    because["lr_mult"] = f"{reason} ({probe.details})"
    return lr_mult


def choose_anchors(
    ctx: DistributedContext,
    config: TrainConfig,
    hyp: Hyperparameters,
    model: Detector,
    train: DatasetIndex,
    probe: WeightsProbe | None,
    because: dict[str, str],
) -> Tensor | None:
    """Returns anchors that replace the model's, if it has any and they fit the boxes of the training split badly.

    Loaded weights predict boxes relative to their anchors, so weights that detect the objects keep them. All ranks use
    the anchors of rank 0: the search compares sums of floats, which other processors may round differently.
    """
    if model.head.anchors is None:
        return None
    reason_to_keep = ""
    if not config.autoanchor:
        reason_to_keep = "refitting is off"
    elif probe is not None and probe.detects:
        reason_to_keep = f"{probe.source} detects training objects with them ({probe.details})"
    fitted = None
    if ctx.is_main:
        because["anchors"], fitted = fitted_anchors(
            train.sides_at(config.imgsz),
            model.head,
            anchor_t=hyp.anchor_t,
            reason_to_keep=reason_to_keep,
            seed=config.seed,
        )
    return broadcast_object(ctx, fitted)


def choose_class_weights(
    config: TrainConfig, model: Detector, train: DatasetIndex, because: dict[str, str]
) -> Tensor | None:
    """Returns the weights of the classes in the loss for ``--cls-pw``, float32 (C,); None if all are equal."""
    if not config.cls_pw:
        return None
    weights = class_weights(train.boxes_per_class(model.num_classes), config.cls_pw)
    by_weight = weights.argsort(descending=True, stable=True).tolist()
    shown = [f"{model.names[c]} {weights[c]:.3g}" for c in by_weight]
    because["class_weights"] = f"--cls-pw {config.cls_pw:g}: weights in the loss: {listed(shown)}"
    return weights
