"""How the run in a folder continues (``--resume auto``), with some settings or with all of them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.progress import PendingEpoch, Progress, RunConditions
from engine.run.continuation import note_complete
from engine.run.plan import plan_run
from engine.run.run import Remaining, RunPlan
from tests.helpers.messages import refused
from tests.helpers.run_checkpoints import claim, saved
from utils.config.settings import AUTO, TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError

EPOCHS = TrainConfig.epochs  # the default
ALL = frozenset(field.name for field in fields(TrainConfig))
STALLED = Progress(epoch=EPOCHS // 2, best_epoch=10, best_fitness=0.5)
HOUR = RunConditions(epoch_batches=10, images=80, seconds=3600.0)


def plan_of(project: Path, given: frozenset[str] | set[str] = ALL, **settings: Any) -> RunPlan:
    config = TrainConfig(**{"project": str(project), "resume": AUTO, **settings})
    with ExitStack() as stack:
        return plan_run(DistributedContext.single(), config, given, stack)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "exp"
    path.mkdir()
    return path


@pytest.mark.parametrize("exists", [False, True])
def test_a_run_that_has_saved_nothing_starts_in_its_folder(folder, exists):
    if exists:  # killed before its first checkpoint
        (folder / "results.csv").write_text("epoch,time\n1,1\n")
    else:
        folder.rmdir()
    plan = plan_of(folder.parent)
    assert (plan.started_from, plan.folder) == (None, folder if exists else None)
    assert plan.used_folder == folder
    assert (folder / "results.csv").exists() == exists


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("last.pt", "x" * 100, ".../exp/last.pt: ..."),
        ("results.csv", "epoch,time\n1,1\n2,2\n", ".../exp: has results of 2 epochs, but no last.pt from which they "
         "continue; restore it, or move this folder elsewhere to train anew"),
    ],
)  # fmt: skip
def test_a_run_whose_checkpoint_is_damaged_or_missing_is_refused(folder, file, content, message):
    (folder / file).write_text(content)
    with refused(message):
        plan_of(folder.parent)
    assert (folder / file).read_text() == content


@pytest.mark.parametrize(
    ("stored", "progress", "settings", "epochs"),
    [
        # The settings of now decide whether there is anything left, also where they are the defaults.
        ({"epochs": EPOCHS // 2}, Progress(epoch=EPOCHS // 2), {}, EPOCHS),
        ({"epochs": EPOCHS // 2}, Progress(epoch=EPOCHS // 2), {"epochs": EPOCHS // 2}, None),
        ({"epochs": EPOCHS // 2}, Progress(epoch=EPOCHS // 4), {}, EPOCHS),
        ({"patience": 20}, STALLED, {"patience": 20}, None),
        ({"patience": 20}, STALLED, {}, EPOCHS),
        ({"epochs": 50, "time": 1.0}, Progress(epoch=50), {"time": 1.0}, None),
        ({"epochs": 50, "time": 1.0}, Progress(epoch=50), {"time": 2.0}, 100),
        ({"epochs": 50, "time": 1.0}, Progress(epoch=50), {"epochs": 60}, 60),
        ({"epochs": 50, "time": 1.0}, Progress(epoch=50), {"epochs": 50}, None),
    ],
)
def test_the_settings_of_now_say_whether_a_run_has_ended(folder, stored, progress, settings, epochs):
    saved(folder / "last.pt", progress, run=HOUR, config=TrainConfig(project=str(folder.parent), **stored))
    plan = plan_of(folder.parent, **settings)
    assert plan.remaining is (Remaining.REPORT if epochs is None else Remaining.EPOCHS)
    assert epochs in (None, plan.settings.config.epochs)
    if epochs is None:
        note_complete(folder)
        assert plan_of(folder.parent, **settings).remaining is Remaining.EXPORTS
        with pytest.raises(UserError, match="; to continue, "):  # a checkpoint that is named is to train
            plan_of(folder.parent, resume=str(folder / "last.pt"), **settings)


def test_a_run_whose_newest_epoch_has_no_scores_goes_on(folder):
    progress = Progress(epoch=EPOCHS)
    pending = PendingEpoch(row={}, is_closing=False, progress=progress, ema={})
    saved(folder / "last.pt", progress, pending=pending)
    assert plan_of(folder.parent).remaining is Remaining.EPOCHS


def test_a_run_gets_each_setting_that_may_change_and_keeps_what_it_has_chosen(folder):
    stored = TrainConfig(
        project="elsewhere", exist_ok=True, batch_size=48, optimizer="SGD", cache="ram", workers=3, tracker=["wandb"],
        save_period=2, stage="/tmp/stage", threads=2, export=["onnx"], patience=5, seed=3,
    )  # fmt: skip
    saved(folder / "last.pt", Progress(epoch=3), config=stored)
    config = plan_of(folder.parent, batch_size=-1).settings.config
    command = TrainConfig(project=str(folder.parent), resume=AUTO, batch_size=48, optimizer="SGD")
    assert config == command
    assert plan_of(folder.parent, {"resume", "project"}).settings.config == replace(
        stored, project=str(folder.parent), exist_ok=False, resume=AUTO
    )


@pytest.mark.parametrize("name", ["data", "model", "weights", "teacher"])
def test_a_run_continues_from_another_working_folder(folder, monkeypatch, name):
    """``--model ../tiny.yaml`` is the tiny.yaml with which it began."""
    project = folder.parent
    (project / "below").mkdir()
    (project / "file.yaml").touch()
    monkeypatch.chdir(project)
    settings = {name: "file.yaml"}
    begun = plan_of(project, name="new", **settings).settings.config
    location = {"source": str(project / "file.yaml")}
    saved(folder / "last.pt", Progress(epoch=3), config=begun, data=location if name == "data" else {"fingerprint": ""})
    monkeypatch.chdir(project / "below")
    for value in ("../file.yaml", str(project / "file.yaml")):
        plan = plan_of(Path(".."), {name}, **{name: value})
        assert Path(getattr(plan.settings.config, name)) == project / "file.yaml"
        assert not [message for message in plan.startup_messages if f"{name} " in message]


def test_an_earlier_run_in_the_folder_does_not_count(folder):
    saved(folder / "last.pt", Progress(epoch=3), run_id="earlier")
    claim(folder, "new")
    assert plan_of(folder.parent).started_from is None
