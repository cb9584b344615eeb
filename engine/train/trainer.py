"""The training loop over epochs and steps. A validator validates each epoch (engine/train/validation.py), and
epoch_results.py derives the epoch's results; everything else is done by hooks (engine/hooks)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from data.loading.loader import InfiniteDataLoader
from data.loading.prefetcher import Prefetcher
from engine.checkpoint.checkpoint import copy_to_cpu
from engine.checkpoint.checkpointer import Checkpointer
from engine.checkpoint.progress import CheckpointHeader, PendingEpoch, Progress, RunConditions
from engine.hooks.hook import Action, Epoch, Hook, Hooks, Point
from engine.optim.schedule import StepPlan, build_schedule
from engine.parallel.control import RunControl
from engine.parallel.ddp import average_buffers, broadcast_parameters
from engine.parallel.step_values import NO_FLAGS, StepFlags
from engine.run.complete_record import record_reported
from engine.run.run import TrainingOutcome, TrainingRun
from engine.train.epoch_results import EpochResults
from engine.train.step import TrainStep
from utils.config.epochs import is_closing_epoch, validates_after
from utils.config.flags import as_flag
from utils.logger import get_logger
from utils.program import resume_flag


class Validator(Protocol):
    """Validates epochs whose steps are done (engine/train/validation.py). Every rank has one and makes the same calls.
    The trainer follows the actions that it returns."""

    def validate(self, epoch: Epoch) -> Action:
        """Sets the result of an epoch, scored with the current averaged weights of the run.

        Returns `Action.STOP` if a signal has ended the validation: a resumed run then validates the epoch again.
        """
        ...

    def takes_weights(self) -> bool:
        """Returns True if other processes can validate an epoch now; the same on all ranks."""
        ...

    def send(self, pending: PendingEpoch) -> None:
        """Lets other processes validate an epoch, after `takes_weights` returned True. Called only while no epoch is
        pending."""
        ...

    def has_scores(self) -> bool:
        """Returns True if `collect` need not wait; the same on all ranks."""
        ...

    def collect(self, pending: PendingEpoch, epoch: Epoch, *, is_closing: bool) -> Action:
        """Sets the result of ``epoch``, which was sent as ``pending``, or was left so by an earlier start of the run.

        ``is_closing``: whether the epoch that is trained now is a closing one, see
        `models.losses.base.Criterion.set_closing`.

        Returns `Action.STOP` if a signal has ended its validation.
        """
        ...

    def close(self) -> None:
        """Ends the evaluating processes, if there are any. The caller of `fit` calls this however `fit` ends."""
        ...


class Trainer:
    """Trains the remaining epochs of a run. Every rank has one and makes the same calls. Hooks are called in list
    order. See also `engine.train.report_only.ReportOnlyTrainer`."""

    def __init__(
        self,
        *,
        run: TrainingRun,
        step: TrainStep,
        loader: InfiniteDataLoader,
        steps: StepPlan,
        progress: Progress,
        pending: PendingEpoch | None,
        control: RunControl,
        checkpointer: Checkpointer,
        validator: Validator,
        results: EpochResults,
        hooks: Sequence[Hook],
    ) -> None:
        self.run = run
        self.step = step
        self.ctx = step.ctx
        self.loader = loader
        self.progress = progress
        self.pending = pending  # the newest epoch, if its scores are still missing: checkpoints store it
        self.control = control
        self.checkpointer = checkpointer
        self.validator = validator
        self.results = results
        self.hooks = Hooks(hooks)
        self.step_samples = 0  # samples of the newest step, see `Training`
        self.data_wait_s = 0.0  # before the newest step
        self.is_closing = False  # see `models.losses.base.Criterion.set_closing`
        self._stopped = False  # this process takes no more steps
        self._last_recorded = Epoch(progress.epoch)
        self._started = time.monotonic()
        if run.started_from is not None:
            self._last_recorded.metrics = run.started_from.metrics
            self._started -= run.started_from.seconds  # as if there had been no interruption
        self._set_steps(steps)

    def _set_steps(self, steps: StepPlan) -> None:
        """Replaces the step plan."""
        self.steps = steps
        self.epochs = steps.epochs
        self.schedule = build_schedule(self.run.hyp, steps, cosine=self.run.config.cos_lr)

    def fit(self) -> TrainingOutcome:
        """Runs the rest of the run. Raises as `RunControl.raise_if_aborted` does, after the same step on all ranks."""
        with self.control.training():
            self._train()
        return self._finish()

    def _train(self) -> None:
        """Trains, then ends the run as the ranks have agreed, with all files written."""
        try:
            self._start()
            if not self.control.agree_on_abort():
                self._do_remaining_work()
                self.call_hooks("after_steps")
            if not self.control.agree_on_abort():
                self._finish_training()
            self.checkpointer.flush()
            self.control.raise_if_aborted(self.progress.describe(len(self.loader)), self._continuation())
        finally:
            self.checkpointer.wait()

    def _start(self) -> None:
        progress = self.progress
        self.loader.start_at(progress.epoch, progress.batch)
        if progress.updates:  # the rates of the newest step by this schedule: a hook may save the run now
            self.step.optimizer.set_rates(self.schedule, progress.updates - 1)
        self.call_hooks("start")
        self._follow(self.control.agree())
        self.checkpointer.flush()  # before the first step, last.pt must no longer say that a callback has ended the run

    def _do_remaining_work(self) -> None:
        """Runs the remaining epochs. First concludes an epoch of an earlier start."""
        if not self._stopped:
            self._conclude_pending(saves_last=True)
        batches = Prefetcher(iter(self.loader), device=self.ctx.device)
        while not self._stopped and self.progress.epoch < self.epochs:
            self._train_epoch(batches)
            if not self._stopped:
                self._end_epoch()

    def _finish_training(self) -> None:
        """Completes the run after the last step, unless a signal leaves that to a resumed run."""
        if self._conclude_pending(saves_last=True).skips_rest:  # the last epoch, if a callback has ended the run
            return
        self.call_hooks("after_training")

    def _finish(self) -> TrainingOutcome:
        """Calls the hooks that come last, and records that the run has been reported."""
        if self.control.callback_stop_followed and not self._has_ended():
            position = self.progress.describe(len(self.loader))
            get_logger().info(
                "ended by a callback after %s; continue with: %s", position, resume_flag(self.checkpointer.last)
            )
        self.call_hooks("finish")
        failure = self.control.late_failure(self._continuation())
        if self.ctx.is_main and failure is None:
            record_reported(self.run.folder, self.run.run_id, self.progress.epoch)
        return TrainingOutcome(self.run.folder, self.run.config, failure)

    def _has_ended(self) -> bool:
        """Returns True if no epoch is left to train or to score; ``--resume PATH`` then refuses to continue."""
        config = self.run.config
        progress = self.progress
        stops_early = progress.stops_early(config.patience, epochs=self.epochs, val_every=config.val_every)
        return self.pending is None and (progress.epoch >= self.epochs or stops_early)

    def _ended_by_callback(self) -> bool:
        """Returns True if a callback has ended the run, see `CheckpointHeader`."""
        return self.control.callback_stop_followed

    def _continuation(self) -> str:
        """Returns how to complete the run with another command."""
        if not self._has_ended() and not self._ended_by_callback():
            return f"continue with: {resume_flag(self.checkpointer.last)}"
        folder = self.run.folder
        location = f"{as_flag('project', str(folder.parent))} {as_flag('name', folder.name)}"
        return f"write the report with: --resume auto {location}"

    def _train_epoch(self, batches: Prefetcher) -> None:
        """Runs the remaining steps of the epoch."""
        self._set_closing(self.progress.epoch + 1)
        self.call_hooks("before_epoch")
        while self.progress.batch < len(self.loader) and not self._stopped:
            self._train_step(batches)

    def _set_closing(self, epoch: int) -> None:
        """Tells the loss whether ``epoch``, from 1, is one of the closing epochs (``close_mosaic``)."""
        self.is_closing = is_closing_epoch(epoch, self.epochs, self.run.hyp.close_mosaic)
        self.step.criterion.set_closing(self.is_closing)

    def _train_step(self, batches: Prefetcher) -> None:
        """Takes one step of the optimizer, and follows what hooks and other ranks request."""
        progress = self.progress
        first = progress.batch
        per_epoch = len(self.loader)
        micro_batches = [next(batches) for _ in range(min(self.steps.accumulate, per_epoch - first))]
        numbers = range(first, first + len(micro_batches))
        counts = [self.loader.global_images(number) for number in numbers]
        samples = sum(self.loader.global_samples(number) for number in numbers)  # --quad: four to an image
        self.step.optimizer.set_rates(self.schedule, progress.updates)
        self.step(micro_batches, counts, updates=progress.updates + 1, flags=self.control.flags(), samples=samples)
        progress.count_step(len(micro_batches))
        batches.prefetch(self._batches_of_next_step())
        self.step_samples = samples
        self.data_wait_s = batches.pop_wait_time()
        flags = self.read_values(leave=0 if progress.batch == per_epoch else 1)
        action = self.hooks.call("after_step", self)  # followed once the ranks have agreed on it
        self._follow(self.control.after_step(flags, action, lambda: self.read_values(leave=0)))

    def _batches_of_next_step(self) -> int:
        """Returns how many batches to prefetch: 0 if no step follows, or if a hook decides the images of the next
        epoch."""
        left = len(self.loader) - self.progress.batch
        if not left and self.progress.epoch + 1 < self.epochs and not self.hooks.decide_next_epoch:
            left = len(self.loader)
        return min(self.steps.accumulate, left)

    def read_values(self, *, leave: int) -> StepFlags:
        """Reads the values of all steps but the newest ``leave``, which the device may not have computed yet. Returns
        the flags that any rank has set."""
        flags = NO_FLAGS
        for values in self.step.reader.pop(leave=leave):
            flags |= values.flags
            self.progress.count_losses(values.losses, is_finite=values.finite)
            self.call_hooks("after_read", values)
        return flags

    def _end_epoch(self) -> None:
        """Ends an epoch whose steps are done, unless a signal stops the run first. A resumed run may begin here."""
        self._average_over_ranks()
        row = self.results.training_row(self.step, self.schedule, self.progress)
        epoch = Epoch(self.progress.epoch + 1, row)
        if self.call_hooks("after_last_step", epoch).skips_rest:
            return
        if self._conclude_pending(saves_last=False).skips_rest:  # its scores decide whether this epoch may be the last
            return
        if self._validate(epoch).skips_rest:
            return
        self.progress.complete_epoch()
        if self.pending is None:
            self._record(epoch)
            self.save_epoch(epoch)
            self.call_hooks("report", epoch)
        else:  # it has no scores yet
            self.save_epoch(epoch)
        self.call_hooks("after_epoch", epoch)
        self._follow(self.control.agree())

    def _validate(self, epoch: Epoch) -> Action:
        """Validates an epoch, if that is due: at once, or in other processes while the next one is trained."""
        if not validates_after(epoch.number, self.epochs, self.run.config.val_every):
            return Action.CONTINUE
        if self._can_wait_for_scores(epoch) and self.validator.takes_weights():
            self.pending = self._pending_epoch(epoch)
            self.validator.send(self.pending)
            return Action.CONTINUE
        self.call_hooks("before_validation")
        return self._follow(self.validator.validate(epoch))

    def _can_wait_for_scores(self, epoch: Epoch) -> bool:
        """Returns True if an epoch may be validated after the next one: if it is neither the last nor one at which
        ``--patience`` may end the run."""
        may_stop_early = self.progress.has_stalled(self.run.config.patience, epoch=epoch.number)
        return epoch.number < self.epochs and not may_stop_early

    def _pending_epoch(self, epoch: Epoch) -> PendingEpoch:
        """Returns the state of an epoch whose steps are done, to be kept until the result of its validation arrives."""
        progress = replace(self.progress)
        progress.complete_epoch()
        return PendingEpoch(
            row={"time": self.seconds(), **epoch.row},
            is_closing=self.is_closing,
            progress=progress,
            ema=copy_to_cpu(self.step.ema.module.state_dict()) if self.ctx.is_main else {},
        )

    def _record(self, epoch: Epoch) -> None:
        """Scores and records an epoch whose validation is done, or not due."""
        self.results.fill_in(self.ctx, epoch, self.progress, seconds=self.seconds())
        self.call_hooks("record", epoch)
        self._last_recorded = replace(epoch, evaluation=None)  # its detections may take gigabytes

    def _conclude_pending(self, *, saves_last: bool) -> Action:
        """Records, saves and reports the pending epoch, if there is one. A signal that ends its validation leaves it
        pending.

        ``saves_last``: saves the run with its scores at once, because no other epoch ends now.
        """
        pending = self.pending
        if pending is None:
            return Action.CONTINUE
        epoch = Epoch(pending.progress.epoch, dict(pending.row))
        if not self.validator.has_scores():
            self.call_hooks("before_validation")
        action = self._follow(self.validator.collect(pending, epoch, is_closing=self.is_closing))
        if action.skips_rest:
            return action
        self.pending = None
        self._record(epoch)
        # Only its own files: the run itself may be in a later epoch by now.
        self.checkpointer.save_scored(pending, self.progress, is_best=epoch.is_best, metrics=epoch.metrics)
        self.call_hooks("report", epoch)
        if saves_last:
            self.save_last()
        return action

    def _average_over_ranks(self) -> None:
        """Makes the models of all ranks equal: averages batch-norm statistics, and broadcasts rank 0's parameters."""
        if self.progress.buffers_averaged:
            return
        for model in (self.step.model, self.step.ema.module):
            average_buffers(model, self.ctx)
            broadcast_parameters(model, self.ctx)
        self.progress.record_averaged_buffers()

    def call_hooks(self, point: Point, *args: Any) -> Action:
        """Calls a method of all hooks, and follows the action that they return."""
        return self._follow(self.hooks.call(point, self, *args))

    def _follow(self, action: Action) -> Action:
        """Saves or ends the run, as ``action`` requests."""
        if action.saves:
            self._save_on_request()
        self._stopped |= action.ends_run
        return action

    def _save_on_request(self) -> None:
        """Saves the run because a hook, a signal or another rank asks for it."""
        self.save_last()

    def save_last(self) -> None:
        """Saves the run in last.pt."""
        self.checkpointer.save_last(self.step, self._header())
        self.hooks.after_save()

    def save_epoch(self, epoch: Epoch) -> None:
        """Saves the run at the end of ``epoch``: last.pt, and best.pt and epochN.pt if they are due."""
        self.checkpointer.save_epoch(self.step, self._header(), is_best=epoch.is_best)
        self.hooks.after_save()

    def _header(self) -> CheckpointHeader:
        """Returns the header of a checkpoint taken now. It contains the scores of the newest epoch until the next step
        is taken."""
        progress = self.progress
        conditions = RunConditions(
            world_size=self.ctx.world_size,
            device=self.ctx.device.type,
            seconds=self.seconds(),
            epoch_batches=len(self.loader),
            images=len(self.loader.samples),
        )
        is_at_end_of_epoch = progress.batch == 0 and progress.epoch == self._last_recorded.number
        metrics = self._last_recorded.metrics if is_at_end_of_epoch else {}
        return CheckpointHeader(
            progress=progress,
            run=conditions,
            metrics=metrics,
            pending=self.pending,
            ended_by_callback=self._ended_by_callback(),
        )

    def seconds(self) -> float:
        """Returns how long the run has trained, over all its starts."""
        return time.monotonic() - self._started

    def set_epochs(self, epochs: int) -> None:
        """Changes the number of epochs of the whole run."""
        self._set_steps(replace(self.steps, epochs=epochs))
        self.loader.set_epochs(epochs)
        self.checkpointer.set_epochs(epochs)
