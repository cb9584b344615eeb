"""The training loop: epochs, steps, validation and what follows from its result."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from data.loading.loader import InfiniteDataLoader
from data.loading.prefetcher import Prefetcher
from engine.checkpoint.checkpoint import Unscored
from engine.optim.schedule import build_schedule, step_plan
from engine.parallel.ddp import average_buffers, broadcast_parameters
from engine.parallel.remote_validation import RemoteValidation
from engine.report.progress_bar import EpochBar, log_start_time
from engine.train.control import Action, RunControl
from engine.train.results import EpochResults
from engine.train.step import NO_FLAGS, StepFlags, TrainStep
from utils.config.settings import closing_epochs
from utils.distributed.collectives import broadcast_object
from utils.errors import UserError
from utils.structures import Batch, EvalResult

Validate = Callable[..., EvalResult | None]


class Trainer:
    """Trains the remaining epochs of a run. Every rank has one and makes the same calls.

    Args:
        control: decides when to save, validate and end; it knows the run, its position and the other ranks.
        take_step: the optimizer step, with the model, the optimizer and the averaged weights.
        train_loader: endless; positioned by `fit`.
        validate: `Evaluator.run` on the validation split.
        results: counts the result of each epoch.
        remote: other processes that validate; None: there are none. Then the result of an epoch counts at the end of
            the next one, as it would have at its own end. An epoch that may be the last is validated here, at once.
        unscored: the epoch that a resumed run had not validated when it ended.
    """

    def __init__(
        self,
        control: RunControl,
        take_step: TrainStep,
        train_loader: InfiniteDataLoader,
        validate: Validate,
        results: EpochResults,
        remote: RemoteValidation | None = None,
        unscored: Unscored | None = None,
    ) -> None:
        self.control, self.ctx, self.run, self.progress = control, control.ctx, control.run, control.progress
        self.take_step, self.train_loader, self.validate, self.results = take_step, train_loader, validate, results
        self._remote, self._unscored = remote, unscored
        self._plan_steps()
        self._first_step_done = False
        self._epoch_end_s = 0.0  # seconds that the last validation and save took
        self._speed: dict[str, float] = {}  # of the epoch, as far as this process trained it
        self._refining = False  # whether the loss of the epoch refines boxes

    def _plan_steps(self) -> None:
        config = replace(self.run.config, epochs=self.control.epochs)
        self.plan = step_plan(config, len(self.train_loader))  # how the loader's batches become steps
        self.schedule = build_schedule(self.run.hyp, self.plan, cosine=config.cos_lr)

    def fit(self) -> None:
        """Runs the remaining epochs. Raises as `RunControl.finish`, on every rank after the same step, with everything
        saved."""
        loader, control = self.train_loader, self.control
        self.results.use_class_weights()
        loader.start_at(self.progress.epoch, self.progress.batch)
        with control.training():
            if self.run.continues_elsewhere(control.checkpointer.last):
                self._save()
            self._follow(control.started())
            self._settle()
            with Prefetcher(iter(loader), device=self.ctx.device, render=loader.renderer) as batches:
                while not control.is_over(self.results.fitness.name):
                    self._train_epoch(batches)
                    if not control.is_stopped:
                        ended = time.monotonic()
                        self._end_epoch()
                        self._epoch_end_s = time.monotonic() - ended
            if self._unscored is not None and not control.is_stopped_by_signal:  # a callback has ended the run
                self._settle()
                self._save()
            control.finish(len(loader))

    def _train_epoch(self, batches: Prefetcher) -> None:
        """Runs the remaining steps of the epoch."""
        progress, epochs = self.progress, self.control.epochs
        closing = closing_epochs(self.run.hyp.close_mosaic, epochs)
        self._refining = progress.epoch >= epochs - closing
        self.take_step.criterion.set_refining(self._refining)
        bar = EpochBar(
            self.plan.steps,
            epoch=progress.epoch,
            epochs=epochs,
            enabled=self.ctx.is_main,
            done_steps=-(-progress.batch // self.plan.accumulate),
            device=self.ctx.device,
            between_epochs_s=self._epoch_end_s,
        )
        while progress.batch < len(self.train_loader) and not self.control.is_stopped:
            self._train_step(batches, bar)
        self._speed = bar.speed()
        bar.close()

    def _train_step(self, batches: Prefetcher, bar: EpochBar) -> None:
        """One step of the optimizer, and what is due after it."""
        first, per_epoch = self.progress.batch, len(self.train_loader)
        with self._saved_if_unreadable():
            micro_batches = [next(batches) for _ in range(min(self.plan.accumulate, per_epoch - first))]
        images = self._take_step(micro_batches, first)
        if not self._first_step_done:
            log_start_time()
            self._first_step_done = True
        batches.prefetch(self._batches_of_next_step())
        flags = self._read(leave=0 if self.progress.batch == per_epoch else 1)
        bar.update(
            self.progress.mean_losses(self.take_step.criterion.names), images=images, data_wait_s=batches.take_wait()
        )
        self._follow(self.control.after_step(flags, partial(self._read, leave=0)))

    def _take_step(self, micro_batches: list[Batch], first: int) -> int:
        """Steps over micro-batches ``first``... of the epoch. Returns their samples over all ranks."""
        progress = self.progress
        self.take_step.optimizer.set_rates(self.schedule, progress.updates)
        counts = [self.train_loader.global_images(first + number) for number in range(len(micro_batches))]
        self.take_step(micro_batches, counts, progress.updates + 1, self.control.flags())
        progress.batch += len(micro_batches)
        progress.step += len(micro_batches)
        progress.updates += 1
        return sum(counts) * self.run.config.samples_per_image

    def _batches_of_next_step(self) -> int:
        """How many batches to prefetch: 0 after the last step, and if validation decides which images follow."""
        per_epoch, done, accumulate = len(self.train_loader), self.progress.batch, self.plan.accumulate
        if done < per_epoch:
            return min(accumulate, per_epoch - done)
        is_known = self.train_loader.class_weights is None and not self.run.config.time
        is_known &= self.progress.epoch + 1 < self.control.epochs
        return min(accumulate, per_epoch) if is_known else 0

    def _read(self, *, leave: int) -> StepFlags:
        """Reads the values of all steps but the newest ``leave``. Returns what any rank requested with them."""
        flags = NO_FLAGS
        for values in self.take_step.reader.pop(leave=leave):
            self.control.check_finite(values)
            flags |= values.flags
            if values.finite:
                self.progress.add_losses(values.losses)
        return flags

    def _follow(self, action: Action) -> None:
        if action is not Action.CONTINUE:
            self._save()

    @contextmanager
    def _saved_if_unreadable(self) -> Iterator[None]:
        """Saves a run of one process if the block cannot read its images, as from a store that does not answer. Other
        ranks could be one step ahead; their run continues from its last checkpoint."""
        try:
            yield
        except UserError:
            if self._first_step_done and self.ctx.world_size == 1:
                self._read(leave=0)
                self._save()
            raise

    def _save(
        self, *, is_best: bool = False, metrics: dict[str, float] | None = None, unscored: Unscored | None = None
    ) -> dict[str, Any]:
        run = {
            "world_size": self.ctx.world_size,
            "device": self.ctx.device.type,
            "seconds": self.control.seconds(),
            "epoch_batches": len(self.train_loader),
        }
        unscored = unscored or self._unscored
        content = self.control.checkpointer.save(
            self.take_step,
            self.progress,
            run=run,
            is_best=is_best,
            metrics=metrics,
            unscored=unscored and unscored.stored(),
        )
        self.control.saved()
        return content

    def _end_epoch(self) -> None:
        """After the last step of an epoch: gives all ranks one model, validates, saves, reports.

        A resumed run may begin here."""
        progress, step = self.progress, self.take_step
        if not progress.joined:
            for model in (step.model, step.ema.module):
                average_buffers(model, self.ctx)
                broadcast_parameters(model, self.ctx)
            progress.joined = True
        if self.control.fit_into_time(self._epoch_end_s):
            self._plan_steps()
            self.train_loader.set_epochs(self.control.epochs)
        self._settle()
        if self.control.is_stopped:
            return
        epoch = progress.epoch + 1
        is_due, is_remote = self.control.validates_after(epoch), False
        if is_due and self._remote is not None and not self.control.may_end_after(epoch):
            is_remote = self._remote.is_free()
        result = self._validate(step.ema.module) if is_due and not is_remote else None
        if self.control.is_stopped:
            return
        losses = progress.mean_losses(step.criterion.names)
        progress.epoch += 1
        progress.begin_epoch()
        row = self._row_without_scores(losses)
        if is_remote:
            unscored = Unscored(row, self._refining, {})
            content = self._save(unscored=unscored)
            self._unscored = replace(unscored, content=content)
            self._remote.send(progress.epoch, content.get("ema"), refining=self._refining)
        else:
            is_best, metrics = self.results.count(row, result)
            self._save(is_best=is_best, metrics=metrics)
            self.results.announce(result)
        self._follow(self.control.after_epoch(self.results.row))

    def _settle(self) -> None:
        """Counts the result of the newest epoch if other processes were to validate it. If they have no result, these
        processes validate the epoch; a signal that ends this leaves it unscored."""
        unscored = self._unscored
        if unscored is None:
            return
        result = self._remote.collect(self.control.stops_validation) if self._remote is not None else None
        if not broadcast_object(self.ctx, result is not None):
            model = copy.deepcopy(self.take_step.ema.module)
            model.load_state_dict(broadcast_object(self.ctx, unscored.content.get("ema")))
            self.take_step.criterion.set_refining(unscored.refining)
            result = self._validate(model)
            self.take_step.criterion.set_refining(self._refining)
            if self.control.is_stopped_by_signal:
                return
        self._unscored = None
        is_best, metrics = self.results.count(unscored.row, result)
        if self.ctx.is_main:
            self.control.checkpointer.save_scored(unscored.scored(self.progress, metrics), is_best=is_best)
        self.results.announce(result)

    def _validate(self, model: nn.Module) -> EvalResult | None:
        """On every rank; rank 0 has the result. None too when a signal ends it."""
        self._follow(self.control.before_validation())
        with self._saved_if_unreadable():
            result = self.validate(model, should_stop=self.control.stops_validation)
        self._follow(self.control.after_validation())
        return result

    def _row_without_scores(self, losses: dict[str, float]) -> dict[str, float]:
        optimizer = self.take_step.optimizer
        optimizer.set_rates(self.schedule, self.progress.updates - 1)  # a resumed run may have taken no step
        losses = {f"train/{k}": v for k, v in losses.items()}
        return {"time": self.control.seconds(), **losses, **optimizer.rates(), **self._speed}
