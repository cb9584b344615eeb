"""Files that are opened at names that another user could have taken."""

from __future__ import annotations

import os
import stat
import threading

import pytest

from tests.helpers.hostile_files import TAKEN, take_name
from utils.files.safe_io import make_own_folder, open_direct, open_own

REASONS = {"pipe": "is a pipe or device", "link": "is a symbolic link", "folder": "is a folder"}


@pytest.mark.parametrize("mode", ["r", "a", "w", "r+"])
@pytest.mark.parametrize("kind", [kind for kind in TAKEN if kind != "bytes"])
def test_what_is_not_our_file_is_refused_at_once(tmp_path, kind, mode):
    path = tmp_path / "cache"
    take_name(path, kind, 9)
    if kind == "another user's":
        open(path, "a", opener=open_direct).close()
    opener = open_own if kind == "another user's" else open_direct
    with pytest.raises(PermissionError, match=REASONS.get(kind, r"belongs to another user \(uid 65534\)")) as refused:
        open(path, mode, opener=opener)  # noqa: SIM115
    assert refused.value.filename == str(path)
    if kind == "link":
        assert (tmp_path / "target").stat().st_size == 9


def test_a_pipe_with_a_process_at_its_other_end_is_refused_too(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = threading.Thread(target=lambda: (tmp_path / "pipe").read_bytes())
    reader.start()
    while reader.is_alive():
        with pytest.raises(PermissionError, match="is a pipe or device"):
            open(tmp_path / "pipe", "ab", opener=open_direct)  # noqa: SIM115


def test_own_files_are_opened_and_created_with_the_usual_permissions(tmp_path):
    for name, opener in (("ours", open_own), ("plain", None)):
        with open(tmp_path / name, "ab", opener=opener) as file:
            file.write(b"x")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ours", "plain")]
    assert modes[0] == modes[1]
    with open(tmp_path / "ours", "rb", opener=open_own) as file:
        assert file.read() == b"x"
        assert not os.get_inheritable(file.fileno())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_the_owner_of_the_folder_is_trusted(tmp_path):
    """A network file system may show another owner for all files that root creates."""
    folder = tmp_path / "folder"
    folder.mkdir()
    take_name(folder / "file", "another user's")
    os.chown(folder, 65534, 65534)
    os.close(open_own(folder / "file"))
    os.chown(folder, 65533, 65533)
    with pytest.raises(PermissionError, match="belongs to another user"):
        open_own(folder / "file")


@pytest.mark.parametrize("kind", ["bytes", "link", "another user's"])
def test_a_folder_that_is_not_ours_is_refused(tmp_path, kind):
    path = tmp_path / "folder"
    make_own_folder(path)
    make_own_folder(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    path.rmdir()
    if kind == "another user's":
        take_name(tmp_path / "file", kind)
        path.mkdir()
        os.chown(path, 65534, 65534)
    else:
        take_name(path, kind)
    with pytest.raises(OSError, match=r"is not a folder|belongs to another user") as refused:
        make_own_folder(path)
    assert refused.value.filename == str(path)
