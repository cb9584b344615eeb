"""Continuing the run in a folder (``--resume auto``), with some settings or with all of them."""

from __future__ import annotations

import errno
import pickle
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from data.dataset.yaml_file import YAML_FOLDER
from engine.checkpoint.progress import Progress
from engine.run import plan as plan_module
from engine.run import restore
from engine.run.complete_record import record_reported
from engine.run.ended_run import adds_epochs
from engine.run.plan import plan_run
from engine.run.restore import read_run_checkpoint
from engine.run.run import ContinuedRun, EndedRun, NewRun, Remaining, RunPlan, RunSettings
from tests.helpers.messages import refused
from tests.helpers.run_checkpoints import STORED, name_newest_run, save_checkpoint
from utils.config.settings import AUTO, Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.locks import FileLock

EPOCHS = TrainConfig.epochs  # the default
ALL = frozenset(field.name for field in fields(TrainConfig))
STALLED = Progress(epoch=EPOCHS // 2, best_epoch=10, best_fitness=0.5)
HOUR = replace(STORED["run"], seconds=3600.0)


def plan_of(project: Path, given: frozenset[str] | set[str] = ALL, **settings: Any) -> RunPlan | EndedRun:
    config = TrainConfig(**{"project": str(project), "resume": AUTO, **settings})
    with ExitStack() as stack:
        return plan_run(DistributedContext.single(), config, given, stack)


def report(folder: Path, config: TrainConfig, epochs: int) -> None:
    """Makes ``folder`` that of the run "run" with ``config``, which has written its report after ``epochs``."""
    stored = {"run_id": "run", **asdict(RunSettings(config, Hyperparameters()))}
    (folder / "settings.yaml").write_text(yaml.safe_dump(stored))
    record_reported(folder, "run", epochs)


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
    assert isinstance(plan, NewRun)
    assert plan.folder == (folder if exists else None)
    assert plan.existing_folder == folder
    assert (folder / "results.csv").exists() == exists


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("last.pt", "x" * 100, ".../exp/last.pt: ..."),
        (
            "results.csv",
            "epoch,time\n1,1\n2,2\n",
            ".../exp: has results of 2 epochs, but no last.pt to continue "
            "from; restore it, or move this folder elsewhere to start again",
        ),
    ],
)
def test_a_run_whose_checkpoint_is_damaged_or_missing_is_refused(folder, file, content, message):
    (folder / file).write_text(content)
    with refused(message):
        plan_of(folder.parent)
    assert (folder / file).read_text() == content


@pytest.mark.parametrize(
    ("stored", "progress", "settings", "epochs"),
    [
        # The current settings decide whether anything is left, even where they are the defaults.
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
def test_the_current_settings_decide_whether_a_run_has_ended(folder, stored, progress, settings, epochs):
    save_checkpoint(folder / "last.pt", progress, run=HOUR, config=TrainConfig(project=str(folder.parent), **stored))
    plan = plan_of(folder.parent, **settings)
    assert isinstance(plan, ContinuedRun)
    assert (plan.remaining is Remaining.REPORT) == (epochs is None)
    assert epochs in (None, plan.settings.config.epochs)
    if epochs is None:
        report(folder, TrainConfig(project=str(folder.parent), **stored), progress.epoch)
        assert isinstance(plan_of(folder.parent, **settings), EndedRun)
        with pytest.raises(UserError, match=r"; to (train longer|continue, wait for longer): "):  # it is named to train
            plan_of(folder.parent, resume=str(folder / "last.pt"), **settings)


@pytest.mark.parametrize("epoch", [4, 5])
def test_a_run_that_has_stopped_early_is_not_revived_by_other_epochs_to_validate(folder, epoch):
    """A new ``--val-every`` does not change whether its newest epoch was validated."""
    config = TrainConfig(project=str(folder.parent), epochs=10, patience=2)
    save_checkpoint(folder / "last.pt", Progress(epoch=epoch, best_epoch=epoch - 2, best_fitness=0.5), config=config)
    with refused("--val-every 2: the run in ...exp has ended, with 1; start a new run with ..."):
        plan_of(folder.parent, {"val_every"}, val_every=2)


def test_a_run_gets_each_setting_that_may_change_and_keeps_what_it_has_chosen(folder):
    stored = TrainConfig(
        project="elsewhere", exist_ok=True, batch_size=48, optimizer="SGD", cache="ram", workers=3, tracker=["wandb"],
        save_period=2, stage="/tmp/stage", threads=2, export=["onnx"], patience=5, seed=3,
    )  # fmt: skip
    save_checkpoint(folder / "last.pt", Progress(epoch=3), config=stored)
    config = plan_of(folder.parent, batch_size=-1).settings.config
    command = TrainConfig(project=str(folder.parent), resume=AUTO, exist_ok=True, batch_size=48, optimizer="SGD")
    assert config == command
    assert plan_of(folder.parent, {"resume", "project"}).settings.config == replace(
        stored, project=str(folder.parent), resume=AUTO
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
    save_checkpoint(folder / "last.pt", Progress(epoch=3), config=begun, data=location if name == "data" else {})
    monkeypatch.chdir(project / "below")
    for value in ("../file.yaml", str(project / "file.yaml")):
        plan = plan_of(Path(".."), {name}, **{name: value})
        assert Path(getattr(plan.settings.config, name)) == project / "file.yaml"
        assert not [message for message in plan.startup_messages if f"{name} " in message]


def test_an_earlier_run_in_the_folder_does_not_count(folder):
    save_checkpoint(folder / "last.pt", Progress(epoch=3), run_id="earlier")
    name_newest_run(folder, "new")
    assert isinstance(plan_of(folder.parent), NewRun)


@pytest.mark.parametrize("has_last", [False, True])
@pytest.mark.parametrize("is_reported", [False, True])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"data": "other.yaml"},
            "--data .../other.yaml: the run in .../exp has ended, with '.../set.yaml'...; start a "
            "new run with another --name; this one: ... to ...",
        ),
        ({"imgsz": 320}, "--imgsz 320: ..."),
        ({"override": ["lr0=0.5"]}, "--set lr0=0.5: the run in .../exp has ended, with None; ..."),
        ({"rect": True}, "--rect: ..."),
        (
            {"model": "yolov8n"},
            "--model yolov8n: the run being resumed has ''; leave it out, or start a new run with --weights",
        ),
    ],
)
def test_a_run_that_has_ended_is_not_asked_for_other_results(folder, has_last, is_reported, flags, message):
    data = folder.parent / "set.yaml"
    data.touch()
    config = TrainConfig(project=str(folder.parent), data=str(data), epochs=3)
    if has_last:
        save_checkpoint(folder / "last.pt", Progress(epoch=3), config=config, data={"source": str(data)})
    if is_reported:
        report(folder, config, 3)
    if has_last or is_reported:
        with refused(message):
            plan_of(folder.parent, {"resume", *flags}, **flags)


@pytest.mark.parametrize("state", ["last.pt", "no last.pt", "no report"])
@pytest.mark.parametrize(
    ("stored", "given", "moves"),
    [
        (f"{YAML_FOLDER}/coco.yaml", "coco", False),
        (f"{YAML_FOLDER}/coco.yaml", "coco.yaml", False),
        ("{folder}/set/data.yaml", "set", False),
        ("{folder}/set/data.yaml", "{folder}/set/../set/data.yaml", False),
        ("{folder}/set/data.yaml", "linked/data.yaml", True),  # the same file by another path
        ("{folder}/images", "images", False),  # a folder without a YAML
    ],
)
def test_a_run_that_has_ended_knows_its_data_by_name_and_folder(folder, monkeypatch, state, stored, given, moves):
    project = folder.parent
    monkeypatch.chdir(project)
    for name in ("set", "images"):
        (project / name).mkdir()
    (project / "set/data.yaml").touch()
    (project / "linked").symlink_to("set")
    stored = stored.format(folder=project)
    config = TrainConfig(project=str(project), data=stored, epochs=3)
    if state != "no last.pt":
        save_checkpoint(folder / "last.pt", Progress(epoch=3), config=config, data={"source": stored})
    if state != "no report":
        report(folder, config, 3)
    plan = plan_of(project, {"resume", "data"}, data=given.format(folder=project))
    assert isinstance(plan, ContinuedRun if state == "no report" else EndedRun)
    changes = [message for message in plan.startup_messages if message.startswith("resume: data ")]
    assert bool(changes) == moves


def test_the_built_in_data_set_is_no_folder_of_its_name(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    (folder.parent / "demo").mkdir()
    save_checkpoint(folder / "last.pt", Progress(epoch=3), config=TrainConfig(epochs=3))
    assert plan_of(folder.parent, {"resume", "data", "epochs"}, epochs=3).settings.config.data == "demo"


@pytest.mark.parametrize(
    ("stored", "trained", "more", "asks"),
    [
        ({"time": 2.0}, 150, {"time": 10.0}, True),
        ({"time": 2.0}, 150, {"time": 1.0}, False),
        ({"time": 2.0, "epochs": 200}, 150, {"time": 0.0, "epochs": 180}, True),
        ({"time": 2.0, "epochs": 200}, 150, {"time": 0.0, "epochs": 120}, False),
        ({"epochs": 10, "patience": 2}, 3, {"epochs": 5}, False),
        ({"epochs": 10, "patience": 2}, 3, {"patience": 0}, True),
        ({"epochs": 10, "patience": 2}, 10, {"patience": 5}, False),
    ],
)
def test_some_settings_let_a_run_that_has_ended_train_on(stored, trained, more, asks):
    before = TrainConfig(**stored)
    assert adds_epochs(before, replace(before, **more), trained, progress=None) == asks


def test_a_run_that_has_ended_says_which_of_its_settings_change(folder):
    """``--export`` of a run that has trained. It has as many epochs as it has trained, if fewer are asked for."""
    config = TrainConfig(project=str(folder.parent), epochs=3)
    save_checkpoint(folder / "last.pt", Progress(epoch=3), config=config)
    for is_reported in (False, True):
        if is_reported:
            report(folder, config, 3)
        plan = plan_of(folder.parent, {"epochs", "export"}, epochs=2, export=["onnx"])
        assert isinstance(plan, EndedRun) == is_reported
        assert (plan.settings.config.epochs, plan.settings.config.export) == (3, ["onnx"])
        assert not any(message.startswith(("resuming ", "resume: processes")) for message in plan.startup_messages)
        assert "resume: export [] -> ['onnx']" in plan.startup_messages


def test_a_run_that_has_ended_needs_no_last_pt_but_to_train_on(folder):
    (folder / "results.csv").write_text("epoch,time\n1,1\n2,2\n3,3\n")
    config = TrainConfig(project=str(folder.parent), epochs=10, patience=2)
    report(folder, config, 3)
    for given in ({"epochs": 10}, {"epochs": 2}, {}):
        plan = plan_of(folder.parent, given, **given)
        assert isinstance(plan, EndedRun)
        assert plan.end_reason.startswith("its report after 3 epochs is written, and there is no last.pt ")
    for given in ({"epochs": 20}, {"patience": 5}, {"time": 2.0}):
        with refused(
            ".../exp: the run has ended after 3 epochs, and there is no last.pt to continue from; restore it to "
            "continue, or repeat the command with the earlier --epochs, --time and --patience"
        ):
            plan_of(folder.parent, given, **given)
    name_newest_run(folder, "new")
    with refused(".../exp: has results of 3 epochs, but no last.pt ..."):
        plan_of(folder.parent)


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_run_that_has_ended_may_be_in_a_read_only_folder(folder, monkeypatch, has_ended):
    def refuse(*_: object) -> str:
        raise OSError(errno.EROFS, "Read-only file system", str(folder))

    monkeypatch.setattr(FileLock, "acquire", refuse)
    config = TrainConfig(project=str(folder.parent), epochs=3)
    save_checkpoint(folder / "last.pt", Progress(epoch=3), config=config)
    if has_ended:
        report(folder, config, 3)
        assert isinstance(plan_of(folder.parent, {"epochs"}, epochs=3), EndedRun)
    else:
        with refused(".../exp: cannot be written (read-only file system), but a run continues in its own folder; ..."):
            plan_of(folder.parent, {"epochs"}, epochs=3)


@pytest.mark.parametrize("state", ["begun", "trains", "reports", "ended", "without last.pt"])
def test_a_rank_on_another_disk_does_what_rank_0_has_decided(folder, monkeypatch, state):
    config = TrainConfig(project=str(folder.parent), epochs=3, workers=1)
    if state in ("trains", "reports", "ended"):
        save_checkpoint(folder / "last.pt", Progress(epoch=2 if state == "trains" else 3), config=config)
    if state in ("ended", "without last.pt"):
        report(folder, config, 3)
    plan = plan_of(folder.parent, {"resume", "device"}, device="cpu")
    folder.rename(folder.with_name("elsewhere"))
    monkeypatch.setattr(plan_module, "result_of_main", lambda ctx, decide: pickle.loads(pickle.dumps(plan)))
    assert plan_of(folder.parent, {"resume", "device"}, device="cpu") == plan
    own = plan_of(folder.parent, {"resume", "device", "workers"}, device="cuda:1", workers=2, epochs=5)
    changes = {"device": "cuda:1", "workers": 2}  # of its machine, and nothing else
    assert own.settings.config == replace(plan.settings.config, **changes)


@pytest.mark.parametrize("run_id", ["exp", "another"])
def test_the_ranks_read_one_checkpoint(folder, monkeypatch, run_id):
    save_checkpoint(folder / "last.pt", Progress(epoch=2), run_id="exp")
    plan = plan_of(folder.parent, ())
    facts: list[Any] = []
    monkeypatch.setattr(restore, "check_agreement", lambda _, own: facts.append(own))
    save_checkpoint(folder / "last.pt", Progress(epoch=2), run_id=run_id)
    for _ in range(2):
        read_run_checkpoint(DistributedContext.single(), plan)
        save_checkpoint(folder / "last.pt", Progress(epoch=2), run_id="exp")
    assert (facts[0] == facts[1]) == (run_id == "exp")
