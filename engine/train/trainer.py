"""The training loop: epochs, steps, and the one road on which an epoch ends. Hooks do everything else."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from data.loading.loader import InfiniteDataLoader, ValidationLoader
from data.loading.prefetcher import Prefetcher
from engine.evaluation.evaluator import Evaluator
from engine.evaluation.fitness import Fitness
from engine.evaluation.metrics import METRICS
from engine.evaluation.result import EvalResult, Evaluation
from engine.evaluation.tables import number_text
from engine.optim.schedule import StepPlan, build_schedule
from engine.parallel.ddp import average_buffers, broadcast_parameters
from engine.train.checkpoint import (
    RESULT_FIELDS,
    Checkpoint,
    Checkpointer,
    CheckpointHeader,
    Progress,
    RunDescription,
    SaveContext,
    UnscoredEpoch,
    remove_unscored,
    weights_path,
)
from engine.train.choices import Choices
from engine.train.control import NO_FLAGS, Action, RunControl, StepFlags
from engine.train.resume import TrainingOutcome
from engine.train.scoring import Scorer
from engine.train.step import StepValues, TrainStep
from models.losses.base import Criterion
from utils.batches import Batch
from utils.config.epochs import is_closing_epoch, validates_after
from utils.config.flags import as_flag
from utils.config.settings import Hyperparameters, RunSettings, TrainConfig
from utils.distributed.context import DistributedContext, broadcast_object, max_over_ranks
from utils.errors import UserError
from utils.files.results_csv import CONFIDENCE_COLUMN
from utils.files.torch_file import read_checkpoint
from utils.logger import ONE_RANK, get_logger
from utils.program import resume_flag

SAVE_BEFORE_VALIDATION_S = 60.0  # since the last save; a checkpoint costs less than repeating as much training
# GradScaler starts at 2^16: up to 16 consecutive overflows are its normal search for the scale.
MAX_SCALE_HALVINGS = 16
MAX_CONSECUTIVE_BAD_STEPS = 20  # non-finite steps in a row that end a run; must exceed `MAX_SCALE_HALVINGS`

Point = Literal["start", "after_step", "epoch_trained", "epoch_scored", "epoch_saved", "finish"]


@dataclass(frozen=True, kw_only=True)
class Feed:
    """What a run trains on and is scored with: both splits, their loaders, the loss, and the evaluator."""

    loader: InfiniteDataLoader
    val_loader: ValidationLoader
    criterion: Criterion
    evaluator: Evaluator
    fitness: Fitness  # makes one score of a validation
    full_batch: int  # images in any batch but the last one of an epoch, over all ranks
    has_regions: bool  # batches may have ignore regions


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A run that has its folder, as it begins or continues. Equal on all ranks but for the settings that differ in its
    plan.

    The records do not change while it trains; step, progress and checkpointer do. With ``--time``, ``config.epochs``
    are those that were planned at the start; `Trainer.epochs` are the current ones.
    """

    ctx: DistributedContext
    folder: Path
    started_from: Checkpoint | None  # without tensors; None: the run started from the beginning
    takes_steps: bool  # False: a run that has ended, whose last epochs may lack scores
    description: RunDescription
    choices: Choices
    feed: Feed
    step: TrainStep
    progress: Progress
    unscored: list[UnscoredEpoch]  # complete epochs without scores, the oldest first
    control: RunControl
    checkpointer: Checkpointer
    scorer: Scorer

    @property
    def run_id(self) -> str:
        return self.description.run_id

    @property
    def settings(self) -> RunSettings:
        return self.choices.settings

    @property
    def config(self) -> TrainConfig:
        return self.settings.config

    @property
    def hyp(self) -> Hyperparameters:
        return self.settings.hyp


@dataclass
class Epoch(UnscoredEpoch):
    """An epoch after its last step: unscored, then with the results of its validation, if there was one."""

    evaluation: Evaluation | None = None  # on rank 0
    class_ap: np.ndarray | None = None  # (C,)
    metrics: dict[str, float] = field(default_factory=dict)  # by their names in results.csv
    is_best: bool = False


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

    With ``--eval-ranks`` an epoch is scored and saved in this sense at the end of a later one. A run that has ended
    without the scores of its last epochs gets them in a start that takes no step.

    Hooks are on every rank, in the same order, and may communicate: all ranks return the same action (None continues).
    Those with ``on_rank_0`` exist on rank 0 alone: they return no action, and call no collective. A single rank
    requests a save or a stop (`RunControl.request_save`, `request_stop`), and all ranks follow after the next step or
    epoch. State that a hook needs when a run resumes is in `Progress`, or in a file that the hook writes.
    """

    on_rank_0 = False  # the hook exists on rank 0 only
    # The hook decides in `epoch_trained` or later the images of the next epoch, or whether there is one. None of its
    # batches is prefetched then.
    decides_next_epoch = False

    def start(self, trainer: Trainer) -> Action | None: ...
    def after_step(self, trainer: Trainer) -> Action | None: ...
    def epoch_trained(self, trainer: Trainer, epoch: Epoch) -> Action | None: ...
    def epoch_scored(self, trainer: Trainer, epoch: Epoch) -> Action | None: ...
    def epoch_saved(self, trainer: Trainer, epoch: Epoch) -> Action | None: ...
    def finish(self, trainer: Trainer) -> Action | None: ...
    def close(self) -> None: ...


class Trainer:
    """Trains the remaining epochs of a run. Every rank has one and makes the same calls."""

    def __init__(self, run: TrainingRun, hooks: Sequence[Hook]) -> None:
        self.run = run
        self.ctx = run.ctx
        self.step = run.step
        self.loader = run.feed.loader
        self.val_loader = run.feed.val_loader
        self.progress = run.progress
        self.control = run.control
        self.checkpointer = run.checkpointer
        self.hooks = tuple(hooks)
        self.batches: list[Batch] = []  # this rank's micro-batches of the newest step
        self.step_samples = 0  # samples of the newest step over all ranks; with ``--quad``, four per image
        self.data_wait_s = 0.0  # how long the newest step waited for its samples
        self.epoch_started = time.monotonic()  # when this process began to take steps of the newest epoch
        # Complete epochs without scores, the oldest first.
        self._unscored = [Epoch(**vars(one)) for one in run.unscored]
        self._newest = Epoch(run.progress.epoch)  # the newest epoch with its scores
        self._stopped = not run.takes_steps  # this process takes no more steps
        self._started = time.monotonic()
        self._saved_at = self._started
        self._saved_updates = run.progress.updates  # steps before the newest last.pt
        if run.started_from is not None:
            self._newest.metrics = run.started_from.header.metrics
            self._started -= run.started_from.header.run.seconds  # as if there had been no interruption
        self._set_steps(run.choices.steps)

    def _set_steps(self, steps: StepPlan) -> None:
        self.steps = steps
        self.epochs = steps.epochs  # of the whole run
        self.schedule = build_schedule(self.run.hyp, steps, cosine=self.run.config.cos_lr)

    def set_epochs(self, epochs: int) -> None:
        """Changes the number of epochs of the whole run."""
        self._set_steps(replace(self.steps, epochs=epochs))
        self.loader.set_epochs(epochs)
        self.checkpointer.set_epochs(epochs)

    @property
    def has_unscored(self) -> bool:
        """Whether a complete epoch has no scores yet."""
        return bool(self._unscored)

    @property
    def next_row(self) -> int:
        """The next epoch that gets a row of results.csv, from 1."""
        return self._unscored[0].number if self._unscored else self.progress.epoch + 1

    def seconds(self) -> float:
        """Returns how long the run has trained, over all its starts."""
        return time.monotonic() - self._started

    def fit(self) -> TrainingOutcome:
        """Runs the rest of the run. Raises as `RunControl.raise_if_aborted` does, after the same step on all ranks."""
        try:
            with self.control.training():
                if self._start():
                    batches = Prefetcher(iter(self.loader), device=self.ctx.device)
                    while not self._stopped and self.progress.epoch < self.epochs:
                        self._train_epoch(batches)
                if not self.control.agree_on_abort():
                    self._record_scores(max_pending=0)
                self.checkpointer.flush()
                self.control.raise_if_aborted(self.progress.describe(len(self.loader)), self._continuation())
                return self._finish()
        except RuntimeError as error:  # such as that of a collective when another process has ended
            error.add_note(self._continuation())
            raise
        finally:
            self.checkpointer.wait()

    def _start(self) -> bool:
        """Writes the record of a new run, calls the hooks that come first, and scores what an earlier start has left.
        Returns False if the run ends here."""
        progress = self.progress
        started_from = self.run.started_from
        self.loader.start_at(progress.epoch, progress.batch)
        if self.run.takes_steps:
            self.loader.start()  # before the writers of checkpoints and of TensorBoard have threads
        if progress.updates:  # the rates of the newest step by this schedule: a hook may save the run now
            self.step.optimizer.set_rates(self.schedule, progress.updates - 1)
        was_ended = started_from is not None and started_from.header.ended_by_callback
        # A run has its record before its first step, and before other processes score it; if it trains on, it is no
        # longer ended.
        if started_from is None or (self.run.takes_steps and was_ended) or self.run.scorer.max_pending:
            self.save_last()
        self._call_hooks("start")
        if self.ctx.is_main:  # a kill may have left files of an epoch that is trained again
            remove_unscored(self.run.folder, keep={epoch.number for epoch in self._unscored})
        action = self.control.agree()
        self._follow(action)
        if Action.SKIP_REST not in action:
            self._score_earlier_epochs()
        self.checkpointer.flush()
        return not self._stopped

    def _score_earlier_epochs(self) -> None:
        """Lets the scorer begin, and scores the epochs that an earlier start has left."""
        self.checkpointer.flush()
        self.run.scorer.open()
        for epoch in self._unscored:
            self._submit(epoch)
        # The earlier start may have ended before it saved the end of the newest epoch.
        is_epoch_end = any(map(self._has_current_weights, self._unscored))
        self._record_scores(max_pending=self._max_pending(), is_epoch_end=is_epoch_end)

    def _train_epoch(self, batches: Prefetcher) -> None:
        """Takes the remaining steps of an epoch, and ends it, unless a signal or a request stops the run before."""
        self.epoch_started = time.monotonic()
        is_closing = is_closing_epoch(self.progress.epoch + 1, self.epochs, self.run.hyp.close_mosaic)
        self.step.criterion.set_no_mosaic(is_closing)
        while self.progress.batch < len(self.loader) and not self._stopped:
            self._train_step(batches)
        if not self._stopped:
            self._end_epoch(is_closing=is_closing)

    def _end_epoch(self, *, is_closing: bool) -> None:
        """Completes an epoch: the ranks' models are made equal, its scores are read if they are there, and it is
        saved."""
        for model in (self.step.model, self.step.ema.module):
            average_buffers(model, self.ctx)
            broadcast_parameters(model, self.ctx)
        losses = self.progress.mean_losses(self.step.criterion.names)
        row = {f"train/{name}": value for name, value in losses.items()} | self.step.optimizer.rates()
        epoch = Epoch(self.progress.epoch + 1, row, is_closing)
        self.progress.complete_epoch()
        self._unscored.append(epoch)
        action = self._ask_hooks("epoch_trained", epoch)  # with --time, it may change the number of epochs
        epoch.is_validated = validates_after(epoch.number, self.epochs, self.run.config.val_every)
        self._follow(action)
        self._submit(epoch)
        self._record_scores(max_pending=self._max_pending(), is_epoch_end=True)
        self._follow(self.control.agree())

    def _max_pending(self) -> int:
        """Returns how many epochs may still wait for their scores: none after the last epoch, nor where ``--patience``
        would end the run if none of them were better than the best epoch, or than the first."""
        progress = self.progress
        patience = self.run.config.patience
        is_last = self._stopped or progress.epoch >= self.epochs
        is_decisive = is_last or 0 < patience <= progress.epoch - max(progress.best_epoch, 0)
        return 0 if is_decisive else self.run.scorer.max_pending

    def _train_step(self, batches: Prefetcher) -> None:
        """Takes one step of the optimizer, and follows what hooks and other ranks request."""
        progress = self.progress
        first = progress.batch
        per_epoch = len(self.loader)
        with self._reading_data():
            self.batches = [next(batches) for _ in range(min(self.steps.accumulate, per_epoch - first))]
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
        flags = self._read_values(leave=0 if progress.batch == per_epoch else 1)
        self.checkpointer.check()
        if self.ctx.is_main and self._is_save_due(self.run.config.save_minutes * 60):  # one clock decides for all
            self.control.request_save()
            self._saved_at = time.monotonic()
        action = self._ask_hooks("after_step")  # followed once the ranks have agreed on it
        self._follow(self.control.after_step(flags, action, lambda: self._read_values(leave=0)))

    def _batches_of_next_step(self) -> int:
        """Returns how many batches to prefetch: 0 if no step follows, or if a hook decides the images of the next
        epoch."""
        left = len(self.loader) - self.progress.batch
        if not left and self.progress.epoch + 1 < self.epochs and not any(h.decides_next_epoch for h in self.hooks):
            left = len(self.loader)
        return min(self.steps.accumulate, left)

    def _read_values(self, *, leave: int) -> StepFlags:
        """Reads the values of all steps but the newest ``leave``, which the device may not have computed yet. Returns
        the flags that any rank has set."""
        flags = NO_FLAGS
        for values in self.step.reader.pop(leave=leave):
            flags |= values.flags
            self.progress.count_losses(values.losses, is_finite=values.finite)
            if not values.finite:
                self._report_nonfinite(values)
        return flags

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
            self.checkpointer.wait()
            last = self.checkpointer.last
            good = f"begin a new run from the last good weights, --weights {shlex.quote(str(last))},"
            remedy = good if self._saved_updates else "start again"
            advice = "with a lower lr0 (--set lr0=...) or with --amp off"  # a run that continues can change neither
            raise UserError(f"stopped: the last {bad_steps} steps were not finite; {remedy} {advice}")

    def _has_current_weights(self, epoch: Epoch) -> bool:
        """Returns True if the averaged weights are still those of an epoch: no step was taken after it."""
        return epoch.number == self.progress.epoch and self.progress.batch == 0 and not epoch.has_own_file

    def _submit(self, epoch: Epoch) -> None:
        """Lets other processes score an epoch, if they do (``--eval-ranks``), by its weights in a file."""
        scorer = self.run.scorer
        if scorer.max_pending and epoch.is_validated:
            scorer.submit(epoch.number, is_closing=epoch.is_closing)
            if self._has_current_weights(epoch):  # otherwise an earlier start has written them
                self.checkpointer.save_weights(self.step, self._header(), epoch.number)

    def _record_scores(self, *, max_pending: int, is_epoch_end: bool = False) -> None:
        """Scores the epochs that have no scores (`_read_scores`), saves the run, and reports them."""
        if not self._unscored:
            return
        if not max_pending:
            self._save_before_validation()
        scored: list[Epoch] = []
        best: dict[str, Any] | None = None  # content of best.pt, if it is of an epoch before the newest
        for epoch in self._read_scores(max_pending):
            if epoch.is_best:
                best = self._content_of_best(epoch)
            self._call_hooks("epoch_scored", epoch)
            scored.append(epoch)
        for epoch in self._unscored:
            epoch.row.setdefault("time", self.seconds())
        if scored or is_epoch_end or self._stopped:
            is_best = any(epoch.is_best and self._has_current_weights(epoch) for epoch in scored)
            self._save(is_epoch_end=is_epoch_end, is_best=is_best, earlier_best=best)
        for epoch in scored:
            self._call_hooks("epoch_saved", epoch)

    def _save_before_validation(self) -> None:
        """Saves steps of a minute or more: a validation may be killed or fail."""
        if any(epoch.is_validated for epoch in self._unscored):
            every_s = min(self.run.config.save_minutes * 60, SAVE_BEFORE_VALIDATION_S)
            is_due = self.ctx.is_main and self._is_save_due(every_s)
            if max_over_ranks(self.ctx, int(is_due)):
                self.save_last()

    def _read_scores(self, max_pending: int) -> Iterator[Epoch]:
        """Yields the epochs without scores, the oldest first, once they have them and their rows; at most the newest
        ``max_pending`` may wait longer. At a signal, the run stops, and leaves the rest to a resumed one."""
        left = self._num_pending(max_pending)
        while len(self._unscored) > left:
            epoch = self._unscored[0]
            if epoch.is_validated:
                is_newest = self._has_current_weights(epoch)
                with self._reading_data():
                    epoch.evaluation = self.run.scorer.read(
                        epoch.number,
                        is_closing=epoch.is_closing,
                        is_newest=is_newest,
                        should_stop=self.control.should_stop,
                    )
                if self.control.after_validation() is not Action.CONTINUE:
                    self._stopped = True
                    return
            self._record(epoch)
            self._unscored.pop(0)
            yield epoch

    def _num_pending(self, max_pending: int) -> int:
        """Returns how many epochs, at most ``max_pending``, are left without scores because these have not come."""
        if not max_pending:
            return 0
        num_ready = 0
        if self.ctx.is_main:
            is_ready = [not one.is_validated or self.run.scorer.is_ready(one.number) for one in self._unscored]
            num_ready = [*is_ready, False].index(False)
        return min(len(self._unscored) - broadcast_object(self.ctx, num_ready), max_pending)

    def _content_of_best(self, epoch: Epoch) -> dict[str, Any] | None:
        """Returns the content of best.pt with the weights of an epoch and its scores, on rank 0; None if they are those
        of the run itself."""
        if self._has_current_weights(epoch) or not self.ctx.is_main:
            return None
        content = read_checkpoint(weights_path(self.run.folder, epoch.number))
        results = {name: getattr(self.progress, name) for name in RESULT_FIELDS}
        return content | {"progress": content["progress"] | results, "metrics": epoch.metrics}

    def _record(self, epoch: Epoch) -> None:
        """Completes the row of an epoch with its scores, if it was validated, and keeps those that the run needs."""
        scores = None
        if epoch.evaluation is not None:  # on rank 0
            result = epoch.evaluation.result
            scores = (self._metrics_of(result), result.class_ap, result.threshold)
        scores = broadcast_object(self.ctx, scores)
        fitness = self.run.feed.fitness
        if scores is not None:
            epoch.metrics, epoch.class_ap, self.progress.confidence = scores
            score = epoch.metrics[fitness.column]
            epoch.is_best = self.progress.record_fitness(epoch.number, score, ap=epoch.metrics["metrics/AP"])
            columns = {f"metrics/{metric.name}": metric.column for metric in METRICS}
            columns.setdefault(fitness.column, fitness.name)
            shown = [f"{title} {number_text(epoch.metrics[name])}" for name, title in columns.items()]
            get_logger().info("epoch %d: %s", epoch.number, "  ".join(shown))
        row = epoch.row
        losses = {name: value for name, value in row.items() if name.startswith("train/")}
        # The order of the columns; an epoch that others have validated has the time at which it was sent to them.
        epoch.row = {"time": row.get("time", self.seconds()), **losses, **epoch.metrics, **row}
        if self.ctx.is_main:
            self.checkpointer.table.add(epoch.number, epoch.row)
        self._newest = replace(epoch, evaluation=None)  # its detections may take gigabytes

    def _metrics_of(self, result: EvalResult) -> dict[str, float]:
        """Returns the scores of a validation, by their names in results.csv."""
        metrics = {f"metrics/{name}": value for name, value in result.metrics.items()}
        if result.threshold is not None:
            metrics[CONFIDENCE_COLUMN] = result.threshold
        metrics[self.run.feed.fitness.column] = self.run.feed.fitness.score_of(result)
        return metrics | {name: value for name, value in result.extras.items() if name.startswith("val/")}

    def _ask_hooks(self, point: Point, *args: Any) -> Action:
        """Calls a method of all hooks, up to one that interrupts the run. Returns their actions, combined."""
        action = Action.CONTINUE
        for hook in self.hooks:
            answer = getattr(hook, point)(self, *args)
            if answer is not None and hook.on_rank_0:
                raise TypeError(f"{type(hook).__name__}.{point}: a hook on rank 0 alone must not return an action")
            action |= answer or Action.CONTINUE
            if Action.SKIP_REST in action:
                break
        return action

    def _call_hooks(self, point: Point, *args: Any) -> None:
        """Calls a method of all hooks, and follows the action that they return."""
        self._follow(self._ask_hooks(point, *args))

    def _follow(self, action: Action) -> None:
        """Saves or ends the run, as ``action`` requests."""
        if Action.SAVE in action:
            self.save_last()
        self._stopped |= Action.END in action

    def _is_save_due(self, every_s: float) -> bool:
        return 0 < every_s <= time.monotonic() - self._saved_at

    def save_last(self) -> None:
        """Saves the run in last.pt."""
        self._save()

    def _save(self, **options: Any) -> None:
        """Saves the run. ``options``: of `Checkpointer.save`."""
        self.checkpointer.save(self.step, self._header(), **options)
        self._saved_at = time.monotonic()
        self._saved_updates = self.progress.updates

    def _header(self) -> CheckpointHeader:
        """Returns the header of a checkpoint taken now. It has the scores of the newest epoch until the next step is
        taken."""
        return CheckpointHeader(
            progress=self.progress,
            run=SaveContext(
                world_size=self.ctx.world_size,
                device=self.ctx.device.type,
                seconds=self.seconds(),
                epoch_batches=len(self.loader),
                images=len(self.loader.samples),
                threads=torch.get_num_threads(),
            ),
            metrics=self._newest.metrics if self._has_current_weights(self._newest) else {},
            unscored=[
                UnscoredEpoch(one.number, one.row, one.is_closing, one.is_validated, not self._has_current_weights(one))
                for one in self._unscored
            ],
            ended_by_callback=self._ended_by_callback(),
        )

    def _finish(self) -> TrainingOutcome:
        """Calls the hooks that come last. A signal is deferred meanwhile: the run is complete."""
        if self.control.stopped_by_callback and not self._has_ended():
            position = self.progress.describe(len(self.loader))
            flag = self._resume_flags()
            get_logger().info("ended by a callback %s; to continue: %s --epochs N", position, flag)
        self._call_hooks("finish")
        failure = self.control.late_failure(self._continuation())
        return TrainingOutcome(self.run.folder, self.run.config, failure)

    def _has_ended(self) -> bool:
        """Returns True if no epoch is left to train or to score; ``--resume PATH`` then says that it is complete."""
        stops_early = self.progress.stops_early(self.run.config, self.epochs)
        return not self._unscored and (self.progress.epoch >= self.epochs or stops_early)

    def _ended_by_callback(self) -> bool:
        """Returns True if a callback has ended the run, in this process or before it, see `CheckpointHeader`."""
        started_from = self.run.started_from
        had_ended = not self.run.takes_steps and started_from is not None and started_from.header.ended_by_callback
        return had_ended or self.control.stopped_by_callback

    def _continuation(self) -> str:
        """Returns how to complete the run with another command."""
        if not self._has_ended() and not self._ended_by_callback():
            return f"continue with: {self._resume_flags()}"
        folder = self.run.folder
        location = f"{as_flag('project', str(folder.parent))} {as_flag('name', folder.name)}"
        return f"complete the run with: --resume auto {location}"

    @contextmanager
    def _reading_data(self) -> Iterator[None]:
        """Adds to an error about the data set, such as an image that was moved, how to continue the run."""
        try:
            yield
        except UserError as error:
            raise type(error)(f"{error}; {self._continuation()}", whole=True) from None

    def _resume_flags(self) -> str:
        """Returns the flags that continue the run: a checkpoint's callbacks run only if the command names them."""
        callbacks = self.run.config.callbacks
        flag = resume_flag(self.checkpointer.last)
        return f"{flag} {as_flag('callbacks', callbacks)}" if callbacks else flag
