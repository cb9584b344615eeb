"""A run: its settings, its plan, and the run itself once it has a folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data.source.dataset_spec import DataSource
from engine.checkpoint.checkpoint import Checkpoint
from utils.config.settings import Hyperparameters, TrainConfig


@dataclass(frozen=True)
class RunSettings:
    """All settings of a run."""

    config: TrainConfig
    hyp: Hyperparameters

    def by_name(self) -> dict[str, Any]:
        """Returns all flags and hyper-parameters by name."""
        return {**asdict(self.config), **asdict(self.hyp)}


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Settings and starting point of a run, before data and model are opened. Equal on all ranks.

    A new run has neither folder nor checkpoint yet. One that torchrun has restarted before its first checkpoint has a
    folder. One that continues has both: ``--resume`` names it, or torchrun has restarted it.

    The settings may leave the batch size (-1) and ``lr_mult`` (None) open, which engine/train/choices.py chooses.
    """

    settings: RunSettings
    data_source: DataSource
    folder: Path | None = None  # locked; None: `claim_folder` makes it
    checkpoint: Checkpoint | None = None  # from which the run continues; None: it starts from the beginning
    startup_messages: list[str] = field(default_factory=list)  # written to the log before anything else
    launchers: list[str] = field(default_factory=list)  # torchrun processes that started this command; "" without one


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A run that has its folder. Equal on all ranks; nothing in it changes while the run trains."""

    folder: Path
    settings: RunSettings
    checkpoint: Checkpoint | None = None  # from which the run continues, without its tensors; None: from the beginning

    @property
    def config(self) -> TrainConfig:
        return self.settings.config

    @property
    def hyp(self) -> Hyperparameters:
        return self.settings.hyp
