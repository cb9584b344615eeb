"""A trainer with a real step of a tiny model, a loader in memory, and hooks, checkpointer and validation that only
watch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from engine.evaluation.fitness import Fitness
from engine.evaluation.metrics import METRICS
from engine.optim.schedule import step_plan
from engine.train.checkpoint import CheckpointHeader, Progress, UnscoredEpoch
from engine.train.choices import Choices
from engine.train.control import Action, RunControl
from engine.train.resume import WorkLeft
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

    def __init__(self) -> None:
        self.table = ResultsTable()
        self.saved: list[tuple[int, int, CheckpointHeader]] = []
        self.best: list[int] = []  # epochs whose weights have become best.pt

    def save_last(self, step: Any, header: CheckpointHeader) -> None:
        self.saved.append(
            (header.progress.epoch, header.progress.batch, replace(header, progress=replace(header.progress)))
        )

    def save_epoch(self, step: Any, header: CheckpointHeader, *, is_best: bool) -> None:
        self.save_last(step, header)
        self.best += [header.progress.epoch] * is_best

    def write_weights(self, step: Any, header: CheckpointHeader, path: Path) -> None:
        write_checkpoint({"ema": step.ema.module.state_dict(), "progress": {"epoch": header.progress.epoch}}, path)

    def save_best(self, content: dict[str, Any]) -> None:
        self.best.append(content["progress"]["epoch"])

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
    """Stands in for the evaluator and the evaluating processes: all scores of an epoch are a tenth of its number, or
    what ``ap`` says, and AP50 is ``ap50`` if it is given. ``during``: called in each validation."""

    def __init__(
        self, ap: dict[int, float] | None = None, during: Callable[[], None] = lambda: None, ap50: float | None = None
    ) -> None:
        self.runs = 0
        self._ap = ap or {}
        self._ap50 = ap50
        self._during = during
        self._sent = 0

    def run(self, model: Any, loader: Any, *, should_stop: Callable[[], bool]) -> Any:
        self.runs += 1
        self._during()
        return None if should_stop() else self._evaluation(self.runs)

    def has_sent(self, epoch: int) -> bool:
        return self._sent == epoch

    def send(self, epoch: int, *, is_closing: bool) -> None:
        self._sent = epoch

    def wait(self, epoch: int, should_stop: Callable[[], bool]) -> Any:
        self._during()
        return None if should_stop() else self._evaluation(epoch)

    def _evaluation(self, epoch: int) -> Any:
        metrics = {metric.name: self._ap.get(epoch, epoch / 10) for metric in METRICS}
        if self._ap50 is not None:
            metrics["AP50"] = self._ap50
        result = SimpleNamespace(metrics=metrics, threshold=None, class_ap=np.ones(1), extras={})
        return SimpleNamespace(result=result)


def build(
    *hooks: Hook,
    folder: Path = Path(),
    progress: Progress | None = None,
    unscored: UnscoredEpoch | None = None,
    work_left: WorkLeft = WorkLeft.STEPS,
    hyp: Hyperparameters | None = None,
    signals: StopSignals | None = None,
    epochs: int = 2,
    scores: Scores | None = None,
    is_late: bool = False,
    step: Any = None,
    fitness: str = "AP",
    **settings: Any,
) -> Trainer:
    """Builds a trainer. ``is_late``: other processes validate (``--eval-ranks``)."""
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
        lr_mult=1.0,
        new_lr_mult=1.0,
        because={},
    )
    feed = Feed(
        loader=loader,
        val_loader=None,  # type: ignore[arg-type]
        criterion=step.criterion,
        evaluator=scores,  # type: ignore[arg-type]
        fitness=Fitness.parse("AP", ["a"]),
        full_batch=2,
        has_regions=False,
    )
    checkpointer: Any = RecordingCheckpointer()
    run = TrainingRun(
        ctx=ctx,
        folder=folder,
        started_from=None,
        work_left=work_left,
        description=checkpoint_of().description,
        choices=choices,
        feed=feed,
        step=step,
        progress=progress or Progress(),
        unscored=unscored,
        control=RunControl(ctx, signals or StopSignals()),
        checkpointer=checkpointer,
        eval_ranks=scores if is_late else None,  # type: ignore[arg-type]
    )
    return Trainer(run, hooks)


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in trainer.step.model.parameters()])
