"""The training loop: epochs, steps, validation and what follows from its result."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

import numpy as np

from data.loading.loader import InfiniteDataLoader
from data.loading.prefetcher import Prefetcher
from engine.checkpoint.checkpoint import Progress
from engine.checkpoint.checkpointer import Checkpointer
from engine.checkpoint.run import Run
from engine.evaluation.fitness import Fitness
from engine.optim.schedule import StepPlan, build_schedule, epochs_in_time
from engine.parallel.ddp import average_buffers, broadcast_parameters
from engine.report.progress_bar import EpochBar, log_start_time
from engine.report.trackers import Tracker
from engine.train.callbacks import Callbacks
from engine.train.control import StopCoordinator
from engine.train.step import NO_FLAGS, StepFlags, StepValues, TrainStep
from engine.train.watchdog import Watchdog
from utils.config.settings import closing_epochs
from utils.distributed.collectives import broadcast_object, max_over_ranks
from utils.distributed.context import DistributedContext
from utils.errors import Stopped, UserError, one_line
from utils.files.checked_open import open_direct
from utils.strings import counted
from utils.structures import Batch, EvalResult

log = logging.getLogger("lockstep")

EpochEnd = Callable[[int, int, EvalResult | None], None]
Validate = Callable[..., EvalResult | None]


class Trainer:
    """Trains the remaining epochs of a run. Every rank has one and makes the same calls; parts that act on rank 0 alone
    do nothing on the others.

    Args:
        take_step: the optimizer step, with the model, the optimizer and the averaged weights.
        plan: how the loader's batches become steps.
        train_loader: endless; positioned by `fit`.
        validate: `Evaluator.run` on the validation split.
        fitness: what decides which epoch is the best.
        watchdog: of this process, entered.
        progress: the run's position and its best result; updated in place.
        callbacks: the user's hooks.
        on_epoch_end: called on every rank after each epoch, with its number, the number of all epochs, and its result
            (None on other ranks than 0, and where the epoch was not validated).
    """

    def __init__(
        self,
        ctx: DistributedContext,
        run: Run,
        *,
        take_step: TrainStep,
        plan: StepPlan,
        train_loader: InfiniteDataLoader,
        validate: Validate,
        fitness: Fitness,
        checkpointer: Checkpointer,
        stops: StopCoordinator,
        watchdog: Watchdog,
        tracker: Tracker,
        progress: Progress,
        callbacks: Callbacks,
        on_epoch_end: EpochEnd | None = None,
    ) -> None:
        self.ctx, self.run, self.config = ctx, run, run.config
        self.take_step, self.plan = take_step, plan
        self.schedule = build_schedule(run.hyp, plan, cosine=run.config.cos_lr)
        self.train_loader, self.validate, self.fitness = train_loader, validate, fitness
        self.checkpointer, self.tracker, self.progress = checkpointer, tracker, progress
        self.stops, self.watchdog, self.callbacks = stops, watchdog, callbacks
        self.on_epoch_end = on_epoch_end
        self._base_weights = np.array(train_loader.class_weights) if run.config.image_weights else None
        earlier_s = run.checkpoint.run.get("seconds", 0.0) if run.checkpoint else 0.0
        self._started = time.monotonic() - earlier_s
        self._first_step_done = False
        self._is_ended = False  # by a callback
        self._epoch_end_s = 0.0  # seconds that the last validation and save took
        self._speed: dict[str, float] = {}  # of the epoch, as far as this process trained it

    def fit(self) -> None:
        """Runs the remaining epochs.

        Raises `Stopped` when a signal to any rank ended the run early, on every rank after the same step, with
        everything saved.
        """
        loader, last = self.train_loader, self.checkpointer.last
        self._use_class_weights()
        loader.start_at(self.progress.epoch, self.progress.batch)
        with self.stops.deferred(), self.watchdog.training(self.run.folder, self.config.stall_minutes * 60):
            try:
                if self.run.continues_elsewhere(last):
                    self._save()
                self._is_ended = self.callbacks.started()
                if self._is_ended:
                    self._save()
                with Prefetcher(iter(loader), device=self.ctx.device, render=loader.renderer) as batches:
                    while not self._is_finished():
                        self._train_epoch(batches)
                        if self._is_ended:
                            break
                        ended = time.monotonic()
                        self._end_epoch()
                        self._epoch_end_s = time.monotonic() - ended
                self.checkpointer.finish()
                max_over_ranks(self.ctx, 0)  # no rank returns before everything is written
                if self._is_ended:
                    self.callbacks.raise_failure()
                    log.info("ended by a callback after %s; to train on: --resume %s", self._where(), last)
            finally:
                self.checkpointer.wait()

    def log_result(self) -> None:
        progress, done = self.progress, counted(self.progress.epoch, "epoch")
        if progress.best_epoch < 0:
            log.info("done: %s, nothing could be scored; weights: %s", done, self.checkpointer.last)
            return
        log.info(
            "done: %s; best %s %.4f in epoch %d: %s",
            done, self.fitness.name, progress.best_fitness, progress.best_epoch, self.checkpointer.best,
        )  # fmt: skip

    def _is_finished(self) -> bool:
        progress, patience = self.progress, self.config.patience
        if self._is_ended or progress.epoch >= self.config.epochs:
            return True
        stale = progress.epoch - progress.patience_epoch
        is_validated = progress.batch == 0 and progress.best_epoch >= 0 and self._validates_after(progress.epoch)
        if patience and is_validated and stale >= patience:
            gain = f" by more than {self.config.min_gain:g}" if self.config.min_gain else ""
            log.info(
                "no better %s%s in %s (best: epoch %d): stopped early",
                self.fitness.name, gain, counted(stale, "epoch"), progress.best_epoch,
            )  # fmt: skip
            return True
        return False

    def _train_epoch(self, batches: Prefetcher) -> None:
        """Runs the remaining steps of the epoch."""
        progress, config = self.progress, self.config
        closing = closing_epochs(self.run.hyp.close_mosaic, config.epochs)
        self.take_step.criterion.set_refining(progress.epoch >= config.epochs - closing)
        bar = EpochBar(
            self.plan.steps,
            epoch=progress.epoch,
            epochs=config.epochs,
            enabled=self.ctx.is_main,
            done_steps=-(-progress.batch // self.plan.accumulate),
            device=self.ctx.device,
            between_epochs_s=self._epoch_end_s,
        )
        while progress.batch < len(self.train_loader) and not self._is_ended:
            self._train_step(batches, bar)
        self._speed = bar.speed()
        bar.close()

    def _train_step(self, batches: Prefetcher, bar: EpochBar) -> None:
        """One step of the optimizer, and what is due after it."""
        first, per_epoch = self.progress.batch, len(self.train_loader)
        micro_batches = [next(batches) for _ in range(min(self.plan.accumulate, per_epoch - first))]
        images = self._take_step(micro_batches, first)
        if not self._first_step_done:
            log_start_time()
            self._first_step_done = True
        batches.prefetch(self._batches_of_next_step())
        flags = self._read(leave=0 if self.progress.batch == per_epoch else 1)
        self.watchdog.beat()
        bar.update(
            self.progress.mean_losses(self.take_step.criterion.names), images=images, data_wait_s=batches.take_wait()
        )
        self.checkpointer.check()
        self.callbacks.step_taken()
        if self.stops.save_is_due(flags, self.progress.updates):
            flags |= self._read(leave=0)
            if code := self.stops.exit_code(flags):
                self._stop(code)
            self._save()
            self._is_ended = flags.stop

    def _take_step(self, micro_batches: list[Batch], first: int) -> int:
        """Steps over micro-batches ``first``... of the epoch. Returns their samples over all ranks."""
        progress = self.progress
        self.take_step.optimizer.set_rates(self.schedule, progress.updates)
        counts = [self.train_loader.global_images(first + number) for number in range(len(micro_batches))]
        self.take_step(micro_batches, counts, progress.updates + 1, self.stops.flags())
        progress.batch += len(micro_batches)
        progress.step += len(micro_batches)
        progress.updates += 1
        return sum(counts) * self.config.samples_per_image

    def _batches_of_next_step(self) -> int:
        """How many batches to prefetch: 0 after the last step, and if validation decides which images follow."""
        per_epoch, done, accumulate = len(self.train_loader), self.progress.batch, self.plan.accumulate
        if done < per_epoch:
            return min(accumulate, per_epoch - done)
        is_known = self.train_loader.class_weights is None and not self.config.time
        is_known &= self.progress.epoch + 1 < self.config.epochs
        return min(accumulate, per_epoch) if is_known else 0

    def _read(self, *, leave: int) -> StepFlags:
        """Reads the values of all steps but the newest ``leave``. Returns what any rank requested with them."""
        flags = NO_FLAGS
        for values in self.take_step.reader.pop(leave=leave):
            self._check_finite(values)
            flags |= values.flags
            if values.finite:
                self.progress.add_losses(values.losses)
        return flags

    def _check_finite(self, values: StepValues) -> None:
        """Names the files of a step that was skipped, and ends a run that skips one step after another."""
        progress = self.progress
        if values.finite:
            progress.bad_steps = 0
            return
        progress.bad_steps += 1
        if not values.local_finite:
            listed = self.run.folder / f"nonfinite_rank{self.ctx.rank}.txt"
            with open(listed, "a", encoding="utf-8", errors="surrogateescape", opener=open_direct) as file:
                file.write(one_line(f"epoch {progress.epoch}: {' '.join(values.paths)}") + "\n")
            log.warning("non-finite loss, step skipped; its files: %s", " ".join(values.paths))
        elif self.ctx.is_main:
            log.warning("non-finite gradient (norm %s), step skipped", values.grad_norm)
        if progress.bad_steps >= self.config.max_bad_steps:
            self.checkpointer.wait()
            last = self.checkpointer.last
            what = f"{last} holds the last good weights: resume" if last.exists() else "No checkpoint yet: start again"
            raise UserError(
                f"{counted(progress.bad_steps, 'step')} in a row not finite; stopped. {what} with a lower lr0 "
                "(--set lr0=...) or with --amp off"
            )

    def _save(self, *, is_best: bool = False, metrics: dict[str, float] | None = None) -> None:
        step = self.take_step
        step.optimizer.consolidate()
        self.checkpointer.save(
            model=step.model,
            ema=step.ema,
            optimizer=step.optimizer,
            scaler=step.scaler,
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
        self.stops.saved()

    def _stop(self, code: int) -> NoReturn:
        """Saves and ends the run on every rank, once everything is on the disk."""
        self.watchdog.stop_agreed()
        self._save()
        self.checkpointer.finish()
        max_over_ranks(self.ctx, 0)
        log.info("stopped by a signal after %s; continue with: --resume %s", self._where(), self.checkpointer.last)
        raise Stopped(code)

    def _where(self) -> str:
        progress = self.progress
        if not progress.batch:
            return counted(progress.epoch, "epoch")
        return f"epoch {progress.epoch + 1}, batch {progress.batch} of {len(self.train_loader)}"

    def _end_epoch(self) -> None:
        """After the last step of an epoch: gives all ranks one model, validates, saves, reports.

        A resumed run may begin here."""
        progress, step = self.progress, self.take_step
        if not progress.joined:
            for model in (step.model, step.ema.module):
                average_buffers(model, self.ctx)
                broadcast_parameters(model, self.ctx)
            progress.joined = True
        if self.config.time:
            self._fit_into_time()
        if self._validates_after(progress.epoch + 1) and self.stops.save_is_due_before_validation():
            self._save()
        result = self._validate()
        losses = progress.mean_losses(step.criterion.names)
        progress.epoch += 1
        progress.begin_epoch()
        is_best = self._record_result(result)
        metrics = self._metrics(result)
        row = self._row(losses, metrics)
        self.tracker.epoch(progress.epoch, row)
        if result is not None:
            shown = (f"{k.split('/')[-1]} {v:.4f}" for k, v in metrics.items() if k.startswith("metrics"))
            log.info("epoch %d: %s", progress.epoch, "  ".join(shown))
        self._save(is_best=is_best, metrics=metrics)
        if self.on_epoch_end is not None:
            self.on_epoch_end(progress.epoch, self.config.epochs, result)
        self._is_ended = self.callbacks.epoch_ended(row)

    def _fit_into_time(self) -> None:
        """Decides before a validation how many epochs the run has, by rank 0's clock."""
        done, before = self.progress.epoch + 1, self.config.epochs
        seconds = time.monotonic() - self._started + self._epoch_end_s
        epochs = broadcast_object(self.ctx, epochs_in_time(done, seconds, self.config.time * 3600))
        if epochs == before:
            return
        log.info("--time %g: %s", self.config.time, counted(epochs, "epoch"))
        self.config = replace(self.config, epochs=epochs)
        self.plan = replace(self.plan, total=self.plan.steps * epochs)
        self.schedule = build_schedule(self.run.hyp, self.plan, cosine=self.config.cos_lr)
        for part in (self.train_loader, self.checkpointer, self.callbacks):
            part.set_epochs(epochs)

    def _validates_after(self, epochs_done: int) -> bool:
        val_every = self.config.val_every
        return epochs_done == self.config.epochs or (val_every > 0 and epochs_done % val_every == 0)

    def _validate(self) -> EvalResult | None:
        """On every rank; rank 0 has the result. None too when no validation is due."""
        if not self._validates_after(self.progress.epoch + 1):
            return None
        stopped = False

        def should_stop() -> bool:
            nonlocal stopped
            self.watchdog.beat()
            stopped = self.stops.stop_requested()
            return stopped

        result = self.validate(self.take_step.ema.module, should_stop=should_stop)
        if code := self.stops.exit_code_after_validation(stopped=stopped):
            self._stop(code)
        return result

    def _record_result(self, result: EvalResult | None) -> bool:
        """Updates the progress of all ranks with rank 0's result. Returns whether the epoch is the best so far."""
        progress, found = self.progress, None
        if result is not None:
            found = (self.fitness.of(result), result.class_ap, result.threshold)
        found = broadcast_object(self.ctx, found)
        if found is None:
            return False
        fitness, class_ap, progress.confidence = found
        is_best = progress.record_fitness(fitness, self.config.min_gain)
        if self._base_weights is not None:
            progress.class_weights = (self._base_weights * (1 - np.nan_to_num(class_ap)) ** 2).tolist()
            self._use_class_weights()
        return is_best

    def _use_class_weights(self) -> None:
        if self._base_weights is None:  # resumed without --image-weights
            self.progress.class_weights = []
        if self.progress.class_weights:
            self.train_loader.set_class_weights(np.asarray(self.progress.class_weights))

    def _row(self, losses: dict[str, float], metrics: dict[str, float]) -> dict[str, float]:
        optimizer = self.take_step.optimizer
        optimizer.set_rates(self.schedule, self.progress.updates - 1)  # a resumed run may have taken no step
        seconds = time.monotonic() - self._started
        losses = {f"train/{k}": v for k, v in losses.items()}
        return {"time": seconds, **losses, **metrics, **optimizer.rates(), **self._speed}

    def _metrics(self, result: EvalResult | None) -> dict[str, float]:
        if result is None:
            return {}
        losses = {k: v for k, v in result.extras.items() if k.startswith("val/")}
        metrics = {f"metrics/{k}": v for k, v in result.metrics.items()}
        return {**metrics, self.fitness.column: self.fitness.of(result), **losses}
