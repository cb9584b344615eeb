"""The lines before the first step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.assembly.start_log import log_start
from engine.optim.schedule import step_plan
from engine.train.checkpoint import Progress
from engine.train.resume import Remaining, TrainingRun
from models.detector import build_detector
from tests.helpers.steps import make_train_step
from tests.helpers.tiny import TINY_MODEL
from tests.helpers.training import started_from
from utils.config.settings import Hyperparameters, RunSettings, TrainConfig
from utils.distributed.context import DistributedContext


@pytest.mark.parametrize(
    ("hours", "remaining"),
    [(0.0, Remaining.STEPS), (0.0, Remaining.SCORES), (1.0, Remaining.SCORES), (0.0, Remaining.REPORT)],
)
def test_only_a_run_that_takes_steps_logs_them(caplog, hours, remaining):
    """Other runs announce no training, and advise no more epochs."""
    caplog.set_level("INFO", logger="lockstep")
    settings = RunSettings(TrainConfig(epochs=2, optimizer="SGD", time=hours), Hyperparameters())
    origin = started_from(Progress(epoch=1))
    run = TrainingRun(folder=Path(), run_id="", settings=settings, started_from=origin, remaining=remaining)
    step = make_train_step(DistributedContext.single(), build_detector(TINY_MODEL, 2))
    log_start(run, step, step_plan(settings.config, 3), "")
    takes_steps = remaining is Remaining.STEPS
    assert any("starting" in message for message in caplog.messages) == takes_steps
    assert bool(caplog.messages) == takes_steps


@pytest.mark.parametrize(
    ("stored", "chosen", "reason"),
    [
        (None, "auto: at most 10,000 steps", "auto: at most 10,000 steps"),
        (None, "", "--optimizer"),
        ("SGD", "", "as when the run began"),
        ("Muon", "", "--optimizer"),
    ],
)
def test_the_reason_for_the_optimizer_is_stated(caplog, stored, chosen, reason):
    caplog.set_level("INFO", logger="lockstep")
    settings = RunSettings(TrainConfig(epochs=2, optimizer="SGD"), Hyperparameters())
    run = TrainingRun(folder=Path(), run_id="", settings=settings, started_from=None, remaining=Remaining.STEPS)
    if stored is not None:
        origin = started_from(Progress())
        earlier = replace(origin.description.config, optimizer=stored)
        run = replace(run, started_from=replace(origin, description=replace(origin.description, config=earlier)))
    step = make_train_step(DistributedContext.single(), build_detector(TINY_MODEL, 2))
    log_start(run, step, step_plan(settings.config, 3), chosen)
    assert any(f" ({reason}), learning rate " in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("hours", "length"),
    [(0.0, "6 steps (2 epochs of 3), each"), (0.5, "3 steps per epoch, for 0.5 hours (--time), each")],
)
def test_the_number_of_steps_is_stated_if_it_is_known(caplog, hours, length):
    """With --time, the number for --epochs was stated, which the run does not have."""
    caplog.set_level("INFO", logger="lockstep")
    settings = RunSettings(TrainConfig(epochs=2, optimizer="SGD", time=hours), Hyperparameters())
    step = make_train_step(DistributedContext.single(), build_detector(TINY_MODEL, 2))
    run = TrainingRun(folder=Path(), run_id="", settings=settings, started_from=None, remaining=Remaining.STEPS)
    log_start(run, step, step_plan(settings.config, 3), "")
    assert any(message.startswith(length) for message in caplog.messages)
