"""The validation of an epoch, and what follows from it: the best epoch, class weights, results.csv and TensorBoard."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from data.loading.loader import InfiniteDataLoader, ValidationLoader
from engine.checkpoint.progress import PendingEpoch, Progress
from engine.evaluation.evaluator import Evaluator
from engine.evaluation.metrics import METRICS, Fitness
from engine.evaluation.tables import format_table, result_rows
from engine.hooks.hook import Action, Epoch, Hook, Training
from utils.config.settings import validates_after
from utils.distributed.context import broadcast_object
from utils.errors import first_line
from utils.files.results_csv import CONFIDENCE_COLUMN, ResultsTable
from utils.strings import counted
from utils.structures import EvalResult, GroundTruth

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger("lockstep")


class Validation(Hook):
    """Validates the averaged weights every ``val_every`` epochs (0: in none of them) and after the last one."""

    def __init__(self, evaluator: Evaluator, loader: ValidationLoader, val_every: int) -> None:
        self.evaluator = evaluator
        self.loader = loader
        self._val_every = val_every

    def is_due(self, epoch: int, epochs: int) -> bool:
        """Whether ``epoch``, from 1, of ``epochs`` is validated."""
        return validates_after(epoch, epochs, self._val_every)

    def validate(self, trainer: Training, epoch: Epoch) -> Action | None:
        if epoch.pending is not None or not self.is_due(epoch.number, trainer.epochs):
            return None
        return self.run(trainer, trainer.step.ema.module, epoch)

    def validate_pending(self, trainer: Training, epoch: Epoch, pending: PendingEpoch) -> Action | None:
        """Validates the weights of then, if no other process has."""
        if broadcast_object(trainer.ctx, epoch.result is not None):
            return None
        model = copy.deepcopy(trainer.step.ema.module)
        model.load_state_dict(broadcast_object(trainer.ctx, pending.ema))
        criterion = trainer.step.criterion
        criterion.set_closing(pending.is_closing)
        action = self.run(trainer, model, epoch)
        criterion.set_closing(trainer.is_closing)
        return action

    def run(self, trainer: Training, model: nn.Module, epoch: Epoch) -> Action:
        """Validates ``model`` on all ranks; rank 0 has the result, unless a signal has ended the validation."""
        trainer.call("before_validation")
        epoch.result = self.evaluator.run(model, self.loader, should_stop=trainer.control.stops_validation)
        return trainer.control.after_validation()


class EpochResults(Hook):
    """Records the result of each epoch in the progress of all ranks. ``fitness`` decides which epoch is the best."""

    def __init__(self, fitness: Fitness) -> None:
        self.fitness = fitness

    def after_last_step(self, trainer: Training, epoch: Epoch) -> None:
        losses = trainer.progress.mean_losses(trainer.step.criterion.names)
        optimizer = trainer.step.optimizer
        optimizer.set_rates(trainer.schedule, trainer.progress.updates - 1)  # a resumed run may have taken no step
        epoch.row |= {f"train/{name}": value for name, value in losses.items()} | optimizer.rates()

    def score(self, trainer: Training, epoch: Epoch) -> None:
        scores = None
        if epoch.result is not None:
            scores = _SharedScores.of(epoch.result, self.fitness)
        scores = broadcast_object(trainer.ctx, scores)
        if scores is not None:
            scores.note_thresholds(trainer.progress)
            epoch.class_ap = scores.class_ap
            epoch.is_best = trainer.progress.record_fitness(scores.fitness)
        if epoch.result is not None:
            epoch.metrics = self._metrics(epoch.result)
            self._log(epoch)
        epoch.row.setdefault("time", trainer.seconds())  # a pending epoch has the time at which it ended
        epoch.row = _in_order(epoch.row, epoch.metrics)

    def _metrics(self, result: EvalResult) -> dict[str, float]:
        """Returns the scores of a validation, by their names in results.csv."""
        metrics = {f"metrics/{name}": value for name, value in result.metrics.items()}
        if result.threshold is not None:
            metrics[CONFIDENCE_COLUMN] = result.threshold
        metrics[self.fitness.column] = self.fitness.of(result)
        losses = {name: value for name, value in result.extras.items() if name.startswith("val/")}
        return metrics | losses

    def _log(self, epoch: Epoch) -> None:
        columns = {f"metrics/{metric.name}": metric.column for metric in METRICS}
        columns.setdefault(self.fitness.column, self.fitness.name)
        shown = [f"{column} {epoch.metrics[name]:.4f}" for name, column in columns.items() if name in epoch.metrics]
        log.info("epoch %d: %s", epoch.number, "  ".join(shown))


@dataclass(frozen=True)
class _SharedScores:
    """The part of a validation result that all ranks get; the whole result is on rank 0 only."""

    fitness: float
    class_ap: np.ndarray  # (C,)
    # See `EvalResult`.
    threshold: float | None
    plain_confidence: float | None
    scored_confidence: float | None

    @staticmethod
    def of(result: EvalResult, fitness: Fitness) -> _SharedScores:
        return _SharedScores(
            fitness.of(result), result.class_ap, result.threshold, result.plain_confidence, result.scored_confidence
        )

    def note_thresholds(self, progress: Progress) -> None:
        """Stores the thresholds in the progress of the run."""
        progress.confidence = self.threshold
        progress.plain_confidence = self.plain_confidence
        progress.scored_confidence = self.scored_confidence


def _in_order(row: dict[str, float], metrics: dict[str, float]) -> dict[str, float]:
    """Orders the columns of results.csv: the time, losses of training, ``metrics``, then the rest of ``row``."""
    losses = {name: value for name, value in row.items() if name.startswith("train/")}
    return {"time": row["time"], **losses, **metrics, **row}


class ClassWeights(Hook):
    """``--image-weights``: images of classes with a low AP in the newest validation are drawn more often. ``loader``
    has the weights of a run that has not been validated yet."""

    decides_next_epoch = True

    def __init__(self, loader: InfiniteDataLoader) -> None:
        self._base = np.array(loader.class_weights)

    def start(self, trainer: Training) -> None:
        if trainer.progress.class_weights:  # of a resumed run
            trainer.loader.set_class_weights(np.asarray(trainer.progress.class_weights))

    def record(self, trainer: Training, epoch: Epoch) -> None:
        if epoch.class_ap is not None:
            trainer.progress.class_weights = (self._base * (1 - np.nan_to_num(epoch.class_ap)) ** 2).tolist()
            trainer.loader.set_class_weights(np.asarray(trainer.progress.class_weights))


class ClassScores(Hook):
    """Logs the scores of best.pt by class at the end of a run, on rank 0.

    A resumed run without a better epoch does not know them, and logs those of its newest validation. ``names``: of the
    classes.
    """

    def __init__(self, truth: GroundTruth, names: Sequence[str]) -> None:
        self._truth = truth
        self._names = names
        self._best: Epoch | None = None
        self._newest: Epoch | None = None

    def record(self, trainer: Training, epoch: Epoch) -> None:
        if epoch.result is not None:
            self._newest = epoch
        if epoch.is_best:
            self._best = epoch

    def finish(self, trainer: Training) -> None:
        shown = self._best or self._newest
        if shown is None or shown.result is None or not shown.result.class_targets.any():
            return
        if shown.number == trainer.progress.best_epoch:
            model = "best.pt"
        elif shown.number == trainer.progress.epoch:
            model = "last.pt"
        else:
            model = "newest validation"
        log.info("%s, after epoch %d:", model, shown.number)
        for line in format_table(result_rows(shown.result, self._truth, self._names)):
            log.info("%s", line)


class Summary(Hook):
    """The last line of the log. Comes after all other hooks."""

    def __init__(self, fitness: str) -> None:
        self._fitness = fitness

    def finish(self, trainer: Training) -> None:
        progress = trainer.progress
        checkpointer = trainer.checkpointer
        done = counted(progress.epoch, "epoch")
        if progress.best_epoch < 0:
            log.info("done: %s, nothing could be scored; weights: %s", done, checkpointer.last)
        else:
            log.info(
                "done: %s; best %s %.4f in epoch %d: %s",
                done,
                self._fitness,
                progress.best_fitness,
                progress.best_epoch,
                checkpointer.best.path,
            )


class ResultsCsv(Hook):
    """results.csv, on rank 0: a row per epoch, from 1. A later column joins the header, with empty cells above."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.table = ResultsTable.read(path) if path.exists() else ResultsTable()

    def start(self, trainer: Training) -> None:
        """Drops the epochs that a resumed run repeats."""
        self.table.keep(trainer.progress.epoch)
        if self.table.rows:
            self.table.write(self.path)
        else:  # of an earlier run
            self.path.unlink(missing_ok=True)

    def record(self, trainer: Training, epoch: Epoch) -> None:
        self.table.add(epoch.number, epoch.row)
        self.table.write(self.path)


class TensorBoard(Hook):
    """TensorBoard event files in the run's folder, on rank 0. Without TensorBoard, or if they cannot be written, a
    warning says so, and the run goes on.

    Each start writes new event files next to the earlier ones, and hides those of their epochs that it repeats.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def start(self, trainer: Training) -> None:
        first_step = 0 if trainer.run.checkpoint is None else trainer.progress.epoch + 1
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=first_step)
        except (ImportError, OSError) as error:
            self._turn_off(error)
        settings = trainer.run.settings.by_name()
        lines = [f"    {name}: {value}" for name, value in settings.items()]  # preformatted Markdown
        self.write(lambda writer: writer.add_text("config", "\n".join(lines), trainer.progress.epoch + 1))

    def record(self, trainer: Training, epoch: Epoch) -> None:
        for tag, value in epoch.row.items():
            self.write(lambda writer, *point: writer.add_scalar(*point), tag, value, epoch.number)

    def after_epoch(self, trainer: Training, epoch: Epoch) -> None:
        self.write(lambda writer: writer.flush())

    def close(self) -> None:
        self.write(lambda writer: writer.close())

    def write(self, add: Callable[..., None], *arguments: object) -> None:
        """Calls ``add`` with the `SummaryWriter`, if there is one."""
        if self._writer is not None:
            try:
                add(self._writer, *arguments)
            except OSError as error:
                self._turn_off(error)

    def _turn_off(self, error: Exception) -> None:
        self._writer = None
        log.warning("TensorBoard is off (%s); results.csv is kept", first_line(error))
