"""The order in which a disk lists the entries of a folder, which differs between copies, does not matter."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from data.source.dataset_yaml import load_dataset_spec
from data.source.files import list_split
from data.source.walk import access_problem, walk
from tests.data.source.labeled_folder import Folder
from tests.helpers.index_fingerprint import index_fingerprint


@pytest.fixture
def spec(folder: Folder):
    """A data set with two findings of each kind in its image folders, and two links to one folder."""
    folder.write()
    images = folder.root / "images/train"
    (folder.root / "outside").mkdir()
    for name in "xy":
        (images / name).mkdir()
        (images / name / f"{name}.svg").write_text("<svg/>")
        (images / f".{name}.jpg").write_bytes(b"hidden")
        (images / f"broken_{name}.png").symlink_to("/nowhere")
        (images / f"link_{name}").symlink_to(folder.root / "outside")
    (folder.root / "outside" / "z.svg").write_text("<svg/>")
    return load_dataset_spec(folder.yaml())


def list_entries_in_order(monkeypatch: pytest.MonkeyPatch, *, reverse: bool) -> None:
    """Lets the disk list all entries in the order of their names, or in the reverse order."""
    scandir: Callable = os.scandir

    @contextlib.contextmanager
    def ordered(path: str) -> Iterator[Iterator[os.DirEntry]]:
        with scandir(path) as entries:
            yield iter(sorted(entries, key=lambda entry: entry.name, reverse=reverse))

    monkeypatch.setattr(os, "scandir", ordered)


def test_copies_of_a_data_set_have_the_same_findings_and_index_cache(spec, monkeypatch):
    results = []
    for reverse in (False, True):
        with monkeypatch.context() as patch:
            list_entries_in_order(patch, reverse=reverse)
            results.append((list_split(spec, "train").findings, index_fingerprint(spec)))
    assert len(results[0][0]) == 7
    assert results[0] == results[1]


def test_folders_are_visited_in_the_order_of_their_names(tmp_path, monkeypatch):
    for name in ("b/d", "b/c", "a"):
        (tmp_path / name).mkdir(parents=True)
    list_entries_in_order(monkeypatch, reverse=True)
    visited = [Path(visit.path).relative_to(tmp_path).as_posix() for visit in walk(tmp_path)]
    assert visited == [".", "a", "b", "b/c", "b/d"]


def test_the_reason_why_nothing_can_be_read_is_a_broken_link_at_or_above_a_path(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "broken").symlink_to("gone")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    for path in ("folder", "link", "link/missing", "missing/deep", tmp_path / "missing"):
        assert access_problem(path) == ""
    for path in ("broken", "broken/deep", tmp_path / "loop", "loop/deep"):
        assert access_problem(path) == "a broken link"
