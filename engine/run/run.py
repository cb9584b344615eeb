"""A run: its settings, how it starts in this process, its plan, and the run itself once it has a folder."""

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


@dataclass(frozen=True)
class NewRun:
    """A run starts from the beginning, in a folder that `claim_folder` makes."""


@dataclass(frozen=True)
class RestartedRun:
    """torchrun has restarted a run before its first checkpoint: it starts from the beginning, in the folder it has."""

    folder: Path  # locked


@dataclass(frozen=True)
class ContinuedRun:
    """A run continues from a checkpoint: ``--resume`` names it, or torchrun has restarted the run that wrote it."""

    checkpoint: Checkpoint  # its tensors are freed once they have been restored
    data_root: str = ""  # folder of the data set as the checkpoint knows it; "": the command line names another

    @property
    def folder(self) -> Path:
        """The folder of the run, locked."""
        return self.checkpoint.path.parent


# `plan_run` decides which of the three a start is; the rest of a run asks it.
RunStart = NewRun | RestartedRun | ContinuedRun


def training_source(config: TrainConfig, start: RunStart) -> DataSource:
    """Returns the name of the run's data set, with where a checkpoint knows it to be."""
    known_root = start.data_root if isinstance(start, ContinuedRun) else ""
    stored_in = str(start.checkpoint.path) if isinstance(start, ContinuedRun) and known_root else ""
    return DataSource.of_training(config, known_root=known_root, stored_in=stored_in)


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a command will train, before anything but a checkpoint has been opened. Equal on all ranks.

    The settings may leave the batch size (-1) and ``lr_mult`` (None) open: engine/train/build.py chooses them.
    """

    settings: RunSettings
    start: RunStart
    startup_messages: list[str] = field(default_factory=list)  # written to the log before anything else
    launchers: list[str] = field(default_factory=list)  # torchrun processes that started this command; "" without one


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A run that has its folder. Equal on all ranks; nothing in it changes while the run trains."""

    folder: Path
    settings: RunSettings
    start: RunStart

    @property
    def config(self) -> TrainConfig:
        return self.settings.config

    @property
    def hyp(self) -> Hyperparameters:
        return self.settings.hyp
