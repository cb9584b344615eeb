"""A trainer with a real step of a tiny model, a loader in memory, and hooks and a validator that only watch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from engine.checkpoint.progress import CheckpointHeader, PendingEpoch, Progress
from engine.eval_ranks.messages import WeightsMessage
from engine.evaluation.fitness import Fitness
from engine.hooks.hook import Action, Hook, Training
from engine.optim.schedule import step_plan
from engine.parallel.control import RunControl
from engine.run.run import Remaining, RunSettings, TrainingRun
from engine.train.epoch_results import EpochResults
from engine.train.report_only import ReportOnlyTrainer
from engine.train.step import TrainStep
from engine.train.trainer import Trainer, Validator
from engine.train.validation import LocalValidator, RemoteValidator, RunValidation
from models.detector import build_detector
from tests.helpers.steps import make_train_step
from tests.helpers.tiny import TINY_MODEL, make_batch
from utils.config.settings import Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import REQUEUE
from utils.process.signals import StopSignals

BATCHES = 3
POINTS = [name for name in vars(Hook) if not name.startswith("_") and name != "decides_next_epoch"]


class Loader:
    """Three batches an epoch, keyed by their position."""

    renderer = None
    class_weights = None
    samples = range(2 * BATCHES)

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return BATCHES

    def start_at(self, epoch: int, batch: int) -> None:
        self.position = epoch * BATCHES + batch

    def __iter__(self):
        while True:
            yield make_batch(2, seed=self.position)
            self.position += 1

    def global_images(self, batch: int) -> int:
        return 2

    global_samples = global_images


class RecordingCheckpointer:
    """Stands in for the checkpointer: records the position of the run at each save."""

    last = Path("last.pt")

    def __init__(self) -> None:
        self.saved: list[tuple[int, int, CheckpointHeader]] = []
        self.epochs: list[tuple[int, bool]] = []
        self.scored: list[tuple[int, bool]] = []

    def save_last(self, step, header) -> None:
        self.saved.append((header.progress.epoch, header.progress.batch, header))

    def save_epoch(self, step, header, *, is_best) -> None:
        self.save_last(step, header)
        self.epochs.append((header.progress.epoch, is_best))

    def save_scored(self, pending, progress, *, is_best, metrics) -> None:
        self.scored.append((pending.progress.epoch, is_best))

    def wait(self) -> None: ...
    def flush(self) -> None: ...
    def check(self) -> None: ...
    def set_epochs(self, epochs: int) -> None: ...


class Watch(Hook):
    """Records each call with its position, and returns the given actions: {point: (epoch, batch, action)}."""

    def __init__(self, **answers: tuple[int, int, Action]) -> None:
        self.calls = []
        self._answers = answers
        for point in POINTS:
            setattr(self, point, partial(self._note, point))

    def _note(self, point: str, trainer: Training | None = None, *args) -> Action:
        position = (trainer.progress.epoch, trainer.progress.batch) if trainer else ()
        self.calls.append((point, *position))
        *wanted, action = self._answers.get(point, (Action.CONTINUE,))
        return action if list(position) == wanted else Action.CONTINUE

    def of(self, *names: str) -> list[tuple]:
        return [call for call in self.calls if call[0] in names]


class FakeEvaluator:
    """Stands in for the evaluator. A signal ends its run number ``stopped_run``, from 1."""

    def __init__(self, signals: StopSignals | None = None, stopped_run: int = 0) -> None:
        self.runs = 0
        self._signals = signals
        self._stopped_run = stopped_run

    def run(self, model, loader, *, should_stop: Callable[[], bool]) -> None:
        self.runs += 1
        if self.runs == self._stopped_run:
            self._signals.code = REQUEUE
            assert should_stop()


class Results(EpochResults):
    """Returns scores that depend on the number of the epoch. ``best_epoch`` has the best."""

    def __init__(self, best_epoch: int = 0) -> None:
        super().__init__(Fitness.parse("AP", ["a"]))
        self._best_epoch = best_epoch

    def fill_in(self, ctx, epoch, progress, *, seconds) -> None:
        super().fill_in(ctx, epoch, progress, seconds=seconds)
        epoch.is_best = epoch.number == self._best_epoch
        epoch.metrics = {"AP": epoch.number / 10}


BuildValidator = Callable[[TrainStep, RunControl], Validator]


def local(evaluator: FakeEvaluator | None = None) -> BuildValidator:
    validation = RunValidation(loader=None, evaluator=evaluator or FakeEvaluator())
    return lambda step, control: LocalValidator(validation, step, control)


def remote(evaluator: FakeEvaluator | None = None) -> BuildValidator:
    def build_validator(step: TrainStep, control: RunControl) -> RemoteValidator:
        return RemoteValidator(step.ctx, local(evaluator)(step, control), Service(), control)

    return build_validator


class Service:
    """Stands in for the evaluating processes, which are free for the first epoch, and whose scores are late."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def can_take_weights(self) -> bool:
        return not self.sent

    def send(self, epoch: int, weights: WeightsMessage) -> None:
        self.sent.append(epoch)

    def has_scores(self) -> bool:
        return False

    def collect(self, should_stop: Callable[[], bool]) -> None:
        assert not should_stop()


def build(
    *hooks: Hook,
    progress: Progress | None = None,
    pending: PendingEpoch | None = None,
    hyp: Hyperparameters | None = None,
    signals: StopSignals | None = None,
    epochs: int = 2,
    validator: BuildValidator | None = None,
    best_epoch: int = 0,
    **settings,
) -> Trainer:
    ctx = DistributedContext.single()
    step = make_train_step(ctx, build_detector(TINY_MODEL, 2, seed=1))
    settings = RunSettings(TrainConfig(epochs=epochs, **settings), hyp or Hyperparameters())
    run = TrainingRun(folder=Path(), run_id="", settings=settings, started_from=None, remaining=Remaining.STEPS)
    return trainer_of(
        run,
        step,
        progress or Progress(),
        *hooks,
        pending=pending,
        signals=signals,
        validator=validator,
        best_epoch=best_epoch,
    )


def trainer_of(
    run: TrainingRun,
    step: TrainStep,
    progress: Progress,
    *hooks: Hook,
    pending: PendingEpoch | None = None,
    signals: StopSignals | None = None,
    validator: BuildValidator | None = None,
    best_epoch: int = 0,
) -> Trainer:
    loader = Loader()
    control = RunControl(step.ctx, signals or StopSignals())
    trainer_class = ReportOnlyTrainer if run.remaining is Remaining.REPORT else Trainer
    return trainer_class(
        run=run,
        step=step,
        loader=loader,
        steps=step_plan(run.config, len(loader)),
        progress=progress,
        pending=pending,
        control=control,
        checkpointer=RecordingCheckpointer(),
        validator=(validator or local())(step, control),
        results=Results(best_epoch),
        hooks=hooks,
    )


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in trainer.step.model.parameters()])


class FailingHook(Hook):
    """Fails after the step of this number."""

    def __init__(self, updates: int) -> None:
        self._updates = updates

    def after_step(self, trainer: Training) -> None:
        if trainer.progress.updates == self._updates:
            trainer.control.fail("on_step failed")
