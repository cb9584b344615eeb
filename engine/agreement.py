"""What the processes of a run must have in common besides their data (`data.loader`), compared (`utils.agreement`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from engine.run import Run
from utils.agreement import check_agreement, product_version
from utils.config import TrainConfig, ValConfig, to_dict
from utils.distributed import DistributedContext

# Settings of a process or its machine: they change neither the numbers nor who waits for whom.
MAY_DIFFER = frozenset(
    ("device", "workers", "stage", "cache_dir", "offline", "spawn", "local_rank", "local_world_size")
)
# Compared as what is read from them.
_SOURCES_OF_HYPERPARAMETERS = frozenset(("hyp", "override"))


def check_same_start(ctx: DistributedContext, config: TrainConfig | ValConfig) -> None:
    """Before anything is opened. Raises UserError on all processes when their flags, code or torch differ."""
    settings = _without(to_dict(config), MAY_DIFFER | _SOURCES_OF_HYPERPARAMETERS)
    facts = {"the code": product_version(), "torch": torch.__version__, "the device's type": ctx.device.type}
    facts |= {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
    facts["--stage"] = "given" if config.stage else "not given"
    check_agreement(ctx, "start", facts)


def check_same_run(ctx: DistributedContext, run: Run) -> None:
    """Once the recipe, and the checkpoint of a resumed run, are read. Raises UserError on all processes."""
    settings = _without(to_dict(run.config), MAY_DIFFER | _SOURCES_OF_HYPERPARAMETERS)
    facts: dict[str, object] = {f"setting {name}": value for name, value in settings.items()}
    facts |= {f"hyper-parameter {name}": value for name, value in to_dict(run.hyp).items()}
    facts["the checkpoint's progress"] = run.content["progress"] if run.content else "none"
    check_agreement(ctx, "run", facts)


def check_same_model(ctx: DistributedContext, model: nn.Module, from_files: Iterable[Tensor]) -> None:
    """Raises UserError on all processes when their models differ, or the weights that came from files.

    Args:
        model: a detector.
        from_files: the weights that were read from a file.
    """
    if ctx.world_size == 1:
        return
    facts: dict[str, object] = {"the class names": list(model.names), "the model": model.spec}
    facts["the checksum of the starting weights"] = sum(_checksum(tensor) for tensor in from_files)
    check_agreement(ctx, "model", facts)


def _without(settings: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


def _checksum(tensor: Tensor) -> int:
    """Of the bits as integers, so that the order in which a machine adds does not matter."""
    flat = tensor.detach().reshape(-1)
    return int(flat.view(torch.int32 if flat.element_size() == 4 else torch.uint8).sum(dtype=torch.int64))
