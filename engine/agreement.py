"""Checks that all processes of a run have the same code, settings, model and progress."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from utils.config.settings import TrainConfig, ValConfig
from utils.distributed.agreement import check_agreement, product_version
from utils.distributed.context import DistributedContext

if TYPE_CHECKING:
    from engine.checkpoint.run import Run

# Settings of a process or its machine: they change neither the numbers nor which processes wait for each other.
MAY_DIFFER = frozenset(("device", "workers", "stage", "cache_dir", "offline", "spawn", "local_rank"))
# Of hyper-parameters: their values are compared, not where they come from.
_SOURCES = frozenset(("hyp", "override"))


def check_same_start(ctx: DistributedContext, config: TrainConfig | ValConfig) -> None:
    """Raises UserError on all processes when their flags, code or torch differ. Called before anything is opened."""
    facts = {"the code": product_version(), "torch": torch.__version__, "the device's type": ctx.device.type}
    facts |= {f"--{name.replace('_', '-')}": value for name, value in _compared(config).items()}
    facts["--stage"] = "given" if config.stage else "not given"
    check_agreement(ctx, "start", facts)


def check_same_run(ctx: DistributedContext, run: Run) -> None:
    """Raises UserError on all processes when their settings or hyper-parameters, or the progress of the checkpoint that
    they resume from, differ."""
    facts: dict[str, object] = {f"setting {name}": value for name, value in _compared(run.config).items()}
    facts |= {f"hyper-parameter {name}": value for name, value in asdict(run.hyp).items()}
    facts["the checkpoint's progress"] = asdict(run.checkpoint.progress) if run.checkpoint else "none"
    check_agreement(ctx, "run", facts)


def check_same_model(ctx: DistributedContext, model: nn.Module, from_files: Iterable[Tensor]) -> None:
    """Raises UserError on all processes when their models differ, or the weights ``from_files`` that they have read."""
    if ctx.world_size == 1:
        return
    facts: dict[str, object] = {"the class names": list(model.names), "the model": model.spec}
    facts["the checksum of the starting weights"] = sum(_checksum(tensor) for tensor in from_files)
    check_agreement(ctx, "model", facts)


def _compared(config: TrainConfig | ValConfig) -> dict[str, Any]:
    return {name: value for name, value in asdict(config).items() if name not in MAY_DIFFER | _SOURCES}


def _checksum(tensor: Tensor) -> int:
    """The sum of the bits as integers, which does not depend on the order of addition."""
    flat = tensor.detach().reshape(-1)
    return int(flat.view(torch.int32 if flat.element_size() == 4 else torch.uint8).sum(dtype=torch.int64))
