"""The folder of a run: made, locked, written to, and removed when the run fails early."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
import yaml

from engine.assembly.process_setup import prepare_process
from engine.checkpoint.newest_run import newest_run_id
from engine.checkpoint.progress import Progress
from engine.run.folder import LOCK_NAME, claim_folder, lock_folder
from engine.run.launch_record import LAUNCHERS, find_run_of_launchers, record_launch
from engine.run.run import NewRun, RunSettings, TrainingRun
from tests.helpers.messages import refused
from tests.helpers.run_checkpoints import name_newest_run, save_checkpoint
from utils.config.settings import AUTO, Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.locks import FileLock

CPU = DistributedContext.single("cpu")


@pytest.fixture(autouse=True)
def _restored_kernels() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


def claim(stack: ExitStack, progress: Progress | None = None, **settings) -> TrainingRun:
    run_settings = RunSettings(TrainConfig(**settings), Hyperparameters())
    plan = NewRun(settings=run_settings, launchers=[])
    return claim_folder(CPU, plan, run_settings, stack, progress or Progress())


def claim_again(folder: Path, lr0: float = 0.01) -> TrainingRun:
    """Starts a run anew in ``folder``, where it has begun before (``--resume auto``)."""
    config = TrainConfig(project=str(folder.parent), name=folder.name, exist_ok=True)
    settings = RunSettings(config, Hyperparameters(lr0=lr0))
    plan = NewRun(settings=settings, launchers=[], folder=folder)
    with ExitStack() as stack:
        return claim_folder(CPU, plan, settings, stack, Progress())


def fail_after(action: Callable[..., object], **settings) -> None:
    """Closes the stack that ``action`` fills by an error."""
    with suppress(RuntimeError), ExitStack() as stack:
        action(stack, **settings)
        raise RuntimeError


def test_a_failed_run_removes_its_folder_while_holding_the_lock(tmp_path, monkeypatch):
    """Otherwise another start could use the folder and lose it."""
    lock = tmp_path / "new" / "exp" / LOCK_NAME
    remove = shutil.rmtree
    holders = []
    monkeypatch.setattr(shutil, "rmtree", lambda *a, **k: (holders.append(FileLock(lock).acquire()), remove(*a, **k)))
    fail_after(claim, project=str(tmp_path / "new"))
    assert holders[0].startswith(f"process {os.getpid()} ")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("kept", ["last.pt", "stall_rank0.txt"])
def test_a_failed_run_that_has_saved_something_keeps_its_folder(tmp_path, kept):
    fail_after(lambda stack, **settings: (claim(stack, **settings).folder / kept).touch(), project=str(tmp_path))
    assert (tmp_path / "exp" / kept).exists()


def test_a_failed_run_that_has_taken_a_step_keeps_its_log(tmp_path):
    """After hours within its first epoch, nothing else is left of the run."""
    progress = Progress()

    def take_step(stack: ExitStack, **settings) -> None:
        claim(stack, progress, **settings)
        progress.count_step(micro_batches=1)

    fail_after(take_step, project=str(tmp_path))
    assert (tmp_path / "exp" / "train.log").is_file()


def test_a_failed_run_does_not_remove_a_folder_that_was_there(tmp_path):
    (tmp_path / "exp").mkdir()
    fail_after(claim, project=str(tmp_path), exist_ok=True)
    assert (tmp_path / "exp").is_dir()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_run_in_a_read_only_folder_is_to_be_copied(tmp_path, monkeypatch, number):
    """--project, which other commands are advised to change, has no effect on a run that continues."""

    def refuse(*_: object) -> str:
        raise OSError(number, os.strerror(number), str(tmp_path / LOCK_NAME))

    monkeypatch.setattr(FileLock, "acquire", refuse)
    copied = re.escape(f"copy it, and continue the copy: cp -r {tmp_path} COPY, then --resume COPY/last.pt")
    with ExitStack() as stack, pytest.raises(UserError, match=copied):
        lock_folder(tmp_path, stack)


def test_unfinished_files_of_a_killed_process_are_removed(tmp_path):
    (tmp_path / "exp").mkdir()
    for name in (".last.pt.0123abcd.tmp", ".settings.yaml.0123abcd.tmp", ".results.csv.0123abcd.tmp"):
        (tmp_path / "exp" / name).touch()
    with ExitStack() as stack:
        claim(stack, project=str(tmp_path), exist_ok=True)
        assert not list((tmp_path / "exp").glob(".*.tmp"))


@pytest.mark.parametrize("name", ["train.log", ".lock"])
def test_nothing_is_written_where_a_symbolic_link_leads(tmp_path, name):
    """With --exist-ok, the folder may contain what another user has put there."""
    (tmp_path / "target").write_text("precious")
    (tmp_path / name).symlink_to(tmp_path / "target")
    with pytest.raises(PermissionError, match="symbolic link"), ExitStack() as stack:
        claim(stack, project=str(tmp_path.parent), name=tmp_path.name, exist_ok=True)
    assert (tmp_path / "target").read_text() == "precious"


@pytest.mark.parametrize(
    ("former", "data", "is_said"),
    [("old.yaml", "new.yaml", True), ("new.yaml", "./new.yaml", False), ("", "new.yaml", False)],
)
def test_a_run_that_replaces_one_on_other_data_logs_it(tmp_path, capsys, former, data, is_said):
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump({"config": {"data": former}}))
    prepare_process(CPU, RunSettings(TrainConfig(), Hyperparameters()))
    with ExitStack() as stack:
        claim(stack, project=str(tmp_path.parent), name=tmp_path.name, exist_ok=True, data=data)
    line = f"warning: {tmp_path}: has a run on other data, old.yaml, whose files stay until this run replaces them"
    assert (line in capsys.readouterr().out) == is_said


def test_a_run_that_another_start_has_trained_meanwhile_is_not_begun_again(tmp_path):
    """``--resume auto`` found no folder; a requeued job may have been scanning the data at the same time."""
    (tmp_path / "exp").mkdir()
    name_newest_run(tmp_path / "exp", "first")
    before = save_checkpoint(tmp_path / "exp" / "last.pt", Progress(epoch=3), run_id="first")
    line = ".../exp: another start has trained here meanwhile; repeat the command to continue"
    with refused(line), ExitStack() as stack:
        claim(stack, project=str(tmp_path), resume=AUTO, exist_ok=True)
    assert newest_run_id(tmp_path / "exp") == before.description.run_id


def test_settings_are_stored_with_the_run(tmp_path):
    with ExitStack() as stack:
        prepare_process(CPU, RunSettings(TrainConfig(), Hyperparameters()))
        run = claim(stack, project=str(tmp_path), rect=True)
    stored = yaml.safe_load((run.folder / "settings.yaml").read_text())
    assert (stored["config"]["rect"], stored["hyp"]["box"]) == (True, 7.5)


def test_a_restart_finds_its_own_run_only(tmp_path: Path):
    """One of the launchers of the earlier start is enough, because nodes come and go."""
    here = TrainConfig(project=str(tmp_path / "runs"))
    for name in ("exp", "exp2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        name_newest_run(tmp_path / "runs" / name, name)
    assert find_run_of_launchers(here, ["job node0 1"]) is None
    record_launch(tmp_path / "runs" / "exp", "exp", ["job node0 1", "job node1 2"])
    record_launch(tmp_path / "runs" / "exp2", "exp2", ["", ""])  # without torchrun nothing is stored
    exp = tmp_path / "runs" / "exp"
    (tmp_path / "latest.pt").symlink_to(exp / "last.pt")
    named = [exp, exp / "last.pt", tmp_path / "latest.pt"]
    for project, resume in (("runs", None), *(("elsewhere", path) for path in named)):
        config = TrainConfig(project=str(tmp_path / project), resume=resume and str(resume))
        assert find_run_of_launchers(config, ["job node1 2", "job node2 9"]) == exp
    (tmp_path / "runs" / "a" / "b2").mkdir(parents=True)
    name_newest_run(tmp_path / "runs" / "a" / "b2", "b2")
    record_launch(tmp_path / "runs" / "a" / "b2", "b2", ["job node3 1"])
    assert (
        find_run_of_launchers(dataclasses.replace(here, name="a/b"), ["job node3 1"]) == tmp_path / "runs" / "a" / "b2"
    )
    assert find_run_of_launchers(here, ["job node0 7"]) is None
    assert find_run_of_launchers(here, [""]) is None
    name_newest_run(exp, "started without torchrun")
    assert find_run_of_launchers(here, ["job node0 1"]) is None


def test_a_damaged_note_of_launchers_means_nothing(tmp_path: Path):
    """The note is ours, so no start of a run may fail because of it."""
    folder = tmp_path / "exp"
    folder.mkdir()
    (folder / LAUNCHERS).write_bytes(b"\xff\xfe\x00")
    assert find_run_of_launchers(TrainConfig(project=str(tmp_path)), ["job node0 1"]) is None


@pytest.mark.parametrize(
    ("saved_by", "lr0", "is_kept"),
    [("", 0.01, True), ("", 0.02, False), ("itself", 0.01, False), ("other", 0.01, True)],
)
def test_a_run_that_begins_again_keeps_its_id_unless_it_is_another_one(tmp_path, saved_by, lr0, is_kept):
    """Files of the same id would count as its own: its best.pt, and the epochs that a tracker has."""
    (tmp_path / "exp").mkdir()
    first = claim_again(tmp_path / "exp")
    if saved_by:
        run_id = first.run_id if saved_by == "itself" else saved_by
        save_checkpoint(first.folder / "best.pt", Progress(epoch=9), run_id=run_id)
    again = claim_again(first.folder, lr0=lr0)
    assert (again.run_id == first.run_id) == is_kept
