"""The loop: fit, epoch, step. Everything it uses is built outside and handed in."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from engine.checkpoint import Checkpointer, Progress
from engine.ema import ModelEma
from engine.evaluator import Evaluator
from engine.optim import OptimizerSet
from engine.parallel import average_buffers
from engine.progress import EpochBar
from engine.schedule import Schedule
from engine.step import StepValues, TrainStep
from engine.trackers import Tracker
from utils.distributed import DistributedContext, broadcast_object
from utils.errors import UserError
from utils.structures import Batch, EvalResult

log = logging.getLogger("lockstep")


class Trainer:
    """Trains for ``epochs``; on every rank alike, with rank-0 work done by the parts that are real there only.

    Args:
        take_step: the optimiser step.
        train_loader: endless; ``len`` is batches an epoch; ``start_at(epoch, batch)``, ``global_pictures(batch)``; and
            with image weights ``class_weights`` and ``set_class_weights(weights)``.
        accumulate: micro-batches a step; an epoch's last step may have fewer.
        val_every: validate after every so many epochs and after the last; 0: after the last only.
        patience: epochs without a better fitness that end the run; 0: never.
        image_weights: after each validation, draw images of weak classes more often.
    """

    def __init__(
        self,
        *,
        ctx: DistributedContext,
        take_step: TrainStep,
        schedule: Schedule,
        optimizer: OptimizerSet,
        ema: ModelEma,
        train_loader: Any,
        val_loader: Any,
        evaluator: Evaluator,
        checkpointer: Checkpointer,
        tracker: Tracker,
        progress: Progress,
        run_dir: Path,
        loss_names: tuple[str, ...],
        epochs: int,
        accumulate: int = 1,
        val_every: int = 1,
        patience: int = 0,
        max_bad_steps: int = 20,
        image_weights: bool = False,
    ) -> None:
        self.ctx, self.take_step, self.schedule, self.optimizer, self.ema = ctx, take_step, schedule, optimizer, ema
        self.train_loader, self.val_loader, self.evaluator = train_loader, val_loader, evaluator
        self.checkpointer, self.tracker, self.progress, self.run_dir = checkpointer, tracker, progress, run_dir
        self.loss_names, self.epochs = loss_names, epochs
        self.accumulate, self.val_every, self.patience = accumulate, val_every, patience
        self.max_bad_steps = max_bad_steps
        self.on_epoch: Callable[[int, EvalResult | None], None] | None = None
        self._base_weights = np.array(train_loader.class_weights) if image_weights else None
        self._bad_in_a_row = 0
        self._started = time.monotonic()

    def fit(self, on_epoch: Callable[[int, EvalResult | None], None] | None = None) -> None:
        """Runs the epochs that are left. ``on_epoch`` is called on every rank after each with its number and result."""
        self.on_epoch = on_epoch
        self._use_class_weights()
        self.train_loader.start_at(self.progress.epoch, 0)
        batches = iter(self.train_loader)
        while self.progress.epoch < self.epochs:
            losses = self._train_epoch(batches)
            average_buffers(self.take_step.model, self.ctx)
            average_buffers(self.ema.module, self.ctx)
            result = self._validate()
            if self._finish_epoch(losses, result):
                break

    def _train_epoch(self, batches) -> dict[str, float]:
        """One epoch of steps. Returns mean losses over its finite steps."""
        epoch, per_epoch = self.progress.epoch, len(self.train_loader)
        bar = EpochBar(per_epoch, epoch=epoch, epochs=self.epochs, enabled=self.ctx.is_main)
        sums, finite_steps = np.zeros(len(self.loss_names)), 0
        for first in range(0, per_epoch, self.accumulate):
            waited = time.perf_counter()
            shares = [next(batches) for _ in range(min(self.accumulate, per_epoch - first))]
            waited = time.perf_counter() - waited
            self._step(shares, first)
            last = first + len(shares) == per_epoch
            for values in self.take_step.reader.pop(leave=0 if last else 1):
                self._watch(values)
                if values.finite:
                    sums += values.losses
                    finite_steps += 1
            means = dict(zip(self.loss_names, sums / max(finite_steps, 1)))
            bar.update(means, images=self._images(first, len(shares)), data_wait_s=waited)
        bar.close()
        self.progress.epoch += 1
        return dict(zip(self.loss_names, (sums / finite_steps if finite_steps else sums * math.nan).tolist()))

    def _step(self, shares: list[Batch], first: int) -> None:
        """One optimiser step over micro-batches ``first``... of the epoch."""
        self.optimizer.set_rates(self.schedule, self.progress.updates)
        pictures = [self.train_loader.global_pictures(first + number) for number in range(len(shares))]
        self.take_step(shares, pictures, self.progress.updates + 1)
        self.progress.step += len(shares)
        self.progress.updates += 1

    def _images(self, first: int, count: int) -> int:
        """Images, over all ranks, of micro-batches ``first``..``first + count - 1`` of an epoch."""
        return sum(self.train_loader.global_pictures(batch) for batch in range(first, first + count))

    def _watch(self, values: StepValues) -> None:
        """Names the files of a step that was skipped, and stops a run that does nothing but skip."""
        if values.finite:
            self._bad_in_a_row = 0
            return
        self._bad_in_a_row += 1
        if not values.share_finite:
            with open(self.run_dir / f"nonfinite_rank{self.ctx.rank}.txt", "a", encoding="utf-8") as file:
                file.write(f"epoch {self.progress.epoch}: " + " ".join(values.paths) + "\n")
            log.warning("non-finite loss, step skipped; its files: %s", " ".join(values.paths))
        elif self.ctx.is_main:
            log.warning("non-finite gradient (norm %s), step skipped", values.grad_norm)
        if self._bad_in_a_row >= self.max_bad_steps:
            raise UserError(
                f"{self._bad_in_a_row} steps in a row were not finite; stopped. {self.checkpointer.last} holds the "
                "last good weights: resume with a lower lr0 (--set lr0=...) or with --amp off"
            )

    def _validate(self) -> EvalResult | None:
        """On every rank; the result is on rank 0 only. None too when it is not due."""
        done = self.progress.epoch
        due = done == self.epochs or (self.val_every > 0 and done % self.val_every == 0)
        return self.evaluator.run(self.ema.module, self.val_loader) if due else None

    def _finish_epoch(self, losses: dict[str, float], result: EvalResult | None) -> bool:
        """Decides on rank 0, agrees, saves, reports. Returns whether the run is over."""
        progress = self.progress
        is_best = result is not None and result.fitness > progress.best_fitness
        verdict = None if result is None else (is_best, result.fitness, result.class_ap)
        verdict = broadcast_object(self.ctx, verdict)
        if verdict is not None:
            if verdict[0]:
                progress.best_fitness, progress.best_epoch = verdict[1], progress.epoch
            if self._base_weights is not None:
                progress.class_weights = (self._base_weights * (1 - np.nan_to_num(verdict[2])) ** 2).tolist()
                self._use_class_weights()
        metrics = _metrics(result)
        self.tracker.epoch(progress.epoch, self._row(losses, metrics))
        if result is not None:
            log.info(
                "epoch %d: %s",
                progress.epoch,
                "  ".join(f"{k.split('/')[-1]} {v:.4f}" for k, v in metrics.items() if k.startswith("metrics")),
            )
        self.checkpointer.save(
            model=self.take_step.model,
            ema=self.ema,
            optimizer=self.optimizer,
            scaler=self.take_step.scaler,
            progress=progress,
            is_best=is_best,
            metrics=metrics,
        )
        if self.on_epoch is not None:
            self.on_epoch(progress.epoch, result)
        stale = progress.epoch - max(progress.best_epoch, 0)
        if self.patience and stale >= self.patience and progress.epoch < self.epochs:
            log.info("no better AP in %d epochs (best: epoch %d): stopped early", stale, progress.best_epoch)
            return True
        return False

    def _use_class_weights(self) -> None:
        if self.progress.class_weights:
            self.train_loader.set_class_weights(np.asarray(self.progress.class_weights))

    def _row(self, losses: dict[str, float], metrics: dict[str, float]) -> dict[str, float]:
        rates = self.optimizer.rates()
        seconds = time.monotonic() - self._started
        return {"time": seconds, **{f"train/{k}": v for k, v in losses.items()}, **metrics, **rates}


def _metrics(result: EvalResult | None) -> dict[str, float]:
    if result is None:
        return {}
    named = {
        "precision": result.precision,
        "recall": result.recall,
        "f1": result.f1,
        "AP50": result.ap50,
        "AP75": result.ap75,
        "AP": result.ap,
    }
    losses = {k: v for k, v in result.extras.items() if k.startswith("val/")}
    return {**{f"metrics/{k}": float(v) for k, v in named.items()}, **losses}
