"""The model that a run starts from: built, filled with starting weights, with frozen layers."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.train.checkpoint import Checkpoint
from models.detector import Detector, build_detector
from models.weights.download import fetch_weights
from models.weights.load import check_shapes, model_of
from models.weights.origin import RANDOM, origin_of_run
from models.weights.read import read_weights, shapes_of
from models.weights.transfer import fill_model
from utils.class_names import class_difference
from utils.config.image_size import check_image_size
from utils.config.settings import TrainConfig
from utils.distributed.agreement import check_same_model
from utils.distributed.context import DistributedContext
from utils.errors import UserError, errors_of
from utils.logger import get_logger
from utils.strings import counted

DEFAULT_MODEL = "yolov8n"


@dataclass(frozen=True)
class StartingModel:
    """A model before its first step, and where its weights come from."""

    model: Detector  # on its device
    pretrained: dict[str, tuple[int, ...]]  # rows of new classes, by name of each parameter from weights
    origin: dict[str, str]  # origin of the weights: fields of `models.weights.origin.Origin`

    @property
    def is_complete(self) -> bool:
        """True if all parameters come from weights."""
        return all(self.pretrained.get(name) == () for name, _ in self.model.named_parameters())


def build_starting_model(
    ctx: DistributedContext,
    config: TrainConfig,
    names: Sequence[str],
    channels: int,
    *,
    similar: Mapping[int, int] | None = None,
) -> StartingModel:
    """Builds the model of a new run for classes ``names`` and images of ``channels`` channels.

    ``similar``: see `transfer_weights`. The class layers are then as wide as the file's, so that its rows fit.

    Raises UserError for weights that cannot be read, a model that cannot be built or does not fit the settings, and if
    processes have read different weights.
    """
    stored = None
    if config.weights:
        stored = read_weights(fetch_weights(config.weights, ctx=ctx, offline=config.offline))
    source = config.model or (model_of(stored, keep_width=bool(similar)) if stored else DEFAULT_MODEL)
    model = _build(source, config, names, channels, remark="" if stored else ", random weights")
    pretrained = fill_model(model, stored, grow=config.keep_old, similar=similar) if stored else {}
    _freeze(model, config.freeze)
    state = model.state_dict()
    check_same_model(ctx, model, [state[name] for name in pretrained])
    origin = origin_of_run(stored) if stored else RANDOM
    return StartingModel(_on_device(model, ctx), pretrained, origin._asdict())


def rebuild_starting_model(
    ctx: DistributedContext, config: TrainConfig, names: Sequence[str], channels: int, checkpoint: Checkpoint
) -> StartingModel:
    """Builds the model that a checkpoint describes; `restore_run` loads the weights. Raises UserError if the data set,
    with classes ``names``, has other classes, or another order, and if the weights do not fit the model."""
    path = checkpoint.path
    stored = checkpoint.description
    difference = class_difference(stored.names, names)
    if difference:
        raise UserError(
            f"{path}: the run and {config.data} do not have the same classes ({difference}); for other classes start a "
            f"new run with --weights {shlex.quote(str(path))}"
        )
    check_shapes(path, stored.model_spec, stored.names, shapes_of(checkpoint.state.model))
    with errors_of(path):
        model = rebuild_model(ctx, config, names, channels, stored.model_spec)
    check_same_model(ctx, model, list(checkpoint.state.model.values()))
    return StartingModel(model, {name: tuple(rows) for name, rows in stored.pretrained.items()}, stored.origin)


def rebuild_model(
    ctx: DistributedContext, config: TrainConfig, names: Sequence[str], channels: int, model_spec: dict[str, Any]
) -> Detector:
    """Rebuilds the model of an existing run from its stored spec. Its weights are loaded later."""
    model = _build(model_spec, config, names, channels, remark="")
    _freeze(model, config.freeze)
    return _on_device(model, ctx)


def _build(
    source: str | dict[str, Any], config: TrainConfig, names: Sequence[str], channels: int, *, remark: str
) -> Detector:
    """Builds a model with random weights, and logs its size, followed by ``remark``."""
    model = build_detector(source, len(names), names=names, seed=config.seed, channels=channels)
    check_image_size(config.imgsz, model.stride, min_cells=2)  # batch norm needs more than one image of one cell
    parameters = sum(p.numel() for p in model.parameters())
    get_logger().info(
        "%s: %s parameters, %s%s", model.spec["name"], f"{parameters:,}", counted(len(names), "class"), remark
    )
    return model


def _on_device(model: Detector, ctx: DistributedContext) -> Detector:
    return model.to(ctx.device).to(memory_format=torch.channels_last)


def _freeze(model: Detector, numbers: Sequence[int]) -> None:
    """Freezes the layers of ``--freeze``, whose ``numbers`` are indices, or a single n for layers 0 to n - 1."""
    flag = f"--freeze {' '.join(map(str, numbers))}"
    layers = set(range(numbers[0])) if len(numbers) == 1 else set(numbers)
    last = len(model.model) - 1
    if min(numbers, default=0) < 0 or max(layers, default=0) > last:
        raise UserError(f"{flag}: the model has layers 0 to {last}")
    if not layers:
        return
    freeze_layers(model, layers)
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"{flag}: leaves no layer to train")
    get_logger().info("frozen: layers %s", ", ".join(map(str, sorted(layers))))


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
