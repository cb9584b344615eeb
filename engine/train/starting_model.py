"""The model that a run starts from: built once, filled with starting weights, with frozen layers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from engine.train.lr_probe import WeightsProbe, probe_weights
from engine.train.resume import RunPlan
from engine.train.sources import RunData, Sources, layers_to_freeze
from models.detector import Detector, build_detector
from models.losses.distillation import Teacher
from models.weights.origin import RANDOM, origin_of_run, taught_by
from models.weights.transfer import transfer_weights
from utils.config.settings import TrainConfig
from utils.distributed.agreement import check_same_model
from utils.distributed.context import DistributedContext
from utils.logger import get_logger
from utils.strings import counted


@dataclass(frozen=True, kw_only=True)
class StartingModel:
    """A model before its first step, and where its weights come from."""

    model: Detector  # on its device
    pretrained: dict[str, tuple[int, ...]]  # rows of new classes, by name of each parameter from weights
    origin: dict[str, str]  # origin of the weights: fields of `models.weights.origin.Origin`
    probe: WeightsProbe | None  # how well the weights of a new run detect its objects; None: not measured
    teacher: Teacher | None  # for the loss of this model


def build_starting_model(ctx: DistributedContext, plan: RunPlan, sources: Sources, data: RunData) -> StartingModel:
    """Builds the model of a run on its device. Every rank must call this.

    A new run's has random weights, or those of ``--weights``, in which a new class starts from the rows of the class
    that scores best at its objects. `restore_run` loads the weights of a run that continues. Raises UserError if
    processes have read different weights.
    """
    config = plan.settings.config
    weights = sources.weights
    stored = plan.stored
    probe = None
    origin = RANDOM
    lines = []
    model = _build(config, sources)
    if plan.checkpoint is not None and stored is not None:
        pretrained = {name: tuple(rows) for name, rows in stored.pretrained.items()}
        from_files = list(plan.checkpoint.state.model.values())
    elif weights is None:
        lines = ["random weights"]
        pretrained = {}
        from_files = []
    else:
        origin = origin_of_run(weights)
        probe = probe_weights(ctx, config, weights, data.samples, sources.meta_model)
        similar = {} if config.model or config.keep_old else probe.similar
        report = transfer_weights(model, weights, similar=similar)
        lines = report.lines()
        pretrained = report.pretrained(model)
        state = model.state_dict()
        from_files = [state[name] for name in pretrained]
    parameters = f"{sum(p.numel() for p in model.parameters()):,} parameters"
    description = f"{model.spec['name']}: {parameters}, {counted(len(sources.names), 'class')}"
    for line in ("; ".join([description, *lines[:1]]), *lines[1:]):
        get_logger().info("%s", line)
    if sources.teacher is not None and config.teacher:
        origin = taught_by(origin, sources.teacher.origin)
    check_same_model(ctx, model, from_files)
    return StartingModel(
        model=model.to(ctx.device).to(memory_format=torch.channels_last),
        pretrained=pretrained,
        origin=stored.origin if stored else origin._asdict(),
        probe=probe,
        teacher=None if sources.teacher is None else sources.teacher.build(sources.spec, model),
    )


def _build(config: TrainConfig, sources: Sources) -> Detector:
    """Builds a model with random weights and frozen layers."""
    names = sources.names
    channels = sources.spec.pixels.channels
    model = build_detector(sources.meta_model.spec, len(names), names=names, seed=config.seed, channels=channels)
    layers = layers_to_freeze(model, config.freeze)
    if layers:
        freeze_layers(model, layers)
        get_logger().info("frozen: layers %s", ", ".join(map(str, sorted(layers))))
    return model


def freeze_layers(model: Detector, layers: Collection[int]) -> None:
    """Stops gradients and batch statistics of ``model.model[i]`` for each i in ``layers``.

    From now on, their batch norms use the stored statistics even in training mode.
    """
    for index in layers:
        layer = model.model[index]
        layer.requires_grad_(False)
        for module in layer.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.train(False)
                module.register_forward_pre_hook(_keep_statistics)


def _keep_statistics(module: nn.Module, _inputs: tuple) -> None:
    module.training = False
