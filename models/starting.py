"""The model that a run starts from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from models.detector import Detector, build_detector
from models.freezing import freeze_layers, layers_to_freeze
from models.recognition import model_of
from models.stored_weights import read_weights
from models.transfer import transfer_weights
from utils.config import TrainConfig
from utils.distributed import DistributedContext
from utils.downloads import fetch_weights
from utils.image_size import check_image_size
from utils.logger import get_logger

DEFAULT_MODEL = "yolov8n"


def build_starting_model(
    ctx: DistributedContext, config: TrainConfig, names: Sequence[str], *, resumed: dict[str, Any] | None
) -> tuple[Detector, tuple[str, ...]]:
    """The detector on its device, with starting weights and frozen layers; resumed weights come later. And the names
    of those parameters that starting weights filled, be it in part.

    Args:
        names: of the classes.
        resumed: the spec of the model that a resumed run has; None: the run begins, and the settings say which.

    Raises:
        UserError: weights that cannot be had, a model that cannot be built, or settings that do not fit it.
    """
    stored = None
    if config.weights and resumed is None:
        stored = read_weights(fetch_weights(config.weights, ctx=ctx, offline=config.offline))
    if resumed is not None:
        source = resumed
    else:
        source = config.model or (model_of(stored) if stored else DEFAULT_MODEL)
    model = build_detector(source, len(names), names=names, seed=config.seed)
    check_image_size(config.imgsz, model.stride, least_cells=2)  # batch norm cannot take one picture of one cell
    log = get_logger()
    log.info(
        "%s: %s parameters, %d classes",
        model.spec["name"], f"{sum(p.numel() for p in model.parameters()):,}", len(names),
    )  # fmt: skip
    filled: tuple[str, ...] = ()
    if stored:
        report = transfer_weights(model, stored)
        filled = tuple(name for name, _ in model.named_parameters() if name not in report.skipped)
        for line in report.lines():
            log.info("%s", line)
    if frozen := layers_to_freeze(config.freeze, len(model.model)):
        freeze_layers(model, frozen)
        log.info("frozen: layers %s", ", ".join(map(str, sorted(frozen))))
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    return model.to(ctx.device, memory_format=layout), filled
