"""The values that describe a run: its command, settings and plan, and the run itself once it has a folder."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from data.dataset.spec import DataSource
from engine.checkpoint.checkpoint import CheckpointFacts
from engine.checkpoint.description import NamedFiles, RunDescription
from engine.checkpoint.progress import Progress, RunConditions
from utils.config.settings import Hyperparameters, TrainConfig, names_with
from utils.errors import UserError

# Settings that name files.
PATH_SETTINGS = names_with(TrainConfig, is_path=True)


@dataclass(frozen=True)
class RunSettings:
    """All settings of a run."""

    config: TrainConfig  # resolved (resolve_paths.py): paths are absolute
    hyp: Hyperparameters
    files: NamedFiles = field(default_factory=NamedFiles)  # files that the settings name

    def with_epochs(self, epochs: int) -> RunSettings:
        """Returns the settings with another number of epochs."""
        return replace(self, config=replace(self.config, epochs=epochs))

    @property
    def overridden(self) -> set[str]:
        """Names of the hyper-parameters that ``--set`` gives."""
        return {item.partition("=")[0].strip() for item in self.config.override}

    def by_name(self) -> dict[str, Any]:
        """Returns all flags and hyper-parameters by name."""
        return {**asdict(self.config), **asdict(self.hyp)}


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """A command line that starts or restarts a run, and its processes, on rank 0."""

    config: TrainConfig  # settings of the command line, resolved (resolve_paths.py)
    explicit_flags: Collection[str]  # names of the settings that the command line gives
    files: NamedFiles  # without checksums
    launchers: list[str]  # torchrun processes that started the ranks; "" without one
    world_size: int
    device_type: str


@dataclass(frozen=True, kw_only=True)
class StartedFrom:
    """The checkpoint from which a run continues, without its tensors."""

    path: Path
    description: RunDescription  # description of the run when it was saved
    progress: Progress
    conditions: RunConditions
    metrics: dict[str, float]  # scores of its weights; empty: not validated
    is_pending: bool  # the newest epoch had not been scored yet
    ended_by_callback: bool  # see `CheckpointHeader`

    @staticmethod
    def of(checkpoint: CheckpointFacts) -> StartedFrom:
        header = checkpoint.header
        return StartedFrom(
            path=checkpoint.path,
            description=checkpoint.description,
            progress=header.progress,
            conditions=header.run,
            metrics=header.metrics,
            is_pending=header.pending is not None,
            ended_by_callback=header.ended_by_callback,
        )

    @property
    def position(self) -> str:
        """The position of the checkpoint in the run, in words."""
        return self.progress.describe(self.conditions.epoch_batches)

    @property
    def seconds(self) -> float:
        """Seconds that the run had trained."""
        return self.conditions.seconds

    def lacks_scores(self, epochs: int) -> bool:
        """Returns whether a run of ``epochs`` has to score its newest epoch first: other processes were validating it,
        or ``--val-every`` has left it out, and it is now the last."""
        is_between_epochs = self.progress.batch == 0  # otherwise its weights have been overwritten
        is_last = self.progress.epoch >= epochs
        return self.is_pending or (is_between_epochs and is_last and not self.metrics)


class Remaining(enum.Enum):
    """The work that is left of a run when a command starts it."""

    STEPS = "steps"  # steps, scores and the report
    SCORES = "scores"  # the scores of the last epoch, and the report
    REPORT = "report"  # the report; if a callback has ended the run, perhaps also the scores of its newest epoch


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """The fields that all plans share."""

    settings: RunSettings
    # Settings whose paths each process resolves itself: the same content may be in another folder on another node.
    local_paths: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class NewRun(_Plan):
    """The plan of a run that starts from the beginning.

    Its settings may leave the batch size (-1), ``lr_mult`` (None) and the optimizer (auto) open, which
    engine/assembly/choices.py chooses.
    """

    local_paths: frozenset[str] = PATH_SETTINGS
    launchers: list[str]  # see `TrainCommand`
    folder: Path | None = None  # locked, and its newest run has saved nothing; None: `claim_folder` makes it
    startup_messages: list[str] = field(default_factory=list)  # written to the log before anything else

    @property
    def started_from(self) -> None:
        """There is no checkpoint, see `ContinuedRun`."""
        return None

    @property
    def remaining(self) -> Remaining:
        return Remaining.STEPS

    @property
    def data_source(self) -> DataSource:
        config = self.settings.config
        output = str(self.folder or config.folder) if config.plots else ""
        return replace(DataSource.of_training(config), output=output, continues_output=self.folder is not None)

    @property
    def existing_folder(self) -> Path | None:
        """The folder of the run if it may have files already; None if `claim_folder` makes a new one."""
        config = self.settings.config
        if self.folder is None and config.exist_ok:
            return config.folder
        return self.folder


@dataclass(frozen=True, kw_only=True)
class ContinuedRun(_Plan):
    """The plan of a run that continues to train from a checkpoint, or only has to write its report."""

    stored: RunSettings  # settings of the run so far; files that have moved have their new paths
    launchers: list[str]  # see `TrainCommand`
    started_from: StartedFrom
    known_root: str  # see `DataSource`; "": not stored (--stage), or the command line names another data set
    end_reason: str  # see `EndedRun`; "": it has not ended, because steps or scores are missing
    change_messages: list[str]  # messages about settings and files
    machine_messages: list[str]  # messages about processes and devices

    @property
    def startup_messages(self) -> list[str]:
        """Messages that are written to the log before anything else."""
        if self.remaining is Remaining.REPORT:
            return [*self.change_messages, f"writing the report: {self.end_reason}"]
        start = f"resuming {self.started_from.path} after {self.started_from.position}"
        return [start, *self.change_messages, *self.machine_messages]

    @property
    def remaining(self) -> Remaining:
        if self.end_reason:
            return Remaining.REPORT
        if self.started_from.progress.epoch < self.settings.config.epochs:
            return Remaining.STEPS
        return Remaining.SCORES

    @property
    def lacks_scores(self) -> bool:
        """Whether the newest epoch has to be scored first, see `StartedFrom`."""
        return self.started_from.lacks_scores(self.settings.config.epochs)

    @property
    def scores_epochs(self) -> bool:
        """Whether epochs are scored, so that another one may become the best; a report alone scores none."""
        return self.remaining is not Remaining.REPORT or self.lacks_scores

    @property
    def data_source(self) -> DataSource:
        config = self.settings.config
        output = str(self.folder) if config.plots else ""
        source = replace(DataSource.of_training(config), output=output, continues_output=True)
        if not self.known_root:
            return source
        return replace(source, known_root=self.known_root, stored_in=str(self.started_from.path))

    @property
    def folder(self) -> Path:
        """The folder of the run, which is locked."""
        return self.started_from.path.parent

    @property
    def existing_folder(self) -> Path:
        """The same folder, see `NewRun`."""
        return self.folder


@dataclass(frozen=True, kw_only=True)
class EndedRun(_Plan):
    """The plan of a run that has ended and has its report; only exports may be missing. Works without last.pt."""

    folder: Path  # locked, unless it is read-only
    end_reason: str  # why it has ended, after how many epochs, and how to train on
    startup_messages: list[str]  # written to the log before anything else


# The plan of a command, made before data and model are opened. Equal on all ranks, except for settings of machines and
# the paths in `local_paths`.
RunPlan = NewRun | ContinuedRun


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A run that has its folder. Equal on all ranks but for the settings that differ in its plan.

    It does not change while the run trains. With ``--time``, its ``config.epochs`` are those that were planned at the
    start; `Trainer.epochs` are the current ones.
    """

    folder: Path
    run_id: str  # see `engine.checkpoint.newest_run`
    settings: RunSettings
    started_from: StartedFrom | None  # None: the run started from the beginning
    remaining: Remaining

    @property
    def config(self) -> TrainConfig:
        return self.settings.config

    @property
    def hyp(self) -> Hyperparameters:
        return self.settings.hyp


@dataclass(frozen=True)
class TrainingOutcome:
    """The result of a training: its folder and flags, and the failure of ``on_end``, if any. Without one, at most
    exports are missing; with one, the next start writes the report again."""

    folder: Path
    config: TrainConfig
    failure: UserError | None  # error of a callback's ``on_end``, on rank 0: to be raised after the exports
