"""The model that a run starts from: built, filled with starting weights, and with frozen layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from models.detector import Detector, build_detector
from models.weights.download import fetch_weights
from models.weights.load import model_of
from models.weights.origin import RANDOM, origin_of_run
from models.weights.read import read_weights
from models.weights.transfer import fill_model
from utils.config.checks import check_image_size
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.logger import get_logger
from utils.strings import counted

DEFAULT_MODEL = "yolov8n"


@dataclass(frozen=True)
class StartingModel:
    """A model before its first step, and where its weights come from."""

    model: Detector  # on its device
    pretrained: dict[str, tuple[int, ...]]  # parameters from weights, by name; of each the rows that are still random
    origin: dict[str, str]  # of the weights: fields of `models.weights.origin.Origin`


def build_starting_model(
    ctx: DistributedContext, config: TrainConfig, names: Sequence[str], channels: int
) -> StartingModel:
    """Builds the model of a new run for classes ``names`` and images of ``channels`` channels.

    Raises UserError for weights that cannot be read, a model that cannot be built, or settings that do not fit it.
    """
    stored = None
    if config.weights:
        stored = read_weights(fetch_weights(config.weights, ctx=ctx, offline=config.offline))
    source = config.model or (model_of(stored) if stored else DEFAULT_MODEL)
    model = _build(source, config, names, channels, remark="" if stored else ", random weights")
    pretrained = fill_model(model, stored, grow=config.keep_old) if stored else {}
    _freeze(model, config.freeze)
    origin = origin_of_run(stored) if stored else RANDOM
    return StartingModel(_on_device(model, ctx), pretrained, origin._asdict())


def rebuild_model(
    ctx: DistributedContext, config: TrainConfig, names: Sequence[str], channels: int, model_spec: dict[str, Any]
) -> Detector:
    """Builds the model of a run that continues, from the spec in its checkpoint. Its weights are loaded later."""
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

    From now on their batch norms use the stored statistics, also in training mode.
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
