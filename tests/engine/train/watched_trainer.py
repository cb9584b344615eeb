"""A trainer with a real step of a tiny model, a loader in memory, and hooks, checkpointer and validation that only
watch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from engine.evaluation.fitness import Fitness
from engine.evaluation.metrics import METRICS
from engine.optim.build import NOTHING_LOADED
from engine.optim.schedule import step_plan
from engine.train.checkpoint import CheckpointHeader, Progress, UnscoredEpoch, weights_path
from engine.train.choices import Choices
from engine.train.control import Action, RunControl
from engine.train.scoring import MAX_PENDING
from engine.train.trainer import Feed, Hook, Trainer, TrainingRun
from models.detector import build_detector
from tests.helpers.run_checkpoints import checkpoint_of
from tests.helpers.steps import make_train_step
from tests.helpers.tiny import TINY_MODEL, make_batch
from utils.config.settings import Hyperparameters, RunSettings, TrainConfig
from utils.distributed.context import DistributedContext
from utils.files.results_csv import ResultsTable
from utils.files.torch_file import write_checkpoint
from utils.process.signals import StopSignals

BATCHES = 3
POINTS = ["start", "after_step", "epoch_trained", "epoch_scored", "epoch_saved", "finish", "close"]


class Loader:
    """Three batches an epoch, keyed by their position."""

    samples = range(2 * BATCHES)

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return BATCHES

    def start_at(self, epoch: int, batch: int) -> None:
        self.position = epoch * BATCHES + batch

    def start(self) -> None: ...

    def __iter__(self):
        while True:
            yield make_batch(2, seed=self.position)
            self.position += 1

    def global_images(self, batch: int) -> int:
        return 2

    global_samples = global_images


class RecordingCheckpointer:
    """Records the position of the run at each save."""

    last = Path("last.pt")

    def __init__(self, folder: Path) -> None:
        self.table = ResultsTable()
        self.saved: list[tuple[int, int, CheckpointHeader]] = []
        self.best: list[int] = []  # epochs whose weights have become best.pt
        self.ends: list[int] = []  # epochs that may have a file of their own
        self._folder = folder

    def save(
        self,
        step: Any,
        header: CheckpointHeader,
        *,
        is_epoch_end: bool = False,
        is_best: bool = False,
        earlier_best=None,
    ) -> None:
        progress = header.progress
        self.saved.append((progress.epoch, progress.batch, replace(header, progress=replace(progress))))
        if is_epoch_end:
            self.ends.append(progress.epoch)
        if is_best:
            self.best.append(progress.epoch)
        elif earlier_best:
            self.best.append(earlier_best["progress"]["epoch"])

    def save_weights(self, step: Any, header: CheckpointHeader, epoch: int) -> None:
        content = {"ema": step.ema.module.state_dict(), "progress": {"epoch": header.progress.epoch}}
        write_checkpoint(content, weights_path(self._folder, epoch))

    def wait(self) -> None: ...
    def flush(self) -> None: ...
    def check(self) -> None: ...


class Watch(Hook):
    """Records each call with its position, and returns the given actions: {point: (epoch, batch, action)}."""

    def __init__(self, **answers: tuple[int, int, Action]) -> None:
        self.calls: list[tuple] = []
        self._answers = answers
        for point in POINTS:
            setattr(self, point, partial(self._note, point))

    def _note(self, point: str, trainer: Trainer | None = None, *epoch: Any) -> Action | None:
        position = (trainer.progress.epoch, trainer.progress.batch) if trainer else ()
        self.calls.append((point, *position, *(item.number for item in epoch)))
        *wanted, action = self._answers.get(point, (None,))
        return action if list(position) == wanted else None

    def of(self, *names: str) -> list[tuple]:
        return [call for call in self.calls if call[0] in names]


class Scores:
    """Stands in for a scorer: an epoch has a tenth of its number as its AP, or what ``ap`` says.

    Args:
        ap50: AP50 of all epochs; None: their AP.
        during: called in each validation.
        late: how many epochs later the scores come (``--eval-ranks``); 0: at once.
    """

    def __init__(
        self,
        ap: dict[int, float] | None = None,
        during: Callable[[], None] = lambda: None,
        late: int = 0,
        ap50: float | None = None,
    ) -> None:
        self._ap50 = ap50
        self.max_pending = MAX_PENDING if late else 0
        self._ap = ap or {}
        self._during = during
        self._late = late
        self._submitted: list[int] = []
        self.reads: list[tuple[int, bool]] = []  # epochs, and whether the run still has their weights

    def open(self) -> None: ...

    def submit(self, epoch: int, *, is_closing: bool) -> None:
        self._submitted.append(epoch)

    def is_ready(self, epoch: int) -> bool:
        return self._submitted[-1] - epoch >= self._late

    def read(self, epoch: int, *, is_closing: bool, is_newest: bool, should_stop: Callable[[], bool]) -> Any:
        self.reads.append((epoch, is_newest))
        self._during()
        if should_stop():
            return None
        metrics = {metric.name: self._ap.get(epoch, epoch / 10) for metric in METRICS}
        if self._ap50 is not None:
            metrics["AP50"] = self._ap50
        result = SimpleNamespace(metrics=metrics, threshold=None, class_ap=np.ones(1), extras={})
        return SimpleNamespace(result=result)


def build(
    *hooks: Hook,
    folder: Path = Path(),
    progress: Progress | None = None,
    unscored: Sequence[UnscoredEpoch] = (),
    takes_steps: bool = True,
    hyp: Hyperparameters | None = None,
    signals: StopSignals | None = None,
    epochs: int = 2,
    scores: Scores | None = None,
    step: Any = None,
    fitness: str = "AP",
    **settings: Any,
) -> Trainer:
    """Builds a trainer."""
    scores = scores or Scores()
    ctx = DistributedContext.single()
    step = step or make_train_step(ctx, build_detector(TINY_MODEL, 2, seed=1))
    loader: Any = Loader()
    config = TrainConfig(epochs=epochs, **settings)
    choices = Choices(
        settings=RunSettings(config, hyp or Hyperparameters()),
        steps=step_plan(config, len(loader)),
        amp_dtype=None,
        anchors=None,
        class_weights=None,
        loaded=NOTHING_LOADED,
        reasons={},
    )
    feed = Feed(
        loader=loader,
        val_loader=None,  # type: ignore[arg-type]
        criterion=step.criterion,
        evaluator=None,  # type: ignore[arg-type]
        fitness=Fitness.parse(fitness, ["a"]),
        full_batch=2,
        has_regions=False,
    )
    checkpointer: Any = RecordingCheckpointer(folder)
    run = TrainingRun(
        ctx=ctx,
        folder=folder,
        started_from=None,
        takes_steps=takes_steps,
        description=checkpoint_of().description,
        choices=choices,
        feed=feed,
        step=step,
        progress=progress or Progress(),
        unscored=list(unscored),
        control=RunControl(ctx, signals or StopSignals()),
        checkpointer=checkpointer,
        scorer=scores,
    )
    return Trainer(run, hooks)


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in trainer.step.model.parameters()])
