"""The loop with a real step of a tiny model, a loader in memory and hooks that only watch."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from data.loading.prefetcher import Prefetcher
from engine.checkpoint.progress import CheckpointHeader, PendingEpoch, Progress
from engine.eval_ranks.messages import WeightsMessage
from engine.evaluation.metrics import Fitness
from engine.hooks.hook import Action, Epoch, Hook, Training
from engine.hooks.stopping import EarlyStopping
from engine.optim.schedule import step_plan
from engine.parallel.control import RunControl
from engine.parallel.watchdog import Watchdog
from engine.run.complete_record import read_reported_epochs
from engine.run.run import RunSettings, StartedFrom, TrainingRun
from engine.train.epoch_results import EpochResults
from engine.train.step import TrainStep
from engine.train.trainer import Trainer, Validator
from engine.train.validation import LocalValidator, RemoteValidator, RunValidation
from models.detector import build_detector
from tests.helpers.messages import refused
from tests.helpers.run_checkpoints import checkpoint_of
from tests.helpers.steps import make_train_step
from tests.helpers.tiny import TINY_MODEL, make_batch
from utils.config.settings import Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import Stopped, UserError
from utils.logger import configure_logging
from utils.process.exit_codes import INTERRUPTED, REQUEUE
from utils.process.stop_signals import StopSignals

BATCHES = 3
POINTS = [name for name in vars(Hook) if not name.startswith("_") and name != "decides_next_epoch"]


class Loader:
    """Three batches an epoch, keyed by their position."""

    renderer = None
    class_weights = None
    samples = range(2 * BATCHES)

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return BATCHES

    def start_at(self, epoch: int, batch: int) -> None:
        self.position = epoch * BATCHES + batch

    def __iter__(self):
        while True:
            yield make_batch(2, seed=self.position)
            self.position += 1

    def global_images(self, batch: int) -> int:
        return 2

    global_samples = global_images


class Saves:
    """The checkpointer: notes where the run was when it was saved."""

    last = Path("last.pt")

    def __init__(self) -> None:
        self.saved: list[tuple[int, int, CheckpointHeader]] = []
        self.epochs: list[tuple[int, bool]] = []
        self.scored: list[tuple[int, bool]] = []

    def save_last(self, step, header) -> None:
        self.saved.append((header.progress.epoch, header.progress.batch, header))

    def save_epoch(self, step, header, *, is_best) -> None:
        self.save_last(step, header)
        self.epochs.append((header.progress.epoch, is_best))

    def save_scored(self, pending, progress, *, is_best, metrics) -> None:
        self.scored.append((pending.progress.epoch, is_best))

    def wait(self) -> None: ...
    def flush(self) -> None: ...
    def check(self) -> None: ...
    def set_epochs(self, epochs: int) -> None: ...


class Watch(Hook):
    """Notes each call with the position, and answers as it is told: {point: (epoch, batch, action)}."""

    def __init__(self, **answers: tuple[int, int, Action]) -> None:
        self.calls = []
        self._answers = answers
        for point in POINTS:
            setattr(self, point, partial(self._note, point))

    def _note(self, point: str, trainer: Training | None = None, *args) -> Action:
        position = (trainer.progress.epoch, trainer.progress.batch) if trainer else ()
        self.calls.append((point, *position))
        *wanted, action = self._answers.get(point, (Action.CONTINUE,))
        return action if list(position) == wanted else Action.CONTINUE

    def of(self, *names: str) -> list[tuple]:
        return [call for call in self.calls if call[0] in names]


class Evaluates:
    """The evaluator. A signal ends its run ``stopped_run``, from 1."""

    def __init__(self, signals: StopSignals | None = None, stopped_run: int = 0) -> None:
        self.runs = 0
        self._signals = signals
        self._stopped_run = stopped_run

    def run(self, model, loader, *, should_stop: Callable[[], bool]) -> None:
        self.runs += 1
        if self.runs == self._stopped_run:
            self._signals.requeue = True
            assert should_stop()


class Results(EpochResults):
    """Scores by the number of the epoch, of which ``best_epoch`` is the best."""

    def __init__(self, best_epoch: int = 0) -> None:
        super().__init__(Fitness.parse("AP", ["a"]))
        self._best_epoch = best_epoch

    def fill_in(self, ctx, epoch, progress, *, seconds) -> None:
        super().fill_in(ctx, epoch, progress, seconds=seconds)
        epoch.is_best = epoch.number == self._best_epoch
        epoch.metrics = {"AP": epoch.number / 10}


BuildValidator = Callable[[TrainStep, RunControl], Validator]


def local(evaluator: Evaluates | None = None, pending: PendingEpoch | None = None) -> BuildValidator:
    validation = RunValidation(loader=None, evaluator=evaluator or Evaluates())
    return lambda step, control: LocalValidator(validation, step, control, pending=pending)


def remote(evaluator: Evaluates | None = None) -> BuildValidator:
    def build_validator(step: TrainStep, control: RunControl) -> RemoteValidator:
        return RemoteValidator(step.ctx, local(evaluator)(step, control), Service(), control)

    return build_validator


class Service:
    """The evaluating processes: they are free for the first epoch, and have no scores in time."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def can_take_weights(self) -> bool:
        return not self.sent

    def send(self, epoch: int, weights: WeightsMessage) -> None:
        self.sent.append(epoch)

    def has_scores(self) -> bool:
        return False

    def collect(self, should_stop: Callable[[], bool]) -> None:
        assert not should_stop()


def build(
    *hooks: Hook,
    progress: Progress | None = None,
    hyp: Hyperparameters | None = None,
    signals: StopSignals | None = None,
    epochs: int = 2,
    validator: BuildValidator | None = None,
    best_epoch: int = 0,
    **settings,
) -> Trainer:
    ctx = DistributedContext.single()
    step = make_train_step(ctx, build_detector(TINY_MODEL, 2, seed=1))
    settings = RunSettings(TrainConfig(epochs=epochs, **settings), hyp or Hyperparameters())
    run = TrainingRun(folder=Path(), run_id="", settings=settings)
    return trainer_of(
        run, step, progress or Progress(), *hooks, signals=signals, validator=validator, best_epoch=best_epoch
    )


def trainer_of(
    run: TrainingRun,
    step: TrainStep,
    progress: Progress,
    *hooks: Hook,
    signals: StopSignals | None = None,
    validator: BuildValidator | None = None,
    best_epoch: int = 0,
) -> Trainer:
    loader = Loader()
    control = RunControl(step.ctx, Watchdog(signals or StopSignals()))
    return Trainer(
        run=run,
        step=step,
        loader=loader,
        steps=step_plan(run.config, len(loader)),
        progress=progress,
        control=control,
        checkpointer=Saves(),
        validator=(validator or local())(step, control),
        results=Results(best_epoch),
        hooks=hooks,
    )


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in trainer.step.model.parameters()])


def test_hooks_see_every_step_and_epoch_in_order():
    watch = Watch()
    build(watch).fit()
    epoch = [
        ("before_epoch", 0, 0),
        *(("after_step", 0, batch) for batch in (1, 2, 3)),
        ("after_last_step", 0, 3), ("before_validation", 0, 3),
        ("record", 1, 0), ("after_save",), ("report", 1, 0), ("after_epoch", 1, 0),
    ]  # fmt: skip
    without_reads = [call for call in watch.calls if call[0] != "after_read"]
    assert without_reads[: len(epoch) + 1] == [("start", 0, 0), *epoch]
    assert without_reads[-3:] == [("after_steps", 2, 0), ("after_training", 2, 0), ("finish", 2, 0)]
    assert len(watch.of("after_read")) == len(watch.of("after_step")) == 2 * BATCHES
    assert watch.of("after_read")[:3] == [
        ("after_read", 0, 2),
        ("after_read", 0, 3),
        ("after_read", 0, 3),
    ]  # a step late, all at the end


@pytest.mark.parametrize(
    ("signal_name", "code"), [("requeue", 75), ("interrupt", 130), ("", None)], ids=["SIGTERM", "SIGINT", "none"]
)
def test_what_fails_because_of_a_signal_is_a_stop(tmp_path, capsys, monkeypatch, signal_name, code):
    """A signal to all processes of a terminal or a job ends the compiler of ``--compile``, too, and torch then raises.
    Without a signal, the same error is a bug."""
    configure_logging(True)
    watch = Watch()
    signals = StopSignals()
    trainer = build(watch, signals=signals)
    trainer.checkpointer.last = tmp_path / "last.pt"
    take = TrainStep.__call__

    def step(self, batches, counts, updates, **options) -> None:
        if updates == 3:
            if signal_name:
                setattr(signals, signal_name, True)
            raise RuntimeError("C++ compile error\n\nCommand:\ng++ ...")
        take(self, batches, counts, updates, **options)

    monkeypatch.setattr(TrainStep, "__call__", step)
    with pytest.raises(Stopped if signal_name else RuntimeError) as caught:
        trainer.fit()
    assert watch.of("after_training", "finish") == []
    assert trainer.checkpointer.saved == []  # half a step is no state
    out = capsys.readouterr().out
    if signal_name:
        assert caught.value.code == code
        assert out == "stopped by a signal within a step, which is lost (RuntimeError); there is no checkpoint yet\n"
        assert watch.of("after_steps") == [("after_steps", 0, 2)]
    else:
        assert out == ""


def test_each_epoch_is_saved_with_its_scores():
    trainer = build(best_epoch=2, epochs=3)
    trainer.fit()
    saved = trainer.checkpointer.saved
    assert [(epoch, batch) for epoch, batch, _ in saved] == [(1, 0), (2, 0), (3, 0)]
    assert trainer.checkpointer.epochs == [(1, False), (2, True), (3, False)]
    assert [header.metrics["AP"] for *_, header in saved] == [0.1, 0.2, 0.3]
    assert (saved[0][2].run.epoch_batches, saved[0][2].run.images) == (BATCHES, 2 * BATCHES)


def test_a_later_save_has_the_scores_of_its_epoch_until_a_step_is_taken():
    """A callback may stop the run at the end of an epoch, for example."""
    trainer = build(Watch(after_epoch=(1, 0, Action.SAVE), after_step=(1, 1, Action.SAVE)), best_epoch=2)
    trainer.fit()
    saves = trainer.checkpointer
    metrics = [(epoch, batch, header.metrics) for epoch, batch, header in saves.saved]
    assert metrics == [(1, 0, {"AP": 0.1}), (1, 0, {"AP": 0.1}), (1, 1, {}), (2, 0, {"AP": 0.2})]
    assert saves.epochs == [(1, False), (2, True)]


def test_a_save_is_not_lost_when_another_hook_ends_the_run():
    trainer = build(Watch(after_epoch=(1, 0, Action.SAVE)), Watch(after_epoch=(1, 0, Action.END)))
    trainer.fit()
    assert [(epoch, batch) for epoch, batch, _ in trainer.checkpointer.saved] == [(1, 0), (1, 0)]


def test_an_epoch_whose_validation_a_signal_ends_is_saved_with_its_steps():
    watch = Watch()
    signals = StopSignals()
    validator = local(Evaluates(signals, stopped_run=2))
    trainer = build(watch, validator=validator, signals=signals, epochs=3)
    with pytest.raises(Stopped):
        trainer.fit()
    assert [(epoch, batch) for epoch, batch, _ in trainer.checkpointer.saved] == [(1, 0), (1, 3)]
    assert watch.of("record", "after_epoch") == [("record", 1, 0), ("after_epoch", 1, 0)]


def test_an_epoch_that_others_validate_is_completed_by_the_end_of_the_next_one():
    watch = Watch()
    validator = remote()
    trainer = build(watch, validator=validator, best_epoch=1)
    trainer.fit()
    end = ["after_last_step", "before_validation", "record", "report", "after_epoch"]
    assert [(name, epoch) for name, epoch, _ in watch.of(*end)] == [
        ("after_last_step", 0), ("after_epoch", 1),
        ("after_last_step", 1),
        ("before_validation", 1), ("record", 1), ("report", 1),
        ("before_validation", 1), ("record", 2), ("report", 2), ("after_epoch", 2),
    ]  # fmt: skip
    saves = trainer.checkpointer
    assert [(epoch, header.pending is not None) for epoch, _, header in saves.saved] == [(1, True), (2, False)]
    assert saves.scored == [(1, True)]


def test_a_pending_epoch_stays_pending_if_a_signal_ends_its_validation():
    signals = StopSignals()
    validator = remote(Evaluates(signals, stopped_run=1))
    trainer = build(validator=validator, signals=signals, epochs=3)
    with pytest.raises(Stopped):
        trainer.fit()
    epoch, batch, header = trainer.checkpointer.saved[-1]
    assert (epoch, batch, header.pending.progress.epoch) == (1, 3, 1)
    assert trainer.checkpointer.scored == []


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_pending_epoch_of_an_earlier_start_is_completed_and_saved_at_once(epochs):
    """This needs neither ``--eval-ranks`` nor another epoch afterwards."""
    pending = PendingEpoch(row={"time": 1.5}, is_closing=False, progress=Progress(epoch=1), ema={})
    watch = Watch()
    validator = local(pending=pending)
    trainer = build(watch, validator=validator, progress=Progress(epoch=1), epochs=epochs, best_epoch=1)
    pending.ema.update(trainer.step.ema.module.state_dict())
    trainer.fit()
    calls = [("record", 1, 0), ("before_epoch", 1, 0), ("record", 2, 0)]
    assert watch.of("record", "before_epoch") == calls[: 2 * epochs - 1]
    saved = [(epoch, batch, header.pending) for epoch, batch, header in trainer.checkpointer.saved]
    assert saved == [(1, 0, None), (2, 0, None)][:epochs]
    assert trainer.checkpointer.scored == [(1, True)]


@pytest.mark.parametrize(("fitness", "last_epoch"), [(0.9, 9), (0.1, 7)])
def test_patience_waits_for_the_scores_of_a_pending_epoch(fitness, last_epoch):
    """A resumed run, with less patience than before."""

    class Scores(Results):
        def fill_in(self, ctx, epoch, progress, *, seconds) -> None:
            super().fill_in(ctx, epoch, progress, seconds=seconds)
            epoch.is_best = progress.record_fitness(fitness)

    progress = Progress(epoch=7, best_epoch=4, best_fitness=0.5)
    pending = PendingEpoch(row={}, is_closing=False, progress=replace(progress), ema={})
    stopping = EarlyStopping(2, "AP", val_every=1)
    trainer = build(stopping, progress=progress, validator=local(pending=pending), epochs=20, patience=2)
    pending.ema.update(trainer.step.ema.module.state_dict())
    trainer.results = Scores()
    trainer.fit()
    assert trainer.progress.epoch == last_epoch


@pytest.mark.parametrize(("close_mosaic", "is_closing"), [(1, True), (0, False)])
def test_a_report_is_repeated_with_the_loss_of_its_epoch(close_mosaic, is_closing):
    watch = Watch()
    settings = RunSettings(TrainConfig(epochs=2), Hyperparameters(close_mosaic=close_mosaic))
    origin = StartedFrom.of(checkpoint_of(progress=Progress(epoch=2)))
    run = TrainingRun(folder=Path(), run_id="", settings=settings, started_from=origin, only_reports=True)
    step = make_train_step(DistributedContext.single(), build_detector(TINY_MODEL, 2, seed=1))
    closing: list[bool] = []
    step.criterion.set_closing = closing.append
    trainer_of(run, step, Progress(epoch=2), watch).fit()
    assert closing == [is_closing]
    reported = watch.of("before_epoch", "record", "before_validation", "report")
    assert reported == [("before_validation", 2, 0), ("report", 2, 0)]


def test_the_pending_epoch_of_a_run_that_a_callback_ends_is_completed_and_saved():
    validator = remote()
    watch = Watch(after_epoch=(1, 0, Action.END))
    trainer = build(watch, validator=validator, epochs=3, best_epoch=1)
    trainer.fit()
    assert watch.of("record") == [("record", 1, 0)]
    saved = [(epoch, batch, header.pending is None) for epoch, batch, header in trainer.checkpointer.saved]
    assert saved == [(1, 0, False), (1, 0, True)]
    assert trainer.checkpointer.scored == [(1, True)]


@pytest.mark.parametrize(
    ("answers", "steps", "saved"),
    [
        ({"start": (0, 0, Action.SAVE)}, 6, [(0, 0), (1, 0), (2, 0)]),
        ({"after_step": (0, 2, Action.SAVE)}, 6, [(0, 2), (1, 0), (2, 0)]),
        ({"start": (0, 0, Action.END)}, 0, []),
        ({"after_epoch": (1, 0, Action.END)}, 3, [(1, 0)]),
        ({"after_last_step": (0, 3, Action.STOP)}, 3, [(0, 3)]),
    ],
)
def test_the_trainer_follows_what_hooks_return(answers, steps, saved):
    watch = Watch(**answers)
    trainer = build(watch)
    trainer.fit()
    assert trainer.progress.updates == steps
    assert [(epoch, batch) for epoch, batch, _ in trainer.checkpointer.saved] == saved
    assert watch.of("after_training", "finish") == [
        (name, trainer.progress.epoch, trainer.progress.batch) for name in ("after_training", "finish")
    ]


def test_a_request_stops_the_run_two_steps_later_and_the_rest_gives_the_same_weights():
    whole = build()
    whole.fit()

    class Requests(Hook):
        def after_step(self, trainer: Training) -> Action:
            if trainer.progress.updates == 1:
                trainer.control.request_stop()

    trainer = build(Requests())
    trainer.fit()
    assert (trainer.progress.epoch, trainer.progress.batch) == (0, 3)
    resumed = trainer_of(trainer.run, trainer.step, trainer.progress)
    resumed.fit()
    assert torch.equal(weights(resumed), weights(whole))


class Fails(Hook):
    def __init__(self, updates: int) -> None:
        self._updates = updates

    def after_step(self, trainer: Training) -> None:
        if trainer.progress.updates == self._updates:
            trainer.control.fail("on_step failed")


@pytest.mark.parametrize(
    ("updates", "continuation"),
    [
        (1, "continue with: --resume last.pt"),
        (2 * BATCHES, "write the report with: --resume auto '--project=a b' --name=exp"),
    ],
)
def test_a_failure_names_a_command_that_does_the_rest_of_the_run(updates, continuation):
    """``--resume last.pt`` refuses a run that has no epoch left, even if its report is missing."""
    trainer = build(Fails(updates))
    trainer.run = replace(trainer.run, folder=Path("a b/exp"))
    with refused(f"on_step failed; when it is fixed, {continuation}"):
        trainer.fit()


def test_a_failure_ends_the_run_before_its_final_work():
    """Ctrl-C during that work would hide the error."""
    watch = Watch()
    trainer = build(Fails(1), watch)
    with refused("on_step failed; when it is fixed, continue with: --resume last.pt"):
        trainer.fit()
    assert watch.of("after_steps", "after_training", "finish") == [("after_steps", 0, 3)]
    assert not trainer.control.is_finalizing


@pytest.mark.parametrize("has_pending", [False, True], ids=["report alone", "pending epoch"])
def test_a_callback_that_fails_in_on_start_leaves_all_work_to_a_resumed_run(has_pending):
    class FailsAtStart(Hook):
        def start(self, trainer: Training) -> None:
            trainer.control.fail("on_start failed")

    pending = PendingEpoch(row={}, is_closing=False, progress=Progress(epoch=2), ema={}) if has_pending else None
    evaluator = Evaluates()
    watch = Watch()
    trainer = build(FailsAtStart(), watch, progress=Progress(epoch=2), validator=local(evaluator, pending))
    trainer.run = replace(trainer.run, only_reports=not has_pending)
    way = "continue with: --resume last.pt" if has_pending else "write the report with: --resume auto --project=..."
    with refused(f"on_start failed; when it is fixed, {way}"):
        trainer.fit()
    assert evaluator.runs == 0
    assert {name for name, *_ in watch.calls} == ({"start", "after_save"} if has_pending else {"start"})
    assert [header.pending for _, _, header in trainer.checkpointer.saved] == [pending] * has_pending


def test_a_callback_that_fails_last_is_an_error_that_says_how_to_repeat_it(tmp_path, caplog):
    class FailsAtEnd(Hook):
        def finish(self, trainer: Training) -> None:
            trainer.control.fail("on_end failed")

    trainer = build(FailsAtEnd(), epochs=1)
    trainer.run = replace(trainer.run, folder=tmp_path, run_id="run")
    finished = trainer.fit()
    way = f"write the report with: --resume auto --project={tmp_path.parent} --name={tmp_path.name}"
    assert str(finished.failure) == f"on_end failed; when it is fixed, {way}"
    assert not any("on_end failed" in message for message in caplog.messages)  # the command ends with it
    assert read_reported_epochs(tmp_path, "run") is None


class StopsAfter(Hook):
    """Requests a stop like a callback: after an epoch, or after a step of the next one."""

    def __init__(self, epoch: int, batch: int = 0) -> None:
        self._position = (epoch, batch)

    def after_step(self, trainer: Training) -> None:
        self._request(trainer)

    def after_epoch(self, trainer: Training, epoch: Epoch) -> None:
        self._request(trainer)

    def _request(self, trainer: Training) -> None:
        if (trainer.progress.epoch, trainer.progress.batch) == self._position:
            trainer.control.request_stop()


@pytest.mark.parametrize(
    ("hook", "is_stored"), [(StopsAfter(1), True), (StopsAfter(1, 1), True), (Fails(1), False), (Hook(), False)]
)
def test_a_checkpoint_tells_that_a_callback_has_ended_the_run(hook, is_stored):
    trainer = build(hook, epochs=3)
    try:
        trainer.fit()
    except UserError:
        assert isinstance(hook, Fails)
    assert trainer.checkpointer.saved[-1][2].ended_by_callback == is_stored


@pytest.mark.parametrize(
    ("progress", "metrics"),
    [
        (Progress(epoch=3), {"AP": 0.5}),
        (Progress(epoch=3, batch=1), {}),  # stopped in epoch 4 of more, and resumed with 3 epochs
        (Progress(epoch=2), {"AP": 0.5}),
        (Progress(epoch=2), {}),  # --val-every has left it out
        (Progress(), {}),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_only_reports_takes_no_step(tmp_path, progress, metrics, fails):
    """It validates the last epoch again if the weights are those that were scored."""

    class FailsAtStart(Hook):
        def start(self, trainer: Training) -> None:
            trainer.control.fail("on_start failed")

    evaluator = Evaluates()
    watch = Watch()
    checkpoint = checkpoint_of(progress=progress, metrics=metrics, ended_by_callback=True)
    hooks = [FailsAtStart()] if fails else []
    plain = build(epochs=3)
    run = replace(plain.run, folder=tmp_path, run_id="run", only_reports=True, started_from=StartedFrom.of(checkpoint))
    trainer = trainer_of(run, plain.step, progress, watch, *hooks, validator=local(evaluator))
    if fails:
        with refused("on_start failed; when it is fixed, write the report with: --resume auto --project=..."):
            trainer.fit()
        assert trainer.checkpointer.saved == []  # the next start also writes the report
        return
    trainer.fit()
    assert trainer.checkpointer.saved == []
    assert evaluator.runs == len(metrics)
    assert watch.of("before_epoch", "after_step") == []
    assert watch.of("report") == [("report", progress.epoch, progress.batch)]
    assert len(watch.of("after_training", "finish")) == 2
    assert read_reported_epochs(tmp_path, "run") == progress.epoch


def test_an_epoch_that_begins_again_is_not_reported_with_the_weights_of_its_steps(tmp_path):
    """The number of images has changed since a callback ended the run within epoch 3."""
    evaluator = Evaluates()
    origin = StartedFrom.of(checkpoint_of(progress=Progress(epoch=2, batch=1), metrics={}, ended_by_callback=True))
    plain = build(epochs=3)
    run = replace(plain.run, folder=tmp_path, run_id="run", only_reports=True, started_from=origin)
    trainer_of(run, plain.step, Progress(epoch=2), validator=local(evaluator)).fit()
    assert evaluator.runs == 0


def test_what_a_hook_saves_at_the_start_is_written_before_the_first_step():
    waits: list[int] = []
    trainer = build(Watch(start=(0, 0, Action.SAVE)), epochs=1)
    trainer.checkpointer.flush = lambda: waits.append(trainer.progress.updates)
    trainer.fit()
    assert waits[0] == 0


def test_a_run_that_only_reports_scores_its_pending_epoch_once():
    pending = PendingEpoch(row={"time": 1.5}, is_closing=False, progress=Progress(epoch=1), ema={})
    evaluator = Evaluates()
    watch = Watch()
    plain = build(epochs=3)
    pending.ema.update(plain.step.ema.module.state_dict())
    origin = StartedFrom.of(checkpoint_of(progress=Progress(epoch=1), pending=pending, ended_by_callback=True))
    run = replace(plain.run, only_reports=True, started_from=origin)
    trainer = trainer_of(run, plain.step, Progress(epoch=1), watch, validator=local(evaluator, pending))
    trainer.fit()
    assert evaluator.runs == 1
    calls = watch.of("before_validation", "record", "report", "after_step")
    assert calls == [("before_validation", 1, 0), ("record", 1, 0), ("report", 1, 0)]
    (saved,) = [header for _, _, header in trainer.checkpointer.saved]
    assert (saved.pending, saved.ended_by_callback) == (None, True)


def test_a_request_to_stop_after_the_last_epoch_is_not_what_ends_the_run(caplog):
    caplog.set_level("INFO", logger="lockstep")

    class Requests(Hook):
        def after_epoch(self, trainer: Training, epoch: Epoch) -> None:
            if epoch.number == trainer.epochs:
                trainer.control.request_stop()

    build(Requests(), epochs=1).fit()
    assert not any("ended by a callback" in message for message in caplog.messages)


def test_a_signal_saves_and_ends_without_the_last_calls():
    signals = StopSignals()

    class Signals(Hook):
        def after_step(self, trainer: Training) -> Action:
            signals.requeue |= trainer.progress.updates == 1

    watch = Watch()
    trainer = build(Signals(), watch, signals=signals, epochs=9)
    with pytest.raises(Stopped) as stopped:
        trainer.fit()
    assert stopped.value.code == REQUEUE
    assert [(epoch, batch) for epoch, batch, _ in trainer.checkpointer.saved] == [(0, 3)]
    assert not watch.of("after_training", "finish")


@pytest.mark.parametrize("point", ["after_training", "finish"])
def test_the_report_of_a_finished_run_is_written_in_spite_of_a_requeueing_signal(point):
    """Plots are drawn in ``after_training``."""
    finished = []

    class Report(Hook):
        def finish(self, trainer: Training) -> None:
            finished.append(trainer.progress.epoch)

    def send_signal(trainer: Training) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    sender = Hook()
    setattr(sender, point, send_signal)
    with StopSignals() as signals:
        build(sender, Report(), signals=signals, epochs=2).fit()
    assert finished == [2]
    assert not signals.received


def test_a_bug_in_the_report_is_not_taken_for_a_signal_that_was_not_followed():
    signals = StopSignals()

    class Reports(Hook):
        def after_epoch(self, trainer: Training, epoch: Epoch) -> None:
            signals.requeue = True

        def after_training(self, trainer: Training) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build(Reports(), signals=signals, epochs=1).fit()


@pytest.mark.parametrize("point", ["after_epoch", "after_training", "finish"])
def test_ctrl_c_after_the_last_step_ends_the_run_without_its_report(point, caplog):
    """Before the report, the ranks agree on it; the report itself is interrupted. Either way, one line says how to
    write it."""
    caplog.set_level("INFO", logger="lockstep")

    def send_signal(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    sender = Hook()
    setattr(sender, point, send_signal)
    watch = Watch()
    with StopSignals() as signals:
        trainer = build(sender, watch, signals=signals, epochs=1)
        with pytest.raises(Stopped) as stopped:
            trainer.fit()
    assert stopped.value.code == INTERRUPTED
    assert watch.of("finish") == []
    assert trainer.checkpointer.saved[-1][:2] == (1, 0)
    (line,) = [line for line in caplog.messages if line.startswith("stopped by a signal")]
    assert line.endswith("; write the report with: --resume auto --project=. --name=")


def test_the_last_epochs_refine():
    seen = []
    trainer = build(epochs=4, hyp=Hyperparameters(close_mosaic=1))
    trainer.step.criterion.set_closing = seen.append
    trainer.fit()
    assert seen == [False, False, False, True]


def test_batches_become_steps():
    trainer = build(batch_size=2, nominal_batch=4, epochs=1)
    trainer.fit()
    assert (trainer.progress.updates, trainer.progress.step) == (2, 3)  # an update of two batches and one of one


class DecidesNextEpoch(Hook):
    decides_next_epoch = True


@pytest.mark.parametrize(
    ("hooks", "settings", "expected"),
    [
        ((), {}, [1, 1, 1, 1, 1, 0]),
        ((), {"batch_size": 2, "nominal_batch": 4}, [1, 2, 1, 0]),  # steps of two batches and of one
        ((DecidesNextEpoch(),), {}, [1, 1, 0, 1, 1, 0]),
        ((DecidesNextEpoch(),), {"batch_size": 2, "nominal_batch": 4}, [1, 0, 1, 0]),
    ],
)
def test_the_batches_of_the_next_step_are_prefetched_unless_a_hook_decides_them(monkeypatch, hooks, settings, expected):
    counts = []
    prefetch = Prefetcher.prefetch

    def noted(prefetcher: Prefetcher, count: int) -> None:
        counts.append(count)
        prefetch(prefetcher, count)

    monkeypatch.setattr(Prefetcher, "prefetch", noted)
    build(*hooks, **settings).fit()
    assert counts == expected
