"""The subject of a report: a run or a checkpoint, and its newest validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data.index.index import DatasetIndex
from engine.evaluation.analysis import ErrorSplit
from engine.evaluation.fitness import Fitness
from engine.evaluation.result import EvalResult, Evaluation, Preview
from engine.issues.issue import CheckedSplit
from engine.optim.schedule import few_steps_warning, step_plan
from utils.config.settings import Hyperparameters, TrainConfig, ValConfig
from utils.detections import DetectionTable

BALANCING = ("repeat_factor", "cls_pw", "image_weights")  # settings that balance classes


@dataclass(frozen=True)
class Subject:
    """The run or checkpoint that a report is about."""

    title: str
    config: TrainConfig | ValConfig
    hyp: Hyperparameters | None
    machine: Sequence[tuple[str, str]]  # versions and the machine, see `machine_facts`
    imgsz: int
    stride: int
    train: DatasetIndex | None  # None: not known, for the validation of a checkpoint
    validated: CheckedSplit
    fitness: Fitness = Fitness("AP", "AP")
    batches: int = 0  # per epoch; 0 for the validation of a checkpoint
    best_epoch: int = -1  # epoch of the run's best.pt, see `Progress`; -1: none

    @property
    def names(self) -> Sequence[str]:
        """Class names."""
        return self.validated.index.names

    @property
    def epochs(self) -> int:
        """Planned epochs of the run; 0 for the validation of a checkpoint."""
        return self.config.epochs if isinstance(self.config, TrainConfig) else 0

    @property
    def balances(self) -> bool:
        """Whether the run weights classes or repeats images."""
        return any(getattr(self.config, name, 0) for name in BALANCING)

    @property
    def few_steps_warning(self) -> str:
        """Warning that the run has too few steps; "" if it has enough, or if ``--time`` decides."""
        config = self.config
        if not isinstance(config, TrainConfig) or config.time or not self.batches:
            return ""
        return few_steps_warning(step_plan(config, self.batches), from_weights=bool(config.weights))

    @property
    def splits(self) -> list[CheckedSplit]:
        """The known splits: the training split, if it is known, then the validated one."""
        if self.train is None:
            return [self.validated]
        return [CheckedSplit("train", self.train), self.validated]


@dataclass(frozen=True)
class ScoredValidation:
    """The scores and detections of a validation."""

    result: EvalResult
    scored: DetectionTable  # detections whose AP was computed
    shown: DetectionTable  # detections as detect.py shows them
    epoch: int = 0  # epoch of the training after which it ran; 0: validation of a checkpoint
    errors: ErrorSplit | None = None  # None: not computed yet
    preview: Preview | None = None

    @staticmethod
    def of(evaluation: Evaluation, *, epoch: int = 0, errors: ErrorSplit | None = None) -> ScoredValidation:
        return ScoredValidation(
            result=evaluation.result,
            scored=evaluation.for_ap,
            shown=evaluation.detected,
            epoch=epoch,
            errors=errors,
            preview=evaluation.preview,
        )
