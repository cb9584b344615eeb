"""The files that a run has stored, and those that a command which continues it means."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from data.dataset.spec import DataSource
from data.index.load import load_index
from data.open import open_data
from engine.checkpoint.checkpoint import weights_part
from engine.checkpoint.data_identity import DataIdentity
from engine.checkpoint.progress import Progress
from engine.run import compare_files, resolve_paths
from engine.run import plan as plan_module
from engine.run.complete_record import record_reported
from engine.run.plan import plan_run
from engine.run.run import ContinuedRun, EndedRun, NewRun, RunPlan, RunSettings
from tests.helpers.run_checkpoints import save_checkpoint
from tests.helpers.tiny import write_dataset
from utils.config.settings import AUTO, TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.checksum import sha256_of
from utils.files.torch_file import write_checkpoint
from utils.logger import configure_logging

SAME = "same"
MOVED = "moved"
NOT_COMPARED = "not compared"
REFUSED = "refused"


def plan_of(**flags: Any) -> RunPlan | EndedRun:
    config = TrainConfig(project="runs", epochs=3, resume=AUTO, **flags)
    with ExitStack() as stack:
        return plan_run(DistributedContext.single(), config, {"resume", "epochs", *flags}, stack)


def end_run(settings: RunSettings, *, has_last: bool) -> None:
    """Makes runs/exp the folder of a run with these settings that has ended."""
    folder = Path("runs/exp")
    folder.mkdir(parents=True)
    stored = {"config": settings.config, "hyp": settings.hyp, "files": settings.files}
    stored["data"] = {"source": settings.config.data}
    if Path(settings.config.data).exists():
        spec = open_data(DataSource(settings.config.data, ("train", "val")), DistributedContext.single())
        if settings.config.keep_old:
            spec = spec.extended(["old"], "best.pt")
        stored["identity"] = DataIdentity.of(load_index(spec, "train"), load_index(spec, "val"))
        stored["names"] = list(spec.names)
    checkpoint = save_checkpoint(folder / "last.pt", Progress(epoch=3), run_id="exp", **stored)
    write_checkpoint(weights_part(checkpoint.content()), folder / "best.pt")
    if not has_last:
        (folder / "last.pt").unlink()
    (folder / "settings.yaml").write_text(yaml.safe_dump({"run_id": "exp", **asdict(settings)}))
    record_reported(folder, "exp", 3)


def begin_run(settings: RunSettings) -> None:
    """Makes runs/exp the folder of a run with these settings that has trained one epoch."""
    Path("runs/exp").mkdir(parents=True)
    stored = {"config": settings.config, "hyp": settings.hyp, "files": settings.files}
    save_checkpoint(Path("runs/exp/last.pt"), Progress(epoch=1), **stored, data={"source": settings.config.data})


def outcome_of(name: str, typed: str) -> str:
    """Returns what the command ``--NAME TYPED`` says about the file of the run."""
    try:
        plan = plan_of(**{name: typed})
    except UserError as error:
        return REFUSED if "start a new run" in str(error) else str(error)
    assert isinstance(plan, EndedRun)
    if any("which no longer exists either" in message for message in plan.startup_messages):
        return NOT_COMPARED
    is_logged = any(message.startswith(f"resume: {name} ") for message in plan.startup_messages)
    return MOVED if is_logged else SAME


def change_disk(change: str, path: Path, copy: Path) -> None:
    """Changes the file or data set ``path``, and makes ``copy`` from it, as the words of ``change`` say."""
    is_folder = path.is_dir()
    if change.startswith(("copy", "move")):
        (shutil.copytree if is_folder else shutil.copy)(path, copy)
    if change.startswith(("remove", "move")):
        (shutil.rmtree if is_folder else os.remove)(path)
    if change == "link":
        copy.symlink_to(path)
    if "change" in change:
        changed = path if change == "change" else copy
        if is_folder and change.endswith("names"):
            yaml_file = changed / "data.yaml"
            yaml_file.write_text(yaml_file.read_text().replace("light", "lamp"))
        elif is_folder:
            split = "train" if change.endswith("train") else "val"
            (changed / f"labels/{split}/000.txt").write_text("0 0.5 0.5 0.25 0.25\n")
        else:
            changed.write_text("0 0.5 0.5 0.25 0.25\n")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with weights, a model and data sets, which have no cached index elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "here"
    (folder / "ckpt").mkdir(parents=True)
    monkeypatch.chdir(folder)
    for path in ("best.pt", "ckpt/best.pt", "my.yaml"):
        Path(path).write_text("content")
    write_dataset(Path("set"), train=2, val=2)
    return folder


@pytest.mark.parametrize("has_last", [True, False])
@pytest.mark.parametrize(
    ("change", "retyped", "expected"),
    [
        ("", "", SAME),
        ("", "missing", REFUSED),
        ("remove", "", SAME),  # neither the data nor the weights are needed any more
        ("remove", "missing", NOT_COMPARED),
        ("change", "", SAME),  # the content is not part of the name
        ("copy", "copy", MOVED),  # of the same content
        ("move", "copy", MOVED),
        ("copy and change", "copy", REFUSED),
        ("move and change", "copy", REFUSED),
        ("copy and change train", "copy", REFUSED),
        ("copy and change names", "copy", REFUSED),
        ("link", "copy", MOVED),
    ],
)
@pytest.mark.parametrize(
    ("name", "typed"),
    [
        ("weights", "best.pt"),  # a name
        ("weights", "ckpt/best.pt"),  # a path
        ("teacher", "best.pt"),
        ("model", "my.yaml"),
        ("data", "set"),  # a folder
        ("data", "set/"),
        ("data", "set/data.yaml"),
    ],
)
def test_a_command_means_the_file_of_the_run(here, name, typed, change, retyped, expected, has_last):
    plan = plan_of(**{name: typed})
    assert isinstance(plan, NewRun)
    end_run(plan.settings, has_last=has_last)
    path = here / "set" if name == "data" else here / typed
    copy = here / "copies" / path.name
    copy.parent.mkdir()
    change_disk(change, path, copy)
    values = {"": typed, "copy": str(copy), "missing": f"missing/{path.name}"}
    assert outcome_of(name, values[retyped]) == expected


@pytest.mark.parametrize("has_last", [True, False])
@pytest.mark.parametrize(("name", "typed"), [("weights", "best.pt"), ("teacher", "best.pt"), ("model", "my.yaml")])
def test_a_file_that_has_changed_in_its_place_is_named(here, name, typed, has_last):
    """It may have no effect, or be refused as the teacher of more epochs."""
    end_run(plan_of(**{name: typed}).settings, has_last=has_last)
    assert not any("has changed" in message for message in plan_of(**{name: typed}).startup_messages)
    (here / typed).write_text("other content")
    (line,) = [line for line in plan_of(**{name: typed}).startup_messages if "has changed" in line]
    assert line == (
        f"--{name} {here / typed}: has changed since the run began; to use the file as it is now, start a new run with "
        "another --name"
    )


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_file_that_cannot_be_read_is_named(here, monkeypatch, is_resumed):
    def refuse(path: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    if is_resumed:
        begin_run(plan_of(teacher="best.pt").settings)
    for module in (compare_files, resolve_paths):
        monkeypatch.setattr(module, "sha256_of", refuse)
    with pytest.raises(UserError, match=f"^--teacher {here}/ckpt/best.pt: cannot be read \\(permission denied\\)$"):
        plan_of(teacher="ckpt/best.pt")


def test_a_file_that_has_moved_is_hashed_once(here, monkeypatch):
    end_run(plan_of(weights="best.pt").settings, has_last=True)
    (here / "best.pt").rename(here / "moved.pt")
    hashed: list[Path] = []
    for module in (compare_files, resolve_paths):
        monkeypatch.setattr(module, "sha256_of", lambda path: hashed.append(path) or sha256_of(path))
    assert outcome_of("weights", "moved.pt") == MOVED
    assert hashed == [here / "moved.pt"]


@pytest.mark.parametrize("has_last", [True, False])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("move", ""),
        ("move and change", "its labels or the sizes of its images differ"),
        ("copy and change train", "its labels or the sizes of its images differ"),
        ("copy and change names", "its classes differ"),
        ("", "no such file; known by name: "),
    ],
)
@pytest.mark.parametrize("keep_old", [False, True])
def test_a_data_set_that_has_moved_is_compared_by_its_labels(here, capsys, keep_old, change, reason, has_last):
    """With ``--keep-old``, the classes of the run are those of its teacher, and those of the data set."""
    flags: dict[str, Any] = {"weights": "best.pt", "keep_old": True} if keep_old else {}
    end_run(plan_of(data="set", **flags).settings, has_last=has_last)
    copy = here / "copies/set"
    copy.parent.mkdir()
    change_disk(change, here / "set", copy)
    if reason:
        with pytest.raises(UserError, match=rf"has ended, with '.*/set/data.yaml' \({reason}.*\); start a new run"):
            plan_of(data=str(copy), **flags)
        return
    plan = plan_of(data=str(copy), **flags)
    assert isinstance(plan, EndedRun)
    configure_logging(True)
    line = f"--data {copy / 'data.yaml'}: has the classes, image sizes and labels of the run"
    assert line in capsys.readouterr().out.splitlines()


def test_a_folder_keeps_what_it_meant(here):
    """A YAML that is put into the folder of a data set later is another data set."""
    (here / "set/data.yaml").rename(here / "set/first.yaml")
    plan = plan_of(data="set")
    end_run(plan.settings, has_last=True)
    assert plan.settings.config.data == str(here / "set/first.yaml")
    for later in ("data.yaml", "second.yaml"):
        shutil.copy(here / "set/first.yaml", here / "set" / later)
        assert outcome_of("data", "set") == SAME
        (here / "set" / later).unlink()


@pytest.mark.parametrize("has_last", [True, False])
def test_a_yaml_that_takes_the_place_of_the_one_of_the_run_is_compared_by_its_labels(here, has_last):
    """The same command names a folder, which has another YAML now."""
    end_run(plan_of(data="set").settings, has_last=has_last)
    (here / "set/data.yaml").rename(here / "set/other.yaml")
    assert outcome_of("data", "set") == MOVED
    (here / "set/labels/val/000.txt").write_text("0 0.5 0.5 0.25 0.25\n")
    with pytest.raises(UserError, match=r"has ended, .* differ"):
        plan_of(data="set")


@pytest.mark.parametrize("has_last", [True, False])
def test_a_file_that_has_changed_is_named_if_the_command_links_to_it(here, has_last):
    end_run(plan_of(weights="best.pt").settings, has_last=has_last)
    (here / "link.pt").symlink_to("best.pt")
    assert outcome_of("weights", "link.pt") == MOVED
    (here / "best.pt").write_text("other content")
    plan = plan_of(weights="link.pt")
    assert plan.settings.config.weights == str(here / "best.pt")
    (line,) = [line for line in plan.startup_messages if "has changed" in line]
    assert line.startswith(f"--weights {here / 'link.pt'}: has changed since the run began; ")


def test_a_folder_is_not_the_built_in_data_set_of_its_name(here):
    end_run(plan_of(data="demo").settings, has_last=True)
    (here / "demo").mkdir()
    assert outcome_of("data", "demo") == SAME
    assert outcome_of("data", str(here / "demo")) == REFUSED


def test_each_machine_reads_the_files_of_a_new_run_from_its_own_folders(here, monkeypatch):
    """Rank 0 plans a run, but does not choose the paths of the others."""
    begun = plan_of(data="set", weights="~/best.pt")
    (here / "node1").mkdir()
    monkeypatch.chdir(here / "node1")
    monkeypatch.setenv("HOME", str(here / "node1"))
    monkeypatch.setattr(plan_module, "result_of_main", lambda ctx, decide: begun)
    config = plan_of(data="set", weights="~/best.pt").settings.config
    assert (config.data, config.weights) == (str(here / "node1/set"), str(here / "node1/best.pt"))


@pytest.mark.parametrize(
    ("flags", "folder"),
    [
        ({"data": "set", "weights": "~/best.pt"}, "node1"),  # torchrun has restarted the command
        ({}, ""),  # --resume alone
        ({"data": "set/data.yaml"}, "node1"),
    ],
)
def test_each_machine_finds_the_files_that_are_named_again_in_its_own_folders(here, monkeypatch, flags, folder):
    monkeypatch.setenv("HOME", str(here))
    begin_run(plan_of(data="set", weights="~/best.pt").settings)
    plan = plan_of(**flags)
    assert isinstance(plan, ContinuedRun)
    shutil.copytree(here / "set", here / "node1/set")
    monkeypatch.chdir(here / "node1")
    monkeypatch.setenv("HOME", str(here / "node1"))
    monkeypatch.setattr(plan_module, "result_of_main", lambda ctx, decide: plan)
    config = plan_of(**flags).settings.config
    own = here / folder
    names_weights = "weights" in flags
    assert config.weights == str((own if names_weights else here) / "best.pt")
    assert config.data == str(own / "set/data.yaml")


def test_a_path_that_rank_0_has_not_taken_from_the_command_is_that_of_all_ranks(here, monkeypatch):
    """A YAML that was put into the folder later is another data set."""
    (here / "set/data.yaml").rename(here / "set/first.yaml")
    begin_run(plan_of(data="set").settings)
    shutil.copy(here / "set/first.yaml", here / "set/data.yaml")
    assert plan_of(data="set").settings.config.data == str(here / "set/first.yaml")
