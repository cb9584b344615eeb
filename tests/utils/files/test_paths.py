"""Paths mean what they mean for the kernel, and names relative to a folder lead back to their files."""

from __future__ import annotations

import os
from pathlib import Path

from tests.helpers.messages import refused
from utils.files.paths import check_new_path, is_inside


def test_what_is_inside_a_folder_is_found_behind_links(tmp_path):
    (tmp_path / "set/images").mkdir(parents=True)
    (tmp_path / "link").symlink_to("set")
    assert is_inside(tmp_path / "link/images/new", tmp_path / "set")
    assert is_inside(tmp_path / "set", tmp_path / "link")
    assert not is_inside(tmp_path / "settle", tmp_path / "set")


def test_an_output_is_refused_before_it_is_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("gone")
    monkeypatch.chdir(tmp_path)
    check_new_path(Path("new/deep/out"))
    for name in ("file", "link", "."):
        with refused(f"{name}: exists; remove it, or choose another name"):
            check_new_path(Path(name))
    for name in ("file/deep/out", "link/out"):
        with refused(f"{tmp_path / Path(name).parts[0]}: is not a folder; choose another folder"):
            check_new_path(Path(name))
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with refused(f"{tmp_path}: cannot be written; choose another folder"):
        check_new_path(Path("new/out"))
