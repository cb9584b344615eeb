"""Folders in which files are made before they get their names, and what else may be under these names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers.messages import refused
from tests.helpers.repository import ROOT
from utils.errors import UserError
from utils.files.new_folder import check_run_dir, increment_path
from utils.files.temporary_folder import creating_folder, replace_path, temporary_folder

HOLD = """
import sys, time
from utils.files.temporary_folder import temporary_folder
with temporary_folder(sys.argv[1]) as folder:
    (folder / "half").write_text("half a file")
    print(folder, flush=True)
    time.sleep(60)
"""


def test_folders_of_killed_processes_are_removed_and_those_of_other_programs_stay(tmp_path: Path):
    target = tmp_path / "a[1].onnx"
    others = [".a[1].onnx.work.tmp", ".a[1].onnx.0123456789abcdef.old.tmp"]
    for name in others:
        (tmp_path / name).mkdir()
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
        assert {*os.listdir(tmp_path)} == {folder.name, *others}
        assert folder.stat().st_mode & 0o777 == 0o700  # other users neither read nor write in it
    assert {*os.listdir(tmp_path)} == {*others}


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
    folder.mkdir()
    (folder / "file").write_text("old")
    for target in (link, folder):
        with temporary_folder(target) as temporary:
            (temporary / "new").mkdir()
            (temporary / "new" / "file").touch()
            replace_path(temporary / "new", target)
        assert not target.is_symlink()
        assert os.listdir(target) == ["file"]
        assert not (target / "file").read_text()
    assert os.listdir(kept) == ["mine"]
    with temporary_folder(kept) as temporary:
        (temporary / "new").touch()
        with refused("kept: a folder of this name is in the way of a file; rename or remove it"):
            replace_path(temporary / "new", kept)
    with temporary_folder(kept) as temporary:
        (temporary / "new").mkdir()
        with refused("kept/mine: is not written by this command, which replaces the folder ..."):
            replace_path(temporary / "new", kept)
    assert os.listdir(kept) == ["mine"]
    assert sorted(os.listdir(tmp_path)) == ["folder", "kept", "link"]


def test_run_folders_count_up_also_when_started_together(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: increment_path(tmp_path / "runs", "v1.5"), range(40)))
    assert {folder.name for folder in made} == {"v1.5", *(f"v1.5{number}" for number in range(2, 41))}
    assert increment_path(tmp_path / "runs", "v1.5", exist_ok=True) == tmp_path / "runs" / "v1.5"


def test_a_folder_that_cannot_be_made_is_a_user_error(tmp_path):
    """The check before makes nothing."""
    (tmp_path / "runs").write_text("")
    with refused("runs: is not a folder; choose another folder"):
        check_run_dir(tmp_path / "runs", "exp")
    with refused("exp: a file or a link with this name exists; choose another --project or --name"):
        increment_path(tmp_path / "runs", "exp")
    for refuses in (check_run_dir, increment_path):
        with refused("runs: a file or a link with this name exists; choose another --project or --name"):
            refuses(tmp_path, "runs", exist_ok=True)
    check_run_dir(tmp_path / "absent", "../exp")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
