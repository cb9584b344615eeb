"""A training run as hooks see it, without its loop."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.optim.schedule import StepPlan
from engine.parallel.control import RunControl
from engine.train.checkpoint import Checkpoint, Checkpointer, Progress
from engine.train.resume import Remaining, TrainingRun
from tests.helpers.run_checkpoints import STORED, checkpoint_of
from utils.config.settings import RunSettings, TrainConfig
from utils.distributed.context import DistributedContext
from utils.process.signals import StopSignals

SINGLE = DistributedContext.single()


@dataclass
class HookTraining:
    """Stands in for `engine.train.trainer.Trainer`, with a real run, control and checkpointer. A test gives
    the parts of the model and the loader that its hook reads."""

    run: TrainingRun
    checkpointer: Checkpointer
    ctx: DistributedContext = SINGLE
    progress: Progress = field(default_factory=Progress)
    steps: StepPlan = StepPlan(accumulate=1, per_epoch=1, epochs=1)
    step: Any = None
    loader: Any = None
    step_samples: int = 0
    data_wait_s: float = 0.0

    def __post_init__(self) -> None:
        self.epochs = self.steps.epochs
        self.started = time.monotonic()
        self.control = RunControl(self.ctx, StopSignals())

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def set_epochs(self, epochs: int) -> None:
        self.epochs = epochs


def hook_training(
    folder: Path = Path(),
    *,
    config: TrainConfig | None = None,
    run_id: str = "run",
    started_from: Checkpoint | None = None,
    ctx: DistributedContext = SINGLE,
    **parts: Any,
) -> HookTraining:
    """Returns a training in ``folder``. ``parts``: fields of `HookTraining`."""
    description = checkpoint_of(config=config or STORED["config"]).description
    settings = RunSettings(description.config, description.hyp)
    run = TrainingRun(
        folder=folder, run_id=run_id, settings=settings, started_from=started_from, remaining=Remaining.STEPS
    )
    checkpointer = Checkpointer(folder, ctx=ctx, description=description)
    return HookTraining(run, checkpointer, ctx=ctx, **parts)


def started_from(progress: Progress, **stored: Any) -> Checkpoint:
    """Returns a run's record of the checkpoint from which it continues. ``stored``: see `checkpoint_of`."""
    return checkpoint_of(progress=progress, **stored).record()
