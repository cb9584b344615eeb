"""The loop: fit, epoch, step. Everything it uses is built outside and handed in."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from engine.checkpoint.checkpointer import Checkpointer, Progress, SaveCadence
from engine.evaluation.evaluator import Evaluator
from engine.optim.build import OptimizerSet
from engine.optim.ema import ModelEma
from engine.optim.schedule import Schedule
from engine.parallel.ddp import average_buffers
from engine.prefetcher import Prefetcher
from engine.reporting.progress_bar import EpochBar, log_start_time
from engine.reporting.trackers import Tracker
from engine.train_step import NO_FLAGS, StepFlags, StepValues, TrainStep
from engine.watchdog import Watchdog
from utils.distributed.collectives import broadcast_object, max_over_ranks
from utils.distributed.context import DistributedContext
from utils.distributed.stop_signals import INTERRUPTED, REQUEUE, StopSignals
from utils.errors import Stopped, UserError
from utils.structures import Batch, EvalResult

log = logging.getLogger("lockstep")

STOP_KEY = "stop"  # in the run's store: a rank was asked to stop while validating
POLL_EVERY_S = 1.0


class Trainer:
    """Trains for ``epochs``; on every rank alike, with rank-0 work done by the parts that are real there only.

    Args:
        take_step: the optimiser step.
        train_loader: endless; ``len`` is batches an epoch; ``start_at(epoch, batch)``, ``global_pictures(batch)``,
            ``renderer`` as `Prefetcher` takes it, ``class_weights`` (None without image weights) and
            ``set_class_weights(weights)``.
        accumulate: micro-batches a step; an epoch's last step may have fewer.
        saving: when to save inside an epoch.
        signals: entered; the signals that ask this rank to stop.
        watchdog: of this rank, entered.
        stall_s: without a step after which it writes down where the run hangs; 0: never.
        val_every: validate after every so many epochs and after the last; 0: after the last only.
        patience: epochs without a better fitness that end the run, at its next validation; 0: never.
        image_weights: after each validation, draw images of weak classes more often.
        seconds: that the run has taken before.
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
        saving: SaveCadence,
        signals: StopSignals,
        watchdog: Watchdog,
        tracker: Tracker,
        progress: Progress,
        run_dir: Path,
        loss_names: tuple[str, ...],
        epochs: int,
        accumulate: int = 1,
        val_every: int = 1,
        patience: int = 0,
        max_bad_steps: int = 20,
        refining_epochs: int = 0,
        image_weights: bool = False,
        stall_s: float = 0.0,
        seconds: float = 0.0,
    ) -> None:
        self.ctx, self.take_step, self.schedule, self.optimizer, self.ema = ctx, take_step, schedule, optimizer, ema
        self.train_loader, self.val_loader, self.evaluator = train_loader, val_loader, evaluator
        self.checkpointer, self.tracker, self.progress, self.run_dir = checkpointer, tracker, progress, run_dir
        self.saving, self.signals, self.watchdog, self.stall_s = saving, signals, watchdog, stall_s
        self.loss_names, self.epochs = loss_names, epochs
        self.accumulate, self.val_every, self.patience = accumulate, val_every, patience
        self.max_bad_steps, self.refining_epochs = max_bad_steps, refining_epochs
        self.on_epoch: Callable[[int, EvalResult | None], None] | None = None
        self._base_weights = np.array(train_loader.class_weights) if image_weights else None
        self._started = time.monotonic() - seconds
        self._polled_at = 0.0
        self._starting = True

    def fit(self, on_epoch: Callable[[int, EvalResult | None], None] | None = None) -> None:
        """Runs what is left of the epochs. ``on_epoch`` is called on every rank after each with its number and result.

        Raises `Stopped` when a signal to any rank ended the run early, on every rank after the same step, with
        everything saved.
        """
        self.on_epoch = on_epoch
        self._use_class_weights()
        self.train_loader.start_at(self.progress.epoch, self.progress.batch)
        with self.signals.deferred(), self.watchdog.training(self.run_dir, self.stall_s):
            try:
                if self.saving.at_start:
                    self._save()
                loader = self.train_loader
                with Prefetcher(iter(loader), device=self.ctx.device, render=loader.renderer) as batches:
                    while not self._is_over():
                        self._train_epoch(batches)
                        self._close_epoch()
                self.checkpointer.finish()
                max_over_ranks(self.ctx, 0)  # no rank leaves before all is written
            finally:
                self.checkpointer.wait()

    def _is_over(self) -> bool:
        progress = self.progress
        if progress.epoch >= self.epochs:
            return True
        stale = progress.epoch - progress.best_epoch
        judged = progress.batch == 0 and progress.best_epoch >= 0 and self._validates_after(progress.epoch)
        if self.patience and judged and stale >= self.patience:
            log.info("no better AP in %d epochs (best: epoch %d): stopped early", stale, progress.best_epoch)
            return True
        return False

    def _train_epoch(self, batches: Prefetcher) -> None:
        """The steps that the epoch still wants."""
        progress, per_epoch = self.progress, len(self.train_loader)
        self.take_step.criterion.set_refining(progress.epoch >= self.epochs - self.refining_epochs)
        bar = EpochBar(
            -(-per_epoch // self.accumulate),
            epoch=progress.epoch,
            epochs=self.epochs,
            enabled=self.ctx.is_main,
            done_steps=-(-progress.batch // self.accumulate),
        )
        while progress.batch < per_epoch:
            first = progress.batch
            shares = [next(batches) for _ in range(min(self.accumulate, per_epoch - first))]
            self._step(shares, first)
            if self._starting:
                log_start_time()
                self._starting = False
            batches.prefetch(self._wanted_next())
            flags = self._read(leave=0 if progress.batch == per_epoch else 1)
            self.watchdog.beat()
            bar.update(
                self.progress.mean_losses(self.loss_names),
                images=self._images(first, len(shares)),
                data_wait_s=batches.take_wait(),
            )
            self._at_boundary(flags)
        bar.close()

    def _wanted_next(self) -> int:
        """Batches of the next step; 0 after the last one, and where validation decides what is drawn next."""
        per_epoch, done = len(self.train_loader), self.progress.batch
        if done < per_epoch:
            return min(self.accumulate, per_epoch - done)
        is_known = self.train_loader.class_weights is None and self.progress.epoch + 1 < self.epochs
        return min(self.accumulate, per_epoch) if is_known else 0

    def _read(self, *, leave: int) -> StepFlags:
        """Takes in the values of all steps but the newest ``leave``. Returns the flags that the ranks set in them."""
        progress, flags = self.progress, NO_FLAGS
        for values in self.take_step.reader.pop(leave=leave):
            self._watch(values)
            flags |= values.flags
            if values.finite:
                progress.add_losses(values.losses)
        return flags

    def _at_boundary(self, flags: StepFlags) -> None:
        """Between two steps: saves and stops if that is due, on all ranks alike."""
        self.checkpointer.check()
        if not any(flags) and not self.saving.due_after(self.progress.updates):
            return
        flags |= self._read(leave=0)
        self._save()
        if flags.stop or flags.interrupt:
            self._stop(INTERRUPTED if flags.interrupt else REQUEUE)

    def _stop(self, code: int) -> NoReturn:
        """Once all is on disk, on every rank."""
        self.checkpointer.finish()
        max_over_ranks(self.ctx, 0)
        done = f"epoch {self.progress.epoch + 1}, batch {self.progress.batch} of {len(self.train_loader)}"
        log.info("stopped by a signal after %s; go on with: --resume %s", done, self.checkpointer.last)
        raise Stopped(code)

    def _save(self, *, is_best: bool = False, metrics: dict[str, float] | None = None) -> None:
        self.optimizer.consolidate()
        self.checkpointer.save(
            model=self.take_step.model,
            ema=self.ema,
            optimizer=self.optimizer,
            scaler=self.take_step.scaler,
            progress=self.progress,
            run={
                "world_size": self.ctx.world_size,
                "device": self.ctx.device.type,
                "seconds": time.monotonic() - self._started,
                "epoch_batches": len(self.train_loader),
            },
            is_best=is_best,
            metrics=metrics,
        )
        self.saving.saved()

    def _step(self, shares: list[Batch], first: int) -> None:
        """One optimiser step over micro-batches ``first``... of the epoch."""
        self.optimizer.set_rates(self.schedule, self.progress.updates)
        pictures = [self.train_loader.global_pictures(first + number) for number in range(len(shares))]
        flags = StepFlags(self.saving.wants_save(), self.signals.stop, self.signals.interrupt)
        self.take_step(shares, pictures, self.progress.updates + 1, flags)
        self.progress.batch += len(shares)
        self.progress.step += len(shares)
        self.progress.updates += 1

    def _images(self, first: int, count: int) -> int:
        """Images, over all ranks, of micro-batches ``first``..``first + count - 1`` of an epoch."""
        return sum(self.train_loader.global_pictures(batch) for batch in range(first, first + count))

    def _watch(self, values: StepValues) -> None:
        """Names the files of a step that was skipped, and stops a run that does nothing but skip."""
        if values.finite:
            self.progress.bad_steps = 0
            return
        self.progress.bad_steps += 1
        if not values.local_finite:
            listed = self.run_dir / f"nonfinite_rank{self.ctx.rank}.txt"
            with open(listed, "a", encoding="utf-8", errors="surrogateescape") as file:
                file.write(f"epoch {self.progress.epoch}: " + " ".join(values.paths) + "\n")
            log.warning("non-finite loss, step skipped; its files: %s", " ".join(values.paths))
        elif self.ctx.is_main:
            log.warning("non-finite gradient (norm %s), step skipped", values.grad_norm)
        if self.progress.bad_steps >= self.max_bad_steps:
            self.checkpointer.wait()
            last = self.checkpointer.last
            what = f"{last} holds the last good weights: resume" if last.exists() else "No checkpoint yet: start again"
            raise UserError(
                f"{self.progress.bad_steps} steps in a row were not finite; stopped. {what} with a lower lr0 "
                "(--set lr0=...) or with --amp off"
            )

    def _close_epoch(self) -> None:
        """After an epoch's last step: joins the ranks' models, validates, saves."""
        if not self.progress.joined:
            average_buffers(self.take_step.model, self.ctx)
            average_buffers(self.ema.module, self.ctx)
            self.progress.joined = True
        result = self._validate()
        losses = self.progress.mean_losses(self.loss_names)
        self.progress.epoch += 1
        self.progress.begin_epoch()
        self._finish_epoch(losses, result)

    def _validates_after(self, epochs_done: int) -> bool:
        return epochs_done == self.epochs or (self.val_every > 0 and epochs_done % self.val_every == 0)

    def _validate(self) -> EvalResult | None:
        """On every rank; the result is on rank 0 only. None too when it is not due."""
        if not self._validates_after(self.progress.epoch + 1):
            return None
        broke_off = False

        def should_stop() -> bool:
            nonlocal broke_off
            broke_off = self._stop_is_wanted()
            return broke_off

        result = self.evaluator.run(self.ema.module, self.val_loader, should_stop=should_stop)
        own = 0 if not broke_off else INTERRUPTED if self.signals.interrupt else REQUEUE
        code = max_over_ranks(self.ctx, own)
        if code:
            self._save()
            self._stop(code)
        return result

    def _stop_is_wanted(self) -> bool:
        """Between batches of validation, where ranks don't meet: has a signal come to any rank?"""
        self.watchdog.beat()
        own, store = self.signals.stop or self.signals.interrupt, self.ctx.store
        if store is None:
            return own
        if own:
            store.set(STOP_KEY, "")
            return True
        now = time.monotonic()
        if now - self._polled_at < POLL_EVERY_S:
            return False
        self._polled_at = now
        return store.check([STOP_KEY])

    def _finish_epoch(self, losses: dict[str, float], result: EvalResult | None) -> None:
        """Decides on rank 0, agrees, saves, reports."""
        progress = self.progress
        is_best = result is not None and result.fitness > progress.best_fitness
        verdict = None if result is None else (is_best, result.fitness, result.class_ap, result.threshold)
        verdict = broadcast_object(self.ctx, verdict)
        if verdict is not None:
            progress.confidence = verdict[3]
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
        self._save(is_best=is_best, metrics=metrics)
        if self.on_epoch is not None:
            self.on_epoch(progress.epoch, result)

    def _use_class_weights(self) -> None:
        if self.progress.class_weights:
            self.train_loader.set_class_weights(np.asarray(self.progress.class_weights))

    def _row(self, losses: dict[str, float], metrics: dict[str, float]) -> dict[str, float]:
        self.optimizer.set_rates(self.schedule, self.progress.updates - 1)  # a former process may have taken the step
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
