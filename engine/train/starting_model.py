"""The model that a run starts from: built once, filled with starting weights, with frozen layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from data.loading.build import count_train_batches
from engine.optim.schedule import FEW_STEPS, step_plan
from engine.train.lr_probe import WeightsProbe, probe_weights
from engine.train.resume import RunPlan
from engine.train.sources import RunData, Sources, layers_to_freeze
from models.detector import Detector, build_detector
from models.losses.distillation import Teacher
from models.weights.load import class_count
from models.weights.origin import RANDOM, origin_of_run, taught_by
from models.weights.read import StoredWeights
from models.weights.transfer import transfer_weights
from utils.config.settings import FIND_BATCH_SIZE, TrainConfig
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

    A new run's has random weights, or those of ``--weights``: in a run of few steps, its new classes start from the
    rows of similar ones, and its class layers are as wide as the file's, so that these fit. `restore_run` loads the
    weights of a run that continues. Raises UserError if processes have read different weights.
    """
    config = plan.settings.config
    weights = sources.weights
    stored = plan.stored
    probe = None
    origin = RANDOM
    lines = []
    if plan.checkpoint is not None and stored is not None:
        model = _build(config, sources.meta_model.spec, sources)
        pretrained = {name: tuple(rows) for name, rows in stored.pretrained.items()}
        from_files = list(plan.checkpoint.state.model.values())
    elif weights is None:
        model = _build(config, sources.meta_model.spec, sources)
        lines = ["random weights"]
        pretrained = {}
        from_files = []
    else:
        origin = origin_of_run(weights)
        probe, similar = _probe(ctx, plan, sources, data, weights)
        spec = sources.meta_model.spec
        if similar:  # class layers as wide as the file's, whatever the number of classes is
            spec = {"classes_of_width": class_count(sources.meta_model, weights.shapes)} | spec
        model = _build(config, spec, sources)
        report = transfer_weights(model, weights, grow=config.keep_old, similar=similar)
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


def _probe(
    ctx: DistributedContext, plan: RunPlan, sources: Sources, data: RunData, weights: StoredWeights
) -> tuple[WeightsProbe | None, Mapping[int, int]]:
    """Measures how well the weights detect the objects. Returns the result, and the classes of the weights from which
    those of the model start, if the run has few steps (judged at the default batch size, if that is still open)."""
    settings = plan.settings
    config = settings.config
    if config.batch_size == FIND_BATCH_SIZE:
        config = replace(config, batch_size=TrainConfig.batch_size)
    steps = step_plan(config, count_train_batches(config, data.samples))
    needs_similar = steps.planned_steps <= FEW_STEPS and not (config.model or config.keep_old)
    probe = probe_weights(ctx, settings, weights, data.samples, sources.meta_model, needs_similar=needs_similar)
    if probe is None or sources.is_complete:
        return probe, {}
    return probe, probe.similar


def _build(config: TrainConfig, spec: dict, sources: Sources) -> Detector:
    """Builds a model with random weights and frozen layers."""
    names = sources.names
    channels = sources.spec.pixels.channels
    model = build_detector(spec, len(names), names=names, seed=config.seed, channels=channels)
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
