"""Early stopping, ``--time``, ``--image-weights``, TensorBoard, and the last lines of the log."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from engine.evaluation.result import EvalResult
from engine.evaluation.tables import format_table, result_rows
from engine.optim.schedule import epochs_in_time
from engine.train.ledger import Epoch
from engine.train.loop import Hook, Trainer
from utils.config.flags import as_flag
from utils.distributed.context import broadcast_object
from utils.errors import first_line
from utils.labels import GroundTruth
from utils.logger import get_logger, get_summary_logger
from utils.process.launch import typed_command
from utils.strings import counted

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class EarlyStopping(Hook):
    """``--patience``: ends the run after N epochs without a better score."""

    def epoch_saved(self, trainer: Trainer, epoch: Epoch) -> None:
        progress = trainer.progress
        config = trainer.settings.config
        if trainer.ledger.unscored or not progress.stops_early(config, trainer.steps.epochs):
            return
        get_logger().info(
            "no better %s in %s (best: epoch %d): stopped early (--patience %d)",
            trainer.ledger.fitness.name,
            counted(progress.epoch - progress.best_epoch, "epoch"),
            progress.best_epoch,
            config.patience,
        )
        trainer.end()


class TimeLimit(Hook):
    """``--time``: after the steps of each epoch, decides by the clock of rank 0 how many epochs the run has."""

    decides_next_epoch = True

    def epoch_trained(self, trainer: Trainer, epoch: Epoch) -> None:
        hours = trainer.settings.config.time
        seconds = trainer.ledger.seconds() + trainer.between_epochs_s  # what follows takes as long as the last time
        epochs = epochs_in_time(epoch.number, seconds, hours * 3600)
        epochs = broadcast_object(trainer.ctx, epochs)
        if epochs != trainer.steps.epochs:
            get_logger().info("--time %g: %s", hours, counted(epochs, "epoch"))
            trainer.set_epochs(epochs)


class ClassWeights(Hook):
    """``--image-weights``: images of classes with a low AP in the newest validation are drawn more often."""

    decides_next_epoch = True

    def start(self, trainer: Trainer) -> None:
        self._base = np.array(trainer.loader.class_weights)  # before the first validation
        if trainer.progress.class_weights:  # a resumed run has them
            trainer.loader.set_class_weights(np.asarray(trainer.progress.class_weights))

    def epoch_scored(self, trainer: Trainer, epoch: Epoch) -> None:
        if epoch.class_ap is not None:
            trainer.progress.class_weights = (self._base * (1 - np.nan_to_num(epoch.class_ap)) ** 2).tolist()
            trainer.loader.set_class_weights(np.asarray(trainer.progress.class_weights))


class TensorBoard(Hook):
    """TensorBoard event files in the run's folder. Without TensorBoard, or if it fails, a warning says so, and the run
    goes on. Each start writes new files, and hides the epochs of earlier ones that it records again."""

    on_rank_0 = True

    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None

    def start(self, trainer: Trainer) -> None:
        first_epoch = trainer.ledger.next_row
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(trainer.saver.folder), purge_step=first_epoch)
        except Exception as error:
            self._turn_off(error)
        settings = trainer.settings.by_name()
        text = "\n".join(f"    {name}: {value}" for name, value in settings.items())  # preformatted Markdown
        self.write(lambda writer: writer.add_text("config", text, first_epoch))

    def epoch_scored(self, trainer: Trainer, epoch: Epoch) -> None:
        def add_scalars(writer: SummaryWriter) -> None:
            for tag, value in epoch.row.items():
                writer.add_scalar(tag, value, epoch.number)
            writer.flush()

        self.write(add_scalars)

    def close(self) -> None:
        self.write(lambda writer: writer.close())

    def write(self, add: Callable[..., None], *arguments: object) -> None:
        """Calls ``add`` with the `SummaryWriter`, if there is one."""
        if self._writer is not None:
            try:
                add(self._writer, *arguments)
            except Exception as error:
                self._turn_off(error)

    def _turn_off(self, error: Exception) -> None:
        self._writer = None
        get_logger().warning("TensorBoard is off (%s); results.csv is kept", first_line(error))


class EndLog(Hook):
    """Logs the scores of each class of best.pt, and where the weights are. The last hook.

    After a resume without a new best epoch, the scores are those of the newest validation.
    """

    on_rank_0 = True

    def __init__(self, truth: GroundTruth) -> None:
        self._truth = truth
        self._result: EvalResult | None = None
        self._epoch = 0  # whose result this is
        self._is_best = False

    def epoch_saved(self, trainer: Trainer, epoch: Epoch) -> None:
        if epoch.evaluation is not None and (epoch.is_best or not self._is_best):
            self._result = epoch.evaluation.result
            self._epoch = epoch.number
            self._is_best = epoch.is_best

    def finish(self, trainer: Trainer) -> None:
        log = get_summary_logger()
        progress = trainer.progress
        detector = trainer.step.ema.module
        if self._result is not None and self._result.class_targets.any():
            model = "best.pt" if self._epoch == progress.best_epoch else "last.pt"
            log.info("%s, after epoch %d (%s):", model, self._epoch, self._result.protocol)
            for line in format_table(result_rows(self._result, self._truth, detector.names)):
                log.info("%s", line)
            log.info("P, R and F1 at confidence %.3f, which detect.py uses", self._result.shown_confidence)
        done = counted(progress.epoch, "epoch")
        best = trainer.saver.best
        if progress.best_epoch < 0 or not best.is_file():
            reason = "no epoch has a score" if progress.best_epoch < 0 else "best.pt is no longer there"
            log.info("done: %s, %s; weights: %s", done, reason, trainer.saver.last)
            return
        score = f"best {trainer.ledger.fitness.name} {progress.best_fitness:.4f} in epoch {progress.best_epoch}"
        log.info("done: %s; %s: %s", done, score, best)
        loaded = trainer.saver.description.pretrained
        if all(name in loaded and not loaded[name] for name, _ in detector.named_parameters()):
            config = trainer.settings.config
            flags = {"weights": config.weights, "data": config.data, "imgsz": config.imgsz}
            words = " ".join(as_flag(name, value) for name, value in flags.items())
            log.info("to compare with the weights that it started from: %s %s", typed_command("val"), words)
