"""A trainer with a real step of a tiny model, a real ledger and a real saver, a loader in memory, and hooks, saves and
scores that a test watches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.evaluation.fitness import Fitness
from engine.evaluation.metrics import METRICS
from engine.optim.schedule import step_plan
from engine.train.checkpoint import Checkpoint, Progress, UnscoredEpoch
from engine.train.control import RunControl
from engine.train.ledger import Epoch, EpochLedger, LedgerState
from engine.train.loop import Hook, Trainer
from engine.train.saver import Saver
from models.detector import build_detector
from tests.helpers.run_checkpoints import checkpoint_of
from tests.helpers.steps import make_train_step
from tests.helpers.tiny import TINY_MODEL, make_batch
from utils.config.settings import Hyperparameters, RunSettings, TrainConfig
from utils.distributed.context import DistributedContext
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


class Save(NamedTuple):
    epoch: int
    batch: int
    ap: float | None  # of the averaged weights; None: not known
    unscored: list[int]
    best: int | None  # the epoch whose weights become best.pt


class WatchedSaver(Saver):
    """Writes files, and notes each save."""

    saves: list[Save]

    def save(self, ledger: EpochLedger, *, best: Epoch | None = None, ended_by_callback: bool = False) -> None:
        progress = ledger.progress
        ap = ledger.metrics.get("metrics/AP")
        unscored = [one.number for one in ledger.unscored]
        self.saves.append(Save(progress.epoch, progress.batch, ap, unscored, best.number if best else None))
        super().save(ledger, best=best, ended_by_callback=ended_by_callback)


class Watch(Hook):
    """Notes each call with its position."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        for point in POINTS:
            setattr(self, point, partial(self._note, point))

    def _note(self, point: str, trainer: Trainer | None = None, *epoch: Any) -> None:
        position = (trainer.progress.epoch, trainer.progress.batch) if trainer else ()
        self.calls.append((point, *position, *(item.number for item in epoch)))

    def of(self, *names: str) -> list[tuple]:
        return [call for call in self.calls if call[0] in names]


class Scores:
    """Stands in for a scorer: an epoch has a tenth of its number as its AP, or what ``ap`` says.

    Args:
        lag: as with ``--eval-ranks`` if it is 1; then each epoch's weights are written.
        ap50: AP50 of all epochs; None: their AP.
        during: called in each validation.
    """

    saver: Saver
    control: RunControl

    def __init__(
        self,
        ap: dict[int, float] | None = None,
        *,
        lag: int = 0,
        ap50: float | None = None,
        during: Callable[[], None] = lambda: None,
    ) -> None:
        self.lag = lag
        self.scored: list[int] = []
        self._ap = ap or {}
        self._ap50 = ap50
        self._during = during

    def open(self) -> None: ...

    def submit(self, epoch: UnscoredEpoch) -> None:
        if self.lag:
            self.saver.save_weights(epoch.number)

    def score(self, epoch: UnscoredEpoch) -> Any:
        self._during()
        if self.control.should_stop():
            return None
        self.scored.append(epoch.number)
        metrics = {metric.name: self._ap.get(epoch.number, epoch.number / 10) for metric in METRICS}
        if self._ap50 is not None:
            metrics["AP50"] = self._ap50
        result = SimpleNamespace(metrics=metrics, threshold=epoch.number / 100, class_ap=np.ones(1), extras={})
        return SimpleNamespace(result=result)


class WatchedTrainer(Trainer):
    saver: WatchedSaver

    @property
    def positions(self) -> list[tuple[int, int]]:
        return [(save.epoch, save.batch) for save in self.saver.saves]

    @property
    def best(self) -> list[int]:
        return [save.best for save in self.saver.saves if save.best is not None]

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.step.model.parameters()])


def build(
    folder: Path,
    *hooks: Hook,
    resumed: Checkpoint | None = None,
    progress: Progress | None = None,
    scores: Scores | None = None,
    hyp: Hyperparameters | None = None,
    signals: StopSignals | None = None,
    epochs: int = 2,
    fitness: str = "AP",
    takes_steps: bool = True,
    **settings: Any,
) -> WatchedTrainer:
    """Builds a trainer in ``folder``, new or from a checkpoint."""
    ctx = DistributedContext.single()
    step = make_train_step(ctx, build_detector(TINY_MODEL, 2, seed=1))
    state = LedgerState()
    if resumed is not None:
        resumed.restore(step)
        header = resumed.header
        progress = header.progress
        state = LedgerState(resumed.rows, header.metrics, header.unscored)
    progress = progress or Progress()
    loader: Any = Loader()
    config = TrainConfig(epochs=epochs, **settings)
    control = RunControl(ctx, signals or StopSignals())
    description = checkpoint_of(config=config).description
    saver = WatchedSaver(folder, step=step, loader=loader, progress=progress, description=description)
    saver.saves = []
    scorer = scores or Scores()
    scorer.saver = saver
    scorer.control = control
    return WatchedTrainer(
        ctx=ctx,
        settings=RunSettings(config, hyp or Hyperparameters()),
        steps=step_plan(config, len(loader)),
        step=step,
        loader=loader,
        progress=progress,
        ledger=EpochLedger(ctx, progress, Fitness.parse(fitness, ["a"]), scorer, control, state),
        saver=saver,
        control=control,
        hooks=hooks,
        takes_steps=takes_steps,
    )
