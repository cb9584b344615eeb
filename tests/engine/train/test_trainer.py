"""The loop with a real step of a tiny model: the order of hooks, saves and validations, and what ends a run where."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from data.loading.prefetcher import Prefetcher
from engine.train.checkpoint import Progress, UnscoredEpoch
from engine.train.control import Action
from engine.train.hooks import EarlyStopping
from engine.train.trainer import Epoch, Hook, Trainer
from tests.engine.train.watched_trainer import Scores, Watch, build, weights
from tests.helpers.messages import refused
from utils.config.settings import Hyperparameters
from utils.errors import INTERRUPTED, REQUEUE, Stopped, UserError
from utils.process.signals import StopSignals


def positions(trainer: Trainer) -> list[tuple[int, int]]:
    return [(epoch, batch) for epoch, batch, _ in trainer.checkpointer.saved]


def test_hooks_see_every_step_and_epoch_in_order(tmp_path):
    watch = Watch()
    trainer = build(watch, folder=tmp_path)
    trainer.fit()
    steps = [[("after_step", epoch, batch) for batch in (1, 2, 3)] for epoch in (0, 1)]
    ends = [[(point, n, 0, n) for point in ("epoch_trained", "epoch_scored", "epoch_saved")] for n in (1, 2)]
    assert watch.calls == [("start", 0, 0), *steps[0], *ends[0], *steps[1], *ends[1], ("finish", 2, 0)]
    assert positions(trainer) == [(0, 0), (1, 0), (2, 0)]
    assert trainer.checkpointer.best == [1, 2]
    assert [row["metrics/AP"] for row in trainer.checkpointer.table.as_rows()] == [0.1, 0.2]


@pytest.mark.parametrize(("late", "waiting"), [(2, 2), (9, 4)])
def test_scores_are_recorded_when_they_come_and_at_most_four_epochs_later(tmp_path, late, waiting):
    """``--eval-ranks``. The last epoch waits for all, so the rows and the best epoch are those of a run that validates
    itself."""
    watch = Watch()
    trainer = build(watch, folder=tmp_path, epochs=8, scores=Scores({3: 0.95}, late=late))
    trainer.fit()
    assert [call[-1] for call in watch.of("epoch_saved")] == [1, 2, 3, 4, 5, 6, 7, 8]
    lags = [epoch - number for _, epoch, _, number in watch.of("epoch_scored")]
    assert lags == [min(waiting, 8 - number) for number in range(1, 9)]
    unscored = [[one.number for one in header.unscored] for *_, header in trainer.checkpointer.saved]
    assert max(map(len, unscored)) == waiting
    assert unscored[-1] == []
    assert trainer.checkpointer.best == [1, 2, 3]
    assert [row["metrics/AP"] for row in trainer.checkpointer.table.as_rows()][:4] == [0.1, 0.2, 0.95, 0.4]


def test_checkpoints_have_the_scores_of_their_weights_only():
    trainer = build(
        Watch(epoch_saved=(1, 0, Action.SAVE), after_step=(1, 1, Action.SAVE)), epochs=3, scores=Scores({3: 0})
    )
    trainer.fit()
    scores = [(epoch, batch, header.metrics.get("metrics/AP")) for epoch, batch, header in trainer.checkpointer.saved]
    assert scores == [(0, 0, None), (1, 0, 0.1), (1, 0, 0.1), (1, 1, None), (2, 0, 0.2), (3, 0, 0)]
    assert trainer.checkpointer.best == [1, 2]


@pytest.mark.parametrize("late", [0, 1])
def test_of_epochs_with_equal_fitness_the_one_with_the_highest_ap_is_best(tmp_path, late):
    """ultralytics#21123: AP50 was 1.0 in epochs 3 to 14, and best.pt had AP 0.883 while epoch 9 had 1.000."""
    scores = Scores({1: 0.5, 2: 0.883, 3: 1.0, 4: 0.9, 5: 1.0}, ap50=1.0, late=late)
    trainer = build(folder=tmp_path, epochs=5, scores=scores, fitness="AP50")
    trainer.fit()
    assert trainer.checkpointer.best == [1, 2, 3]
    progress = trainer.checkpointer.saved[-1][2].progress
    assert (progress.best_epoch, progress.best_fitness) == (3, 1.0)


@pytest.mark.parametrize(
    ("answers", "steps", "saved"),
    [
        ({"start": (0, 0, Action.SAVE)}, 6, [(0, 0), (0, 0), (1, 0), (2, 0)]),
        ({"after_step": (0, 2, Action.SAVE)}, 6, [(0, 0), (0, 2), (1, 0), (2, 0)]),
        ({"start": (0, 0, Action.END)}, 0, [(0, 0)]),
        ({"epoch_saved": (1, 0, Action.END)}, 3, [(0, 0), (1, 0)]),
    ],
)
def test_the_trainer_follows_what_hooks_return(answers, steps, saved):
    watch = Watch(**answers)
    trainer = build(watch)
    trainer.fit()
    assert trainer.progress.updates == steps
    assert positions(trainer) == saved
    assert len(watch.of("finish")) == 1


def test_a_hook_that_only_rank_0_has_must_not_return_an_action():
    watch = Watch(after_step=(0, 1, Action.SAVE))
    watch.on_rank_0 = True
    with pytest.raises(TypeError):
        build(watch).fit()


class Calls(Hook):
    """Calls a function of the trainer at a position."""

    def __init__(self, call: Callable[[Trainer], Any], epoch: int, batch: int = 0) -> None:
        self._call = call
        self._position = (epoch, batch)

    def after_step(self, trainer: Trainer) -> None:
        if (trainer.progress.epoch, trainer.progress.batch) == self._position:
            self._call(trainer)

    def epoch_saved(self, trainer: Trainer, epoch: Epoch) -> None:
        self.after_step(trainer)


@pytest.mark.parametrize("batch", [0, 1])
def test_a_request_ends_the_run_at_most_two_steps_later_and_the_rest_gives_the_same_weights(batch):
    whole = build(epochs=3)
    whole.fit()
    trainer = build(Calls(lambda trainer: trainer.control.request_stop(), 1, batch), epochs=3)
    trainer.fit()
    assert positions(trainer)[-1] == (1, 3 if batch else 0)
    assert trainer.checkpointer.saved[-1][2].ended_by_callback
    resumed = build(progress=trainer.progress, step=trainer.step, epochs=3)
    resumed.fit()
    assert torch.equal(weights(resumed), weights(whole))


@pytest.mark.parametrize(("code", "batch"), [(REQUEUE, 1), (INTERRUPTED, 1), (REQUEUE, 0)])
def test_a_signal_saves_and_ends_without_the_last_calls(code, batch):
    signals = StopSignals()
    watch = Watch()
    trainer = build(Calls(lambda _: setattr(signals, "code", code), 1, batch), watch, signals=signals, epochs=9)
    with pytest.raises(Stopped) as stopped:
        trainer.fit()
    assert stopped.value.code == code
    assert positions(trainer)[-1] == (1, 3 if batch else 0)
    assert not watch.of("finish")


@pytest.mark.parametrize("late", [0, 1])
def test_an_epoch_whose_validation_a_signal_ends_is_validated_first_when_the_run_resumes(tmp_path, late):
    signals = StopSignals()
    scores = Scores(during=lambda: setattr(signals, "code", REQUEUE), late=late)
    trainer = build(folder=tmp_path, signals=signals, scores=scores, epochs=3)
    with pytest.raises(Stopped):
        trainer.fit()
    epoch, batch, header = trainer.checkpointer.saved[-1]
    assert (epoch, batch) == (1 + late, 0)
    assert [one.number for one in header.unscored] == [1, 2][: 1 + late]
    watch = Watch()
    resumed = build(
        watch, folder=tmp_path, progress=header.progress, unscored=header.unscored, step=trainer.step, epochs=3
    )
    resumed.fit()
    assert [call[-1] for call in watch.of("epoch_scored")] == [1, 2, 3]
    assert watch.calls[1][0] == "epoch_scored"
    whole = build(epochs=3)
    whole.fit()
    assert torch.equal(weights(resumed), weights(whole))


def unscored_epoch(number: int, *, has_own_file: bool = False) -> UnscoredEpoch:
    return UnscoredEpoch(number, {"train/box": 1.0}, is_closing=True, is_validated=True, has_own_file=has_own_file)


def test_a_run_that_has_ended_scores_what_it_had_still_to_score(tmp_path):
    """A signal ends the wait for epoch 2. ``--val-every`` leaves out 1 and 3, whose weights are in no file."""
    signals = StopSignals()
    scores = Scores(during=lambda: setattr(signals, "code", REQUEUE), late=4)
    trainer = build(folder=tmp_path, signals=signals, scores=scores, epochs=4, val_every=2)
    with pytest.raises(Stopped):
        trainer.fit()
    header = trainer.checkpointer.saved[-1][2]
    rest = Scores()
    watch = Watch()
    again = {"unscored": header.unscored, "step": trainer.step, "takes_steps": False}
    build(watch, folder=tmp_path, progress=header.progress, scores=rest, epochs=4, val_every=2, **again).fit()
    assert rest.reads == [(2, False), (4, True)]
    assert [call[-1] for call in watch.of("epoch_scored")] == [2, 3, 4]


def test_an_epoch_that_begins_again_does_not_score_its_weights_as_those_of_the_one_before(tmp_path):
    save = Calls(lambda trainer: trainer.control.request_save(), 1, 1)
    trainer = build(save, folder=tmp_path, scores=Scores(late=4), epochs=2)
    trainer.fit()
    within = [header.unscored for _, batch, header in trainer.checkpointer.saved if batch]
    assert [[one.has_own_file for one in unscored] for unscored in within] == [[True]]
    scores = Scores()
    progress = Progress(epoch=1, updates=3)  # another batch size, of which no multiple had been trained on
    build(folder=tmp_path, progress=progress, unscored=within[0], scores=scores, step=trainer.step, epochs=1).fit()
    assert scores.reads == [(1, False)]


def test_an_epoch_whose_validation_was_killed_gets_its_own_file():
    trainer = build(progress=Progress(epoch=1, updates=3), unscored=[unscored_epoch(1)], epochs=2)
    trainer.fit()
    assert trainer.checkpointer.ends == [1, 2]


def test_a_run_that_has_ended_validates_its_last_epoch_and_takes_no_step():
    watch = Watch()
    unscored = [unscored_epoch(2)]
    build(watch, progress=Progress(epoch=2, updates=6), unscored=unscored, takes_steps=False).fit()
    assert watch.calls == [("start", 2, 0), ("epoch_scored", 2, 0, 2), ("epoch_saved", 2, 0, 2), ("finish", 2, 0)]


@pytest.mark.parametrize("updates", [1, 6])
def test_a_failing_callback_ends_the_run_before_its_final_work_and_says_how_to_go_on(updates):
    watch = Watch()
    failing = Calls(lambda trainer: trainer.control.fail("on_step failed"), (updates - 1) // 3, (updates - 1) % 3 + 1)
    way = "continue with: --resume last.pt" if updates < 6 else "complete the run with: --resume auto ..."
    with refused(f"on_step failed; when it is fixed, {way}"):
        build(failing, watch).fit()
    assert not watch.of("finish")


@pytest.mark.parametrize(("ap", "last_epoch"), [({9: 0.9}, 11), ({}, 9)])
@pytest.mark.parametrize("late", [0, 1, 4])
def test_patience_waits_for_the_scores_that_decide(tmp_path, ap, last_epoch, late):
    progress = Progress(epoch=7, best_epoch=7, best_fitness=0.5)
    scores = Scores(dict.fromkeys(range(1, 20), 0.1) | ap, late=late)
    trainer = build(EarlyStopping("AP"), folder=tmp_path, progress=progress, scores=scores, epochs=20, patience=2)
    trainer.fit()
    assert trainer.progress.epoch == last_epoch


@pytest.mark.parametrize("late", [0, 1, 4])
def test_patience_ends_a_new_run_at_the_same_epoch_however_late_its_scores_are(tmp_path, late):
    scores = Scores(dict.fromkeys(range(7, 20), 0.1), late=late)  # epoch 6 is the best
    trainer = build(EarlyStopping("AP"), folder=tmp_path, scores=scores, epochs=20, patience=3)
    trainer.fit()
    assert trainer.progress.epoch == 9


def test_non_finite_steps_in_a_row_end_the_run(tmp_path, monkeypatch):
    trainer = build(epochs=99)
    trainer.checkpointer.last = tmp_path / "last.pt"
    trainer.checkpointer.last.touch()
    loss = type(trainer.step.criterion).forward
    bad = lambda *args: loss(*args)._replace(total=loss(*args).total * float("nan"))  # noqa: E731
    monkeypatch.setattr(type(trainer.step.criterion), "forward", bad)
    advice = re.escape(f"--weights {tmp_path}/last.pt, with a lower lr0")  # --resume would refuse another lr0
    with pytest.raises(UserError, match=f"the last 20 steps were not finite.*{advice}"):
        trainer.fit()


def test_the_last_epochs_refine():
    seen: list[bool] = []
    trainer = build(epochs=4, hyp=Hyperparameters(close_mosaic=1))
    trainer.step.criterion.set_no_mosaic = seen.append
    trainer.fit()
    assert seen == [False, False, False, True]


class DecidesNextEpoch(Hook):
    decides_next_epoch = True


@pytest.mark.parametrize(
    ("hooks", "settings", "expected"),
    [
        ((), {}, [1, 1, 1, 1, 1, 0]),
        ((), {"batch_size": 2, "nominal_batch": 4}, [1, 2, 1, 0]),  # steps of two batches and of one
        ((DecidesNextEpoch(),), {}, [1, 1, 0, 1, 1, 0]),
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
