from __future__ import annotations

import dataclasses
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from engine.run.merge_settings import describe_changes, is_same_start, merge_config, merge_hyperparameters
from engine.run.plan import plan_run
from engine.run.run import RunSettings
from tests.helpers.messages import refused
from utils.config.recipes import read_recipe
from utils.config.settings import Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext


def changes(stored: TrainConfig, config: TrainConfig) -> list[str]:
    return describe_changes(RunSettings(stored, Hyperparameters()), RunSettings(config, Hyperparameters()))


def merged_hyp(
    stored: Hyperparameters, command: TrainConfig, given: Collection[str], **run: Any
) -> tuple[Hyperparameters, list[str]]:
    """Returns the hyper-parameters of a run with the settings ``run``, and what is logged."""
    before = RunSettings(TrainConfig(**run), stored)
    hyp, messages = merge_hyperparameters(before, command, given)
    return hyp, messages + describe_changes(before, RunSettings(before.config, hyp))


def test_epochs_replace_a_time():
    stored = TrainConfig(batch_size=8, epochs=10, time=1.5)
    config = merge_config(stored, TrainConfig(epochs=20), {"epochs"})
    assert (config.epochs, config.time) == (20, 0)
    assert changes(stored, config) == ["resume: epochs 10 -> 20", "resume: time 1.5 -> 0.0"]
    config = merge_config(stored, TrainConfig(epochs=20, time=3.0), {"epochs", "time"})
    assert (config.epochs, config.time) == (10, 3)  # the time decides about the epochs


def test_a_restart_keeps_the_epochs_that_its_time_limit_has_chosen():
    """torchrun gives the flags of the first start again."""
    command = TrainConfig(epochs=100, time=2.0)
    stored = TrainConfig(batch_size=8, epochs=37, time=2.0)
    assert merge_config(stored, command, {"epochs", "time"}) == stored
    config = merge_config(dataclasses.replace(stored, time=1.0), command, {"epochs", "time"})
    assert (config.epochs, config.time) == (37, 2.0)  # the limit is new, and decides after an epoch


@pytest.mark.parametrize(
    ("name", "stored", "command"), [("optimizer", "SGD", "auto"), ("optimizer", "Muon", "auto"), ("batch_size", 48, -1)]
)
def test_what_was_chosen_when_a_run_began_stays_if_the_command_leaves_it_open(name, stored, command):
    """Another choice would not fit the stored state: with other --epochs, "auto" may mean another optimizer."""
    run = TrainConfig(epochs=10, **{name: stored})
    config = merge_config(run, TrainConfig(epochs=20, **{name: command}), {name, "epochs"})
    assert config == dataclasses.replace(run, epochs=20)
    assert changes(run, config) == ["resume: epochs 10 -> 20"]


def test_a_run_has_the_device_of_the_process_that_resumes_it():
    stored = TrainConfig(batch_size=8, device="cuda:1")
    assert merge_config(stored, TrainConfig(device="cpu"), {"device"}).device == "cpu"
    assert merge_config(stored, TrainConfig(), ()).device == TrainConfig().device


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        (
            "freeze",
            [1],
            [2],
            "--freeze 2: the run being resumed has [1]; leave it out, or start a new run with --weights",
        ),
        (
            "classes",
            ["car"],
            ["bus"],
            "--classes bus: the run being resumed has ['car']; leave it out, or start a new run with --weights",
        ),
    ],
)
def test_what_a_run_cannot_change_is_refused(name, old, new, message):
    before = TrainConfig(**{name: old})
    now = TrainConfig(**{name: new})
    assert merge_config(before, before, {name}) == before
    with refused(message):
        merge_config(before, now, {name})


def test_a_resumed_run_keeps_its_hyperparameters_unless_the_command_changes_them():
    stored = Hyperparameters(close_mosaic=10, scale=0.5, close_scale=0)
    config = TrainConfig(override=["close_scale=null"])
    hyp, lines = merged_hyp(stored, config, ())
    assert (hyp.close_mosaic, hyp.close_scale, lines) == (10, 0, [])
    hyp, lines = merged_hyp(stored, config, ("override",))
    assert (hyp.close_mosaic, hyp.close_scale, lines) == (10, None, ["resume: close_scale 0 -> None"])
    hyp, lines = merged_hyp(dataclasses.replace(stored, close_scale=None), config, ())
    assert (hyp.close_scale, lines) == (None, [])


def test_a_resumed_run_keeps_the_rate_that_was_chosen_when_it_began():
    for config, given in ((TrainConfig(hyp="finetune"), "hyp"), (TrainConfig(override=["lr_mult=null"]), "override")):
        hyp, lines = merged_hyp(Hyperparameters(lr_mult=0.0625), config, (given,), weights="a.pt")
        assert (hyp.lr_mult, lines) == (0.0625, [])


def test_a_recipe_named_on_resume_is_that_of_a_run_that_keeps_old_classes():
    config = TrainConfig(hyp="auto")  # nobody repeats --keep-old, which cannot change
    hyp, _ = merged_hyp(Hyperparameters(), config, ("hyp",), weights="a.pt", keep_old=True)
    assert hyp == read_recipe("keep_old", pretrained=True)


def test_the_log_names_what_has_no_effect_in_the_recipe(tmp_path: Path):
    (tmp_path / "hyp.yaml").write_text("mosaic: 0.5\nfl_gamma: 0.0\n")
    config = TrainConfig(hyp=str(tmp_path / "hyp.yaml"), project=str(tmp_path))
    with ExitStack() as stack:
        plan = plan_run(DistributedContext.single(), config, ("hyp",), stack)
    (line,) = plan.startup_messages
    assert plan.settings.hyp.mosaic == 0.5
    assert "fl_gamma" in line
    _, lines = merged_hyp(Hyperparameters(mosaic=1.0), config, ("hyp",))
    assert lines == [line, "resume: mosaic 1.0 -> 0.5"]


def test_a_recipe_that_has_gone_is_that_of_the_run_unless_it_is_another_one(tmp_path: Path):
    config = TrainConfig(hyp=str(tmp_path / "hyp.yaml"))
    hyp, lines = merged_hyp(Hyperparameters(lr0=0.5), config, ("hyp",), hyp=config.hyp)
    assert hyp.lr0 == 0.5
    assert lines == [f"--hyp {tmp_path}/hyp.yaml: no such file any more; the run keeps its hyper-parameters"]
    with refused(f"--hyp {tmp_path}/hyp.yaml: no such recipe or file..."):
        merged_hyp(Hyperparameters(lr0=0.5), config, ("hyp",), hyp="other.yaml")


@pytest.mark.parametrize(
    ("config", "hyp", "is_alike"),
    [
        ({}, {}, True),
        ({"batch_size": -1, "optimizer": "auto"}, {"lr_mult": None}, True),  # chosen again, perhaps on another GPU
        ({"batch_size": 8}, {}, False),
        ({"workers": 3, "hyp": "scratch"}, {}, True),
        ({}, {"lr0": 0.5}, False),
    ],
)
def test_a_start_is_that_of_a_run_whatever_it_leaves_open(config, hyp, is_alike):
    stored = RunSettings(TrainConfig(batch_size=48, optimizer="SGD"), Hyperparameters(lr_mult=0.25))
    planned = RunSettings(dataclasses.replace(stored.config, **config), dataclasses.replace(stored.hyp, **hyp))
    assert is_same_start(stored, planned) == is_alike
