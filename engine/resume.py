"""Which checkpoint a run goes on from, and with which settings."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

from utils.config import Hyperparameters, TrainConfig, from_mapping
from utils.errors import UserError

log = logging.getLogger("lockstep")

# These describe the process that resumes, not the run.
_OF_THE_PROCESS = ("resume", "local_rank", "spawn")
# Other values would be another run: its weights could not be put into the model, or its order would be undefined.
_FIXED = ("model", "weights", "single_cls")


def newest_checkpoint(project: str | Path) -> Path:
    """The last.pt under ``project`` that was written last. Raises UserError when there is none."""
    found = sorted(Path(project).glob("*/last.pt"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UserError(f"--resume: no last.pt under {project}; name one: --resume PATH/last.pt")
    return found[-1]


def resumed_config(
    stored: dict[str, Any], current: TrainConfig, given: Collection[str], path: str | Path
) -> tuple[TrainConfig, list[str]]:
    """The checkpoint's settings with those that the command line gives on top, and a line for each that changed."""
    base = from_mapping(TrainConfig, stored, f"{path}: config")
    changes: dict[str, Any] = {name: getattr(current, name) for name in _OF_THE_PROCESS}
    lines = []
    for name in sorted(set(given) - set(_OF_THE_PROCESS)):
        old, new = getattr(base, name), getattr(current, name)
        if old == new:
            continue
        if name in _FIXED:
            raise UserError(
                f"--{name.replace('_', '-')} {new}: the run being resumed has {old!r}; start a new run with --weights"
            )
        changes[name] = new
        lines.append(f"resume: {name} {old!r} -> {new!r}")
    return dataclasses.replace(base, **changes), lines


def resumed_hyperparameters(
    stored: dict[str, Any], overrides: Hyperparameters, given: Collection[str], path: str | Path
):
    """The checkpoint's hyper-parameters, or those of ``--hyp``/``--set`` when the command line gives any."""
    if {"hyp", "override"} & set(given):
        return overrides
    return from_mapping(Hyperparameters, stored, f"{path}: hyp")
