"""The model that a run starts from: starting weights and frozen layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from models.detector import Detector, build_detector
from utils.config.parser import check_image_size
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.folders import RANDOM, Origin
from utils.logger import get_logger
from utils.strings import counted

DEFAULT_MODEL = "yolov8n"


def freeze_layers(model: nn.Module, layers: Collection[int]) -> None:
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


def build_starting_model(
    ctx: DistributedContext, config: TrainConfig, names: Sequence[str], channels: int, *, resumed: dict[str, Any] | None
) -> tuple[Detector, dict[str, tuple[int, ...]], Origin]:
    """The detector on its device, with starting weights and frozen layers (resumed weights are loaded later), the
    parameters that starting weights filled (by name, the rows that are still random), and the origin of the weights.
    ``resumed``: the model spec of a resumed run; None for a new run, whose settings name the model.

    Raises UserError for weights that cannot be read, a model that cannot be built, or settings that do not fit it.
    """
    start = None
    if config.weights and resumed is None:
        from models.weights import download, load, read, transfer

        start = read.read_weights(download.fetch_weights(config.weights, ctx=ctx, offline=config.offline))
    source = resumed or config.model or (load.model_of(start) if start else DEFAULT_MODEL)
    model = build_detector(source, len(names), names=names, seed=config.seed, channels=channels)
    check_image_size(config.imgsz, model.stride, least_cells=2)  # batch norm needs more than one image of one cell
    log = get_logger()
    log.info(
        "%s: %s parameters, %s%s",
        model.spec["name"], f"{sum(p.numel() for p in model.parameters()):,}", counted(len(names), "class"),
        "" if start or resumed else ", random weights",
    )  # fmt: skip
    filled = transfer.fill_model(model, start, grow=config.keep_old) if start else {}
    # A single number n freezes layers 0 to n - 1.
    frozen = set(range(config.freeze[0]) if len(config.freeze) == 1 else config.freeze)
    flag, last = f"--freeze {' '.join(map(str, config.freeze))}", len(model.model) - 1
    if min(config.freeze, default=0) < 0 or max(frozen, default=0) > last:
        raise UserError(f"{flag}: the model has layers 0 to {last}")
    if frozen:
        freeze_layers(model, frozen)
        if not any(p.requires_grad for p in model.parameters()):
            raise UserError(f"{flag}: leaves no layer to train")
        log.info("frozen: layers %s", ", ".join(map(str, sorted(frozen))))
    origin = download.origin_of_run(start) if start else RANDOM
    return model.to(ctx.device, memory_format=torch.channels_last), filled, origin
