"""A run: its settings, its plan, and the run itself once it has a folder."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data.source.dataset_spec import DataSource
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.description import RunDescription
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
class Command:
    """A command line that starts a run, or starts it again, and its launchers."""

    config: TrainConfig  # settings of the command line
    explicit_flags: Collection[str]  # names of the settings that the command line gives
    launchers: list[str]  # torchrun processes that started the ranks; "" without one


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Settings and starting point of a run that trains, or has to write its report, before data and model are opened.
    Equal on all ranks.

    A new run has neither folder nor checkpoint yet. One that starts again before its first checkpoint has a folder. One
    that continues has both (continuation.py).

    The settings may leave the batch size (-1), ``lr_mult`` (None) and the optimizer (auto) open, which
    engine/assembly/choices.py chooses, and name the data set by a relative path.
    """

    settings: RunSettings
    data_source: DataSource
    folder: Path | None = None  # locked; None: `claim_folder` makes it
    started_from: StartedFrom | None = None  # None: the run starts from the beginning
    checkpoint: Checkpoint | None = None  # that of `started_from`, until its state is in place (`restore_run`)
    only_reports: bool = False  # all epochs are done and scored; what follows the last one is missing
    startup_messages: list[str] = field(default_factory=list)  # written to the log before anything else
    launchers: list[str] = field(default_factory=list)  # torchrun processes that started this command; "" without one

    @property
    def used_folder(self) -> Path | None:
        """The folder of the run if it may have files already; None if `claim_folder` makes a new one."""
        config = self.settings.config
        if self.folder is None and config.exist_ok:
            return Path(config.project) / config.name
        return self.folder


@dataclass(frozen=True, kw_only=True)
class EndedRun:
    """A run that has written everything but perhaps files of ``--export``. It needs no last.pt. Equal on all ranks."""

    folder: Path  # locked
    run_id: str
    settings: RunSettings
    epochs: int  # that it has trained
    startup_messages: list[str]  # as in `RunPlan`


@dataclass(frozen=True, kw_only=True)
class StartedFrom:
    """What a run still knows of the checkpoint from which it has continued, without tensors."""

    path: Path
    description: RunDescription  # of the run when it was saved
    metrics: dict[str, float]  # scores of its weights; empty: not validated
    is_pending: bool  # the newest epoch had not been scored yet
    seconds: float  # that the run had trained

    @staticmethod
    def of(checkpoint: Checkpoint) -> StartedFrom:
        header = checkpoint.header
        return StartedFrom(
            path=checkpoint.path,
            description=checkpoint.description,
            metrics=header.metrics,
            is_pending=header.pending is not None,
            seconds=header.run.seconds,
        )


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A run that has its folder. Equal on all ranks; nothing in it changes while the run trains."""

    folder: Path
    run_id: str  # see `engine.checkpoint.newest_run`
    settings: RunSettings
    started_from: StartedFrom | None = None  # None: the run started from the beginning
    only_reports: bool = False  # see `RunPlan`

    @property
    def config(self) -> TrainConfig:
        return self.settings.config

    @property
    def hyp(self) -> Hyperparameters:
        return self.settings.hyp
