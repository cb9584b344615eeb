"""Folders in which files are made before they get their names, and what else may be under these names."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.messages import refused
from tests.helpers.repository import ROOT
from utils.config.settings import TrainConfig
from utils.config.settings_file import settings_file
from utils.errors import UserError
from utils.files.temporary_folder import creating_folder, program_temporary_folder, replace_path, temporary_folder
from utils.process.child import start_child

HOLD = """
import sys, time
from utils.files.temporary_folder import temporary_folder
with temporary_folder(sys.argv[1]) as folder:
    (folder / "half").write_text("half a file")
    print(folder, flush=True)
    time.sleep(60)
"""


def test_folders_of_killed_processes_are_removed(tmp_path: Path):
    target = tmp_path / "a[1].onnx"
    process = subprocess.Popen([sys.executable, "-c", HOLD, target], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with process:
        left = Path(process.stdout.readline().strip())
        with temporary_folder(target):
            assert (left / "half").is_file()  # its process is alive
        process.send_signal(signal.SIGKILL)
    assert left.is_dir()
    with temporary_folder(tmp_path / "b.onnx"):
        assert left.is_dir()  # of another name
    with temporary_folder(target) as folder:
        assert os.listdir(tmp_path) == [folder.name]
    assert not os.listdir(tmp_path)


def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(tmp_path: Path, monkeypatch):
    """Another process has found it unlocked. A name that only locked folders have would be left behind by a kill."""
    flock = fcntl.flock
    unlocked = []

    def remove_first(descriptor: int, flags: int) -> None:
        if not unlocked:
            unlocked.extend(tmp_path.iterdir())
            unlocked[0].rmdir()
        flock(descriptor, flags)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with temporary_folder(tmp_path / "a") as folder:
        assert folder.is_dir()
        assert folder not in unlocked


def test_folders_of_other_machines_stay(tmp_path: Path, monkeypatch):
    """They may see no locks of each other where they share /tmp. Names of pods differ in their last characters."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for machine in ("1", "2"):
        monkeypatch.setattr(os, "uname", lambda machine=machine: SimpleNamespace(nodename=f"{'pod-' * 15}{machine}"))
        with program_temporary_folder("settings") as folder:
            left = folder.with_name(f"{folder.name[:-20]}{'0' * 16}.tmp")
        left.mkdir()
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize("is_found", [True, False])
def test_a_system_without_a_folder_for_temporary_files_is_one_line(tmp_path: Path, monkeypatch, is_found: bool):
    """A container may have only read-only folders. It was an OSError, which lockstep.train promises not to raise."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    location = ""
    reason = "no usable temporary directory found in ..."
    if is_found:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
        location = f"{tmp_path}/none/...: "
        reason = "no such file or directory"
    line = f"{location}no temporary folder can be made ({reason}); set TMPDIR to another folder"
    with refused(line), settings_file(TrainConfig()):
        pass
    with refused(line), start_child(["true"]):
        pass


def test_folders_of_other_programs_stay(tmp_path: Path):
    others = [tmp_path / name for name in (".a.onnx.work.tmp", ".a.onnx.0123456789abcdef.old.tmp", ".a.onnx.tmp")]
    for folder in others:
        folder.mkdir()
        (folder / "mine").touch()
    with temporary_folder(tmp_path / "a.onnx"):
        pass
    assert all((folder / "mine").is_file() for folder in others)


def test_an_error_names_the_folder_that_the_user_knows(tmp_path: Path):
    with pytest.raises(FileNotFoundError) as error, temporary_folder(tmp_path / "gone" / "shards"):
        pass
    assert error.value.filename == str(tmp_path / "gone" / "shards")


@pytest.mark.parametrize("error", [UserError("refused"), KeyboardInterrupt()])
def test_a_new_folder_remains_only_if_it_is_used(tmp_path: Path, error: BaseException):
    def use(folder: Path, name: str = "") -> None:
        with creating_folder(folder):
            if name:
                (folder.parent / name).touch()
            raise error

    (tmp_path / "own").mkdir()
    with pytest.raises(type(error)):
        use(tmp_path / "own" / "a" / "b")
    assert os.listdir(tmp_path / "own") == []
    with pytest.raises(type(error)):
        use(tmp_path / "own" / "a" / "b", "file of another program")
    assert os.listdir(tmp_path / "own" / "a") == ["file of another program"]
    with pytest.raises(OSError, match="File name too long"), creating_folder(tmp_path / "half" / ("a" * 256)):
        pass
    assert not (tmp_path / "half").exists()
    with creating_folder(tmp_path / "used" / "a"):
        pass
    assert (tmp_path / "used" / "a").is_dir()


def test_links_and_folders_are_replaced_but_no_folder_by_a_file(tmp_path: Path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "mine").touch()
    link = tmp_path / "link"
    folder = tmp_path / "folder"
    link.symlink_to(kept)
    (folder / "old").mkdir(parents=True)
    for target in (link, folder):
        with temporary_folder(target) as temporary:
            (temporary / "new").mkdir()
            (temporary / "new" / "file").touch()
            replace_path(temporary / "new", target)
        assert not target.is_symlink()
        assert os.listdir(target) == ["file"]
    assert os.listdir(kept) == ["mine"]
    with temporary_folder(kept) as temporary:
        (temporary / "new").touch()
        with refused("kept: a folder of this name is in the way of a file; rename or remove it"):
            replace_path(temporary / "new", kept)
    assert os.listdir(kept) == ["mine"]
    assert sorted(os.listdir(tmp_path)) == ["folder", "kept", "link"]
