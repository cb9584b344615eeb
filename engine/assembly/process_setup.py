"""Sets up each process of a run before it opens anything: logging, threads and deterministic kernels. Advises on what
the machine lacks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from engine.parallel.virtual_ranks import resolve_virtual_ranks
from utils.config.settings import RunSettings, TrainConfig, changed_settings
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.logger import configure_logging, get_logger
from utils.machine.limits import memory_advice
from utils.strings import counted


def prepare_process(ctx: DistributedContext, settings: RunSettings, startup_messages: Sequence[str] = ()) -> None:
    """Sets up logging, threads and determinism. Logs the messages, and the settings that differ from the defaults."""
    config = settings.config
    configure_logging(ctx.is_main, file_follows=True)
    if config.threads or (resolve_virtual_ranks(ctx, config) and ctx.device.type == "cpu"):
        # The number of threads that share a sum affects its rounding, so it must not depend on the number of processes.
        torch.set_num_threads(config.threads or 1)
    choose_kernels(config)
    log = get_logger()
    for message in startup_messages:
        log.info("%s", message)
    log.info("%s on %s, torch %s", counted(ctx.world_size, "process"), ctx.device, torch.__version__)
    changed_config = changed_settings(config)
    changed_config.pop("override", None)  # is in the hyper-parameters
    changed_hyp = changed_settings(settings.hyp)
    log.info("settings: %s; hyper-parameters: %s", _listing(changed_config), _listing(changed_hyp))


def _listing(values: dict[str, Any]) -> str:
    """Returns ``name=value, ...``, or "defaults" if there are none."""
    pairs = [f"{name}={'null' if value is None else value}" for name, value in values.items()]
    return ", ".join(pairs) or "defaults"


def advice_on_memory(ctx: DistributedContext, config: TrainConfig) -> str:
    """Returns advice for a run that exceeds the memory of the machine or of its GPUs."""
    return memory_advice(config.batch_size, config.imgsz, min_batch=ctx.world_size, device=ctx.device.type)


def check_kernels(config: TrainConfig, model: nn.Module, device: torch.device) -> None:
    """Raises UserError for a layer whose gradient torch cannot compute deterministically on a GPU, with
    ``--deterministic``."""
    if not config.deterministic or device.type != "cuda":
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Upsample) and module.mode == "bicubic":
            raise UserError(
                f"--deterministic: layer {name} (Upsample, bicubic) has no deterministic gradient on a GPU; "
                "make it nearest or bilinear in the model YAML, or leave out --deterministic"
            )


def choose_kernels(config: TrainConfig) -> None:
    """Makes torch use deterministic kernels with ``--deterministic``."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, torch refuses matrix products
        torch.use_deterministic_algorithms(True)
        # Nothing here reads uninitialized memory, and filling it takes time. torch makes the setting a property of its
        # module at run time, which a type checker cannot see.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
