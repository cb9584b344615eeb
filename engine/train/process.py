"""What each process of a run sets up and checks before it trains.

It sets up the log, threads and kernels, and checks that all processes agree.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from engine.checkpoint.run import Run, claim_folder
from engine.parallel.virtual_ranks import resolve_virtual_ranks
from utils.config.settings import TrainConfig, ValConfig, changed_settings
from utils.distributed.agreement import check_agreement, product_version
from utils.distributed.context import DistributedContext
from utils.files.checked_open import open_direct
from utils.files.safe_io import write_whole
from utils.logger import configure_logging, continue_in_file, get_logger
from utils.strings import counted

# Settings of a process or its machine: they change neither the numbers nor which processes wait for each other.
MAY_DIFFER = frozenset(
    ("device", "workers", "stage", "cache_dir", "offline", "spawn", "local_rank", "local_world_size")
)
# Their values are compared, not where they come from.
_SOURCES_OF_HYPERPARAMETERS = frozenset(("hyp", "override"))


def check_same_start(ctx: DistributedContext, config: TrainConfig | ValConfig) -> None:
    """Raises UserError on all processes when their flags, code or torch differ. Called before anything is opened."""
    settings = _without(asdict(config), MAY_DIFFER | _SOURCES_OF_HYPERPARAMETERS)
    facts = {"the code": product_version(), "torch": torch.__version__, "the device's type": ctx.device.type}
    facts |= {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
    facts["--stage"] = "given" if config.stage else "not given"
    check_agreement(ctx, "start", facts)


def check_same_run(ctx: DistributedContext, run: Run) -> None:
    """Raises UserError on all processes when their settings or hyper-parameters, or the progress of the checkpoint that
    they resume from, differ."""
    settings = _without(asdict(run.config), MAY_DIFFER | _SOURCES_OF_HYPERPARAMETERS)
    facts: dict[str, object] = {f"setting {name}": value for name, value in settings.items()}
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


def _without(settings: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


def _checksum(tensor: Tensor) -> int:
    """The sum of the bits as integers, which does not depend on the order of addition."""
    flat = tensor.detach().reshape(-1)
    return int(flat.view(torch.int32 if flat.element_size() == 4 else torch.uint8).sum(dtype=torch.int64))


def prepare_process(ctx: DistributedContext, run: Run) -> None:
    """Sets up logging, threads and determinism, and logs the settings that differ from the defaults; `open_folder`
    stores all."""
    configure_logging(ctx.is_main, file_follows=True)
    if run.config.threads or (resolve_virtual_ranks(ctx, run.config) and ctx.device.type == "cpu"):
        # How many threads share a sum decides its rounding, so every number of processes must use as many.
        torch.set_num_threads(run.config.threads or 1)
    _choose_kernels(ctx, run.config)
    log = get_logger()
    for line in run.lines:
        log.info("%s", line)
    log.info("%s on %s, torch %s", counted(ctx.world_size, "process"), ctx.device, torch.__version__)
    changed = [changed_settings(run.config), changed_settings(run.hyp)]
    changed[0].pop("override", None)  # is in the hyper-parameters
    lists = [", ".join(f"{name}={value}" for name, value in part.items()) or "defaults" for part in changed]
    log.info("settings: %s; hyper-parameters: %s", *lists)


@contextmanager
def open_folder(ctx: DistributedContext, run: Run) -> Iterator[Run]:
    """`claim_folder`, with the effective settings and the log, from its first line on, in the folder. Every rank enters
    it."""
    with claim_folder(ctx, run) as run:
        if ctx.is_main:
            continue_in_file(run.folder / "train.log", open_direct)
            write_whole(run.folder / "settings.yaml", yaml.safe_dump(_settings(run), sort_keys=False))
        get_logger().info("run folder %s (settings.yaml: all settings)", run.folder)
        yield run


def _choose_kernels(ctx: DistributedContext, config: TrainConfig) -> None:
    """Deterministic kernels with ``--deterministic``; otherwise those that cuDNN finds fastest, if sizes are fixed."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it, or refuses matrix products
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    elif ctx.device.type == "cuda":
        torch.backends.cudnn.benchmark = not (config.multi_scale or config.rect)


def _settings(run: Run) -> dict[str, dict[str, Any]]:
    return {"config": asdict(run.config), "hyp": asdict(run.hyp)}
