"""The training loop: epochs of steps, and how an epoch ends. Hooks do everything else."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from data.loading.prefetcher import Prefetcher
from engine.optim.schedule import StepPlan, build_schedule
from engine.parallel.ddp import average_buffers, broadcast_parameters
from engine.train.checkpoint import Progress
from engine.train.control import Action, RunControl
from engine.train.ledger import Epoch, EpochLedger
from engine.train.saver import Saver
from engine.train.step import StepValues, TrainStep
from utils.batches import Batch
from utils.config.epochs import is_closing_epoch, validates_after
from utils.config.settings import RunSettings
from utils.distributed.context import DistributedContext, max_over_ranks
from utils.errors import UserError
from utils.logger import ONE_RANK, get_logger

if TYPE_CHECKING:
    from data.loading.loader import InfiniteDataLoader

SAVE_BEFORE_VALIDATION_S = 60.0  # since the last save; a checkpoint costs less than repeating as much training
# GradScaler starts at 2^16: up to 16 consecutive overflows are its normal search for the scale.
MAX_SCALE_HALVINGS = 16
MAX_CONSECUTIVE_BAD_STEPS = 20  # non-finite steps in a row that end a run; must exceed `MAX_SCALE_HALVINGS`

Point = Literal["start", "after_step", "epoch_trained", "epoch_scored", "epoch_saved", "finish"]


class Hook:
    """Base class, which does nothing. Each method is a point of the loop, in the order of the calls:

    ============= =====================================================================================================
    start         before the first step of this process, in a new and in a resumed run
    after_step    after each step of the optimizer
    epoch_trained after the last step of an epoch, when all ranks have the same model
    epoch_scored  when the epoch has its scores and its row, before it is saved
    epoch_saved   when it is saved: for what takes long or may fail, such as plots
    finish        when the run is complete and all checkpoints are written; not after a signal or an error
    close         at the end, however the training has ended
    ============= =====================================================================================================

    With ``--eval-ranks`` an epoch is scored and saved in this sense at the end of the next one. A run that has ended
    without the scores of its last epoch gets them in a start that takes no step.

    Hooks are on every rank, in the same order, and may communicate; those with ``on_rank_0`` exist on rank 0 alone, and
    call no collective. On all ranks together, a hook may end the run (`Trainer.end`). A single rank requests a save or
    a stop (`RunControl.request_save`, `request_stop`), and all ranks follow after the next step or epoch. State that a
    hook needs when a run resumes is in `Progress`, or in a file that the hook writes.
    """

    on_rank_0 = False  # the hook exists on rank 0 only
    # The hook decides in `epoch_trained` or later the images of the next epoch, or whether there is one. None of its
    # batches is prefetched then.
    decides_next_epoch = False

    def start(self, trainer: Trainer) -> None: ...
    def after_step(self, trainer: Trainer) -> None: ...
    def epoch_trained(self, trainer: Trainer, epoch: Epoch) -> None: ...
    def epoch_scored(self, trainer: Trainer, epoch: Epoch) -> None: ...
    def epoch_saved(self, trainer: Trainer, epoch: Epoch) -> None: ...
    def finish(self, trainer: Trainer) -> None: ...
    def close(self) -> None: ...


@dataclass(kw_only=True, eq=False)
class Trainer:
    """Trains the remaining epochs of a run. Every rank has one and makes the same calls."""

    ctx: DistributedContext
    settings: RunSettings
    steps: StepPlan  # with ``--time``, its number of epochs changes
    step: TrainStep
    loader: InfiniteDataLoader
    progress: Progress
    ledger: EpochLedger
    saver: Saver
    control: RunControl
    hooks: Sequence[Hook] = ()
    takes_steps: bool = True  # False: a run that has ended, whose last epoch may lack its scores

    def __post_init__(self) -> None:
        self.batches: list[Batch] = []  # this rank's micro-batches of the newest step
        self.step_samples = 0  # samples of the newest step over all ranks; with ``--quad``, four per image
        self.data_wait_s = 0.0  # how long the newest step waited for its samples
        self.epoch_started = time.monotonic()  # when this process began to take steps of the newest epoch
        self.between_epochs_s = 0.0  # how long validation and saves took before it; 0: not known
        self._epoch_trained = 0.0  # when this process took the last step of an epoch
        self._stopped = not self.takes_steps  # this process takes no more steps
        self.schedule = build_schedule(self.settings.hyp, self.steps, cosine=self.settings.config.cos_lr)

    def set_epochs(self, epochs: int) -> None:
        """Changes the number of epochs of the whole run."""
        self.steps = replace(self.steps, epochs=epochs)
        self.schedule = build_schedule(self.settings.hyp, self.steps, cosine=self.settings.config.cos_lr)
        self.loader.set_epochs(epochs)
        self.saver.set_epochs(epochs)

    def end(self) -> None:
        """Takes no more steps. All ranks call this at the same point."""
        self._stopped = True

    def fit(self) -> UserError | None:
        """Runs the rest of the run. Returns the error of a callback's ``on_end``, on rank 0. Raises as
        `RunControl.raise_if_aborted` does, after the same step on all ranks."""
        try:
            with self.control.training():
                self._start()
                batches = Prefetcher(iter(self.loader), device=self.ctx.device)
                while not self._stopped and self.progress.epoch < self.steps.epochs:
                    self._train_epoch(batches)
                if not self.control.agree_on_abort():
                    self._record_epochs()
                self.saver.flush()
                position = self.progress.describe(len(self.loader))
                self.control.raise_if_aborted(position, self._continuation())
                if self.control.stopped_by_callback and not self._is_complete():
                    resume = self.saver.resume_flags()
                    get_logger().info("ended by a callback %s; to continue: %s --epochs N", position, resume)
                self._call_hooks("finish")  # a signal is deferred: the run is complete
                return self.control.late_failure(self._continuation())
        except RuntimeError as error:  # such as that of a collective when another process has ended
            error.add_note(self._continuation())
            raise
        finally:
            self.saver.wait()

    def _start(self) -> None:
        """Brings loader, schedule and last.pt to the position of the run, and scores what an earlier start has left."""
        progress = self.progress
        self.loader.start_at(progress.epoch, progress.batch)
        if self.takes_steps:
            self.loader.start()  # before the writers of checkpoints and of TensorBoard have threads
        if progress.updates:  # the rates of the newest step by this schedule: a hook may save the run now
            self.step.optimizer.set_rates(self.schedule, progress.updates - 1)
        self._save()
        self._call_hooks("start")
        self._follow(self.control.agree())
        self.saver.flush()
        if not self.control.has_stopped:
            self.ledger.open()
            self._record_epochs()
            self.saver.flush()

    def _train_epoch(self, batches: Prefetcher) -> None:
        """Takes the remaining steps of an epoch, and ends it, unless a signal or a request stops the run before."""
        self.epoch_started = time.monotonic()
        if self._epoch_trained:
            self.between_epochs_s = self.epoch_started - self._epoch_trained
        is_closing = is_closing_epoch(self.progress.epoch + 1, self.steps.epochs, self.settings.hyp.close_mosaic)
        self.step.criterion.set_no_mosaic(is_closing)
        while self.progress.batch < len(self.loader) and not self._stopped:
            self._train_step(batches)
        if not self._stopped:
            self._end_epoch(is_closing=is_closing)

    def _train_step(self, batches: Prefetcher) -> None:
        """Takes one step of the optimizer, and follows what hooks and other ranks request."""
        progress = self.progress
        first = progress.batch
        with self._reading_data():
            self.batches = [next(batches) for _ in range(min(self.steps.accumulate, len(self.loader) - first))]
        numbers = range(first, first + len(self.batches))
        counts = [self.loader.global_images(number) for number in numbers]
        samples = sum(self.loader.global_samples(number) for number in numbers)  # --quad: four to an image
        self.step.optimizer.set_rates(self.schedule, progress.updates)
        self.step(self.batches, counts, updates=progress.updates + 1, flags=self.control.flags(), samples=samples)
        progress.count_step(len(self.batches))
        with self._reading_data():
            batches.prefetch(self._batches_of_next_step())
        self.step_samples = samples
        self.data_wait_s = batches.pop_wait_time()
        self._read_values(leave=0 if progress.batch == len(self.loader) else 1)
        self.saver.check()
        if self.ctx.is_main and self.saver.is_due():  # one clock decides for all
            self.control.request_save()
            self.saver.postpone()
        self._call_hooks("after_step")
        self._follow(self.control.after_step())

    def _batches_of_next_step(self) -> int:
        """Returns how many batches to prefetch: 0 if no step follows, or if a hook decides the images of the next
        epoch."""
        left = len(self.loader) - self.progress.batch
        is_last = self.progress.epoch + 1 >= self.steps.epochs
        if not left and not is_last and not any(hook.decides_next_epoch for hook in self.hooks):
            left = len(self.loader)
        return min(self.steps.accumulate, left)

    def _end_epoch(self, *, is_closing: bool) -> None:
        """Completes an epoch: the ranks' models are made equal, scores are recorded once they are due, and the run is
        saved."""
        for model in (self.step.model, self.step.ema.module):
            average_buffers(model, self.ctx)
            broadcast_parameters(model, self.ctx)
        losses = self.progress.mean_losses(self.step.criterion.names)
        row = {f"train/{name}": value for name, value in losses.items()} | self.step.optimizer.rates()
        epoch = Epoch(self.progress.epoch + 1, row, is_closing)
        self.progress.complete_epoch()
        self._epoch_trained = time.monotonic()
        self._call_hooks("epoch_trained", epoch)  # with --time, one may change the number of epochs
        epoch.is_validated = validates_after(epoch.number, self.steps.epochs, self.settings.config.val_every)
        self.ledger.add(epoch)
        self._record_epochs()
        self._follow(self.control.agree())

    def _record_epochs(self) -> None:
        """Records the epochs whose scores are due, saves the run, and reports them."""
        if not self.ledger.unscored:
            return
        is_due = self.ctx.is_main and self.saver.is_due(SAVE_BEFORE_VALIDATION_S)
        if max_over_ranks(self.ctx, int(is_due)):  # a validation may be killed or fail
            self._save()
        may_end = self._stopped or self._has_last_epoch()  # unless an epoch that waits for its scores is the best
        with self._reading_data():
            recorded = self.ledger.finish(is_last=may_end)
        self._stopped |= self.control.has_stopped
        for epoch in recorded:
            self._call_hooks("epoch_scored", epoch)
        self._save(best=next((epoch for epoch in reversed(recorded) if epoch.is_best), None))
        for epoch in recorded:
            self._call_hooks("epoch_saved", epoch)

    def _read_values(self, *, leave: int) -> None:
        """Counts the values of all steps but the newest ``leave``, which the device may not have computed yet."""
        for values in self.step.reader.pop(leave=leave):
            self.control.add_flags(values.flags)
            self.progress.count_losses(values.losses, is_finite=values.finite)
            if not values.finite:
                self._report_nonfinite(values)

    def _report_nonfinite(self, values: StepValues) -> None:
        """Names this rank's files of a step that was skipped. Raises UserError after `MAX_CONSECUTIVE_BAD_STEPS`."""
        bad_steps = self.progress.bad_steps
        if values.local_finite and self.step.scaler.is_enabled() and bad_steps <= MAX_SCALE_HALVINGS:
            get_logger().info("float16 gradients overflow: step skipped, the loss scale is halved")
        elif values.paths:  # this rank's shard of a small batch may be empty
            cause = f"gradient (norm {values.grad_norm})" if values.local_finite else "loss"
            message = "non-finite %s, step skipped; its files: %s"
            get_logger().log(ONE_RANK, message, cause, " ".join(values.paths))
        if bad_steps >= MAX_CONSECUTIVE_BAD_STEPS:
            self.saver.wait()
            good = f"begin a new run from the last good weights, --weights {shlex.quote(str(self.saver.last))},"
            remedy = good if self.saver.saved_updates else "start again"
            advice = "with a lower lr0 (--set lr0=...) or with --amp off"  # a run that continues can change neither
            raise UserError(f"stopped: the last {bad_steps} steps were not finite; {remedy} {advice}")

    def _call_hooks(self, point: Point, *args: Any) -> None:
        """Calls a method of all hooks."""
        for hook in self.hooks:
            getattr(hook, point)(self, *args)

    def _follow(self, action: Action) -> None:
        """Saves the run, and stops it, as ``action`` requests."""
        if action is not Action.CONTINUE:
            self._save()
        self._stopped |= action is Action.STOP

    def _save(self, *, best: Epoch | None = None) -> None:
        """Saves the run, with the values of all its steps; in best.pt the weights of ``best``."""
        self._read_values(leave=0)
        self.saver.save(self.ledger, best=best, ended_by_callback=self.control.stopped_by_callback)

    def _has_last_epoch(self) -> bool:
        """Returns whether the newest epoch is the last one, by its number or by ``--patience``."""
        stops_early = self.progress.stops_early(self.settings.config, self.steps.epochs)
        return self.progress.epoch >= self.steps.epochs or stops_early

    def _is_complete(self) -> bool:
        """Returns whether no epoch is left to train or to score; ``--resume PATH`` then says that it is complete."""
        return not self.ledger.unscored and self._has_last_epoch()

    def _continuation(self) -> str:
        """Returns how to complete the run with another command."""
        return self.saver.continuation(has_ended=self._is_complete() or self.control.stopped_by_callback)

    @contextmanager
    def _reading_data(self) -> Iterator[None]:
        """Adds to an error about the data set, such as an image that was moved, how to continue the run."""
        try:
            yield
        except UserError as error:
            raise type(error)(f"{error}; {self._continuation()}", whole=True) from None
