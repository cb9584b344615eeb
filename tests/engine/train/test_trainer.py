"""The loop with a real step of a tiny model: the order of hooks, saves and validations, and what hooks decide."""

from __future__ import annotations

import pytest

from data.loading.prefetcher import Prefetcher
from engine.hooks.hook import Action, Epoch, Hook, Training
from tests.engine.train.watched_trainer import BATCHES, FailingHook, Watch, build
from utils.config.settings import Hyperparameters
from utils.errors import UserError


def test_hooks_see_every_step_and_epoch_in_order():
    watch = Watch()
    build(watch).fit()
    epoch = [
        ("before_epoch", 0, 0),
        *(("after_step", 0, batch) for batch in (1, 2, 3)),
        ("after_last_step", 0, 3),
        ("before_validation", 0, 3),
        ("record", 1, 0),
        ("after_save",),
        ("report", 1, 0),
        ("after_epoch", 1, 0),
    ]
    without_reads = [call for call in watch.calls if call[0] != "after_read"]
    assert without_reads[: len(epoch) + 1] == [("start", 0, 0), *epoch]
    assert without_reads[-3:] == [("after_steps", 2, 0), ("after_training", 2, 0), ("finish", 2, 0)]
    assert len(watch.of("after_read")) == len(watch.of("after_step")) == 2 * BATCHES
    assert watch.of("after_read")[:3] == [
        ("after_read", 0, 2),
        ("after_read", 0, 3),
        ("after_read", 0, 3),
    ]  # a step late, all at the end


def test_each_epoch_is_saved_with_its_scores():
    trainer = build(best_epoch=2, epochs=3)
    trainer.fit()
    saved = trainer.checkpointer.saved
    assert [(epoch, batch) for epoch, batch, _ in saved] == [(1, 0), (2, 0), (3, 0)]
    assert trainer.checkpointer.epochs == [(1, False), (2, True), (3, False)]
    assert [header.metrics["AP"] for *_, header in saved] == [0.1, 0.2, 0.3]
    assert (saved[0][2].run.epoch_batches, saved[0][2].run.images) == (BATCHES, 2 * BATCHES)


def test_a_later_save_has_the_scores_of_its_epoch_until_a_step_is_taken():
    """For example, a callback may stop the run at the end of an epoch."""
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
    ("hook", "is_stored"), [(StopsAfter(1), True), (StopsAfter(1, 1), True), (FailingHook(1), False), (Hook(), False)]
)
def test_a_checkpoint_tells_that_a_callback_has_ended_the_run(hook, is_stored):
    trainer = build(hook, epochs=3)
    try:
        trainer.fit()
    except UserError:
        assert isinstance(hook, FailingHook)
    assert trainer.checkpointer.saved[-1][2].ended_by_callback == is_stored


def test_what_a_hook_saves_at_the_start_is_written_before_the_first_step():
    waits: list[int] = []
    trainer = build(Watch(start=(0, 0, Action.SAVE)), epochs=1)
    trainer.checkpointer.flush = lambda: waits.append(trainer.progress.updates)
    trainer.fit()
    assert waits[0] == 0


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
