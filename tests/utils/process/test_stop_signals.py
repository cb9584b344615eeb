from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import train
from engine.commands import input_files
from engine.train.resume import TrainingOutcome
from utils.config.settings import TrainConfig
from utils.errors import Stopped, UserError
from utils.process import stop_signals
from utils.process.stop_signals import StopSignals


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def _handlers_as_they_were():
    before = {number: signal.getsignal(number) for number in stop_signals.stop_signals()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_signal_before_training_raises_at_once(number, code):
    with pytest.raises(Stopped) as caught, StopSignals():
        send(number)
    assert caught.value.code == code


def test_a_signal_to_train_py_at_its_very_start_means_resume(monkeypatch):
    """The signal comes before torch is imported."""
    monkeypatch.setattr(input_files, "check_training_files", lambda _: send(signal.SIGTERM))
    with pytest.raises(Stopped) as caught:
        train.main(["--data", "a.yaml"])
    assert caught.value.code == 75


def test_handlers_are_restored_unless_others_were_set_meanwhile():
    """A process that only waits for others sets its own, as that of `spawn` does."""

    def handle(*_: object) -> None: ...

    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        assert not signals.drain()
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1
    with StopSignals():
        signal.signal(signal.SIGTERM, handle)
    assert signal.getsignal(signal.SIGTERM) == handle


def test_a_signal_is_recorded_during_training_and_ignored_while_ending():
    with StopSignals() as signals:
        with signals.deferred():
            send(signal.SIGTERM)
            send(signal.SIGTERM)
            assert (signals.requeue, signals.interrupt, signals.code) == (True, False, 75)
            assert signals.drain()
            assert not signals.drain()
            send(signal.SIGINT)
            assert signals.code == 130
        send(signal.SIGTERM)
    send(signal.SIGTERM)  # the process is ending
    with StopSignals() as signals:
        with pytest.raises(ZeroDivisionError), signals.deferred():
            1 / 0  # noqa: B018
        send(signal.SIGTERM)  # a launcher's, while a failing run ends
        assert signals.requeue


def test_a_finished_training_is_exported_in_spite_of_sigterm_but_not_of_ctrl_c(monkeypatch, tmp_path):
    """A job that is requeued would find nothing to train."""
    exported = []

    def start(argv: list[str], signals: StopSignals) -> TrainingOutcome:
        signals.ignore_requeue()  # as `RunControl.begin_finalizing` does
        return TrainingOutcome(tmp_path, TrainConfig(export=["onnx"]), failure=None)

    def export(folder: Path, config: TrainConfig, *, failure: UserError | None) -> None:
        assert failure is None
        for number in (signal.SIGTERM, signal.SIGUSR1):
            send(number)
        exported.append(folder)
        send(signal.SIGINT)

    monkeypatch.setattr(train, "_start", start)
    monkeypatch.setattr("engine.commands.export.export_best", export)
    with pytest.raises(Stopped) as caught:
        train.main([])
    assert (exported, caught.value.code) == ([tmp_path], 130)


def test_ctrl_c_stops_at_once_when_training_is_done():
    """The report is written within the block that defers signals, and after it."""
    with StopSignals() as signals, signals.deferred():
        signals.ignore_requeue()
        with pytest.raises(Stopped):
            send(signal.SIGINT)
    with StopSignals() as signals:
        with signals.deferred():
            send(signal.SIGTERM)  # recorded, but no step was left to stop after
            signals.ignore_requeue()
        with pytest.raises(Stopped):
            send(signal.SIGINT)


def test_a_second_ctrl_c_stops_at_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("utils.process.stop_signals.time.monotonic", lambda: now[0])
    with StopSignals() as signals, signals.deferred():
        send(signal.SIGINT)
        now[0] = 0.5
        send(signal.SIGINT)  # sent again by a launcher
        now[0] = 5.0
        with pytest.raises(Stopped):
            send(signal.SIGINT)
