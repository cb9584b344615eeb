from __future__ import annotations

import pytest
import torch

from engine.train.control import StopCoordinator
from engine.train.step import NO_FLAGS, StepFlags
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext
from utils.machine.stop_signals import INTERRUPTED, REQUEUE, StopSignals

MAIN = DistributedContext.single()
OTHER = DistributedContext(1, 1, 2, 2, 0, torch.device("cpu"), "gloo", (torch.device("cpu"),))


def test_checkpoints_are_saved_by_steps_and_by_time(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr("engine.train.control.time.monotonic", lambda: now[0])
    stops = StopCoordinator(MAIN, StopSignals(), TrainConfig(save_minutes=1, save_steps=3))
    assert [updates for updates in range(1, 10) if stops.save_is_due(NO_FLAGS, updates)] == [3, 6, 9]
    assert not stops.flags().save
    now[0] += 61
    assert [stops.flags().save for _ in range(3)] == [True, False, False]  # once, until the checkpoint is saved
    stops.saved()
    assert not stops.flags().save
    now[0] += 61
    assert stops.flags().save
    other = StopCoordinator(OTHER, StopSignals(), TrainConfig(save_minutes=1, save_steps=0))
    now[0] += 1000
    assert not other.flags().save  # the clock of rank 0 alone decides
    assert not any(other.save_is_due(NO_FLAGS, updates) for updates in range(10))
    assert other.save_is_due(StepFlags(save=True), 1)


@pytest.mark.parametrize(("save_minutes", "least_s"), [(10, 60), (0.5, 30), (0, None)])
def test_an_epoch_is_saved_before_its_validation_if_much_would_be_lost(monkeypatch, save_minutes, least_s):
    now = [100.0]
    monkeypatch.setattr("engine.train.control.time.monotonic", lambda: now[0])
    stops = StopCoordinator(MAIN, StopSignals(), TrainConfig(save_minutes=save_minutes))
    due = []
    for seconds in (0, 29, 30, 59, 60, 1e5):
        now[0] = 100.0 + seconds
        due.append(stops.save_is_due_before_validation())
    assert due == [least_s is not None and seconds >= least_s for seconds in (0, 29, 30, 59, 60, 1e5)]
    stops.saved()
    assert not stops.save_is_due_before_validation()


def test_a_signal_to_one_rank_makes_all_ranks_save_and_stop():
    signals = StopSignals()
    stops = StopCoordinator(MAIN, signals, TrainConfig())
    assert stops.flags() == NO_FLAGS
    assert stops.exit_code(NO_FLAGS) == 0
    assert not stops.stop_requested()
    signals.stop = True
    assert stops.exit_code(stops.flags()) == REQUEUE
    assert stops.stop_requested()
    assert stops.exit_code_after_validation(stopped=True) == REQUEUE
    assert stops.exit_code_after_validation(stopped=False) == 0
    signals.interrupt = True
    assert stops.exit_code(stops.flags()) == INTERRUPTED  # Ctrl-C counts before a batch system's signal
    assert stops.exit_code(StepFlags(save=True)) == 0
