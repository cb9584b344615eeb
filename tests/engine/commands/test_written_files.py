"""Files that a command lists are removed by the next one in its folder, and no others."""

import os

import pytest

from engine.commands.written_files import LIST_NAME, WrittenFiles, listing_written, remove_written


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_listed_files_are_removed_with_the_folders_that_they_leave_empty(tmp_path):
    written = WrittenFiles(tmp_path)
    names = ["a.jpg", "labels/a.txt", "crops/cat/a_0.jpg", "new\nline.txt", "caf\udce9.txt"]
    for name in [*names, "a.jpg", "never-written.jpg"]:
        path = written.add(tmp_path / name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if name in names:
            path.touch()
    (tmp_path / "labels" / "mine.txt").touch()
    assert remove_written(tmp_path) == len(names)
    assert files_in(tmp_path) == ["labels/mine.txt"]
    assert not (tmp_path / "crops").exists()
    assert remove_written(tmp_path) == 0


@pytest.mark.parametrize("name", ["../precious", "/precious", "link/precious", "folder", ".."])
def test_a_list_removes_nothing_elsewhere(tmp_path, name):
    """The folder may contain what another user has put there."""
    home = tmp_path / "run"
    (home / "folder").mkdir(parents=True)
    (tmp_path / "precious").touch()
    (home / "link").symlink_to(tmp_path)
    name = str(tmp_path / "precious") if name == "/precious" else name
    (home / LIST_NAME).write_bytes(os.fsencode(name) + b"\0")
    assert remove_written(home) == 0
    assert (tmp_path / "precious").exists()
    assert (home / "folder").is_dir()


def test_a_link_in_place_of_the_list_or_of_a_file_is_not_followed(tmp_path):
    home = tmp_path / "run"
    home.mkdir()
    (tmp_path / "precious").write_bytes(b"a\0")
    (home / "a").touch()
    (home / LIST_NAME).symlink_to(tmp_path / "precious")
    assert remove_written(home) == 0
    with pytest.raises(PermissionError):
        WrittenFiles(home).add(home / "b")
    (home / LIST_NAME).unlink()
    (home / "a").unlink()
    (home / "a").symlink_to(tmp_path / "precious")
    WrittenFiles(home).add(home / "a")
    remove_written(home)
    assert (tmp_path / "precious").read_bytes() == b"a\0"


def test_new_and_replaced_files_of_a_block_are_listed(tmp_path):
    for name in ("kept", "replaced"):
        (tmp_path / name).write_text("before")
    with listing_written(tmp_path):
        (tmp_path / "new").touch()
        (tmp_path / "replaced").unlink()
        (tmp_path / "replaced").write_text("after")
    remove_written(tmp_path)
    assert files_in(tmp_path) == ["kept"]
