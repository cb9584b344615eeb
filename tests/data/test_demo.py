"""The data set ``demo``, which is rendered into the cache folder."""

from __future__ import annotations

from pathlib import Path

from data import demo
from data.demo import ensure_demo
from tests.data.data_set import Counts, counts, load, open_set, refusal

SMALL = {"train_images": 6, "val_images": 3, "size": 128}


def content(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_the_demo_set_is_clean_and_the_same_bytes_again(tmp_path, monkeypatch):
    data = ensure_demo(tmp_path / "set", **SMALL)
    index = load(data)
    assert counts(index) == Counts(6, len(index.classes))
    assert index.image_hw.tolist() == [[128, 128]] * 6
    assert set(index.classes.tolist()) == set(range(len(index.names)))
    assert len(index.report.findings) == 0
    assert content(ensure_demo(tmp_path / "again", **SMALL).parent) == content(data.parent)
    before = (tmp_path / "set/images/train/00000.jpg").stat().st_mtime_ns
    ensure_demo(tmp_path / "set", **SMALL)
    assert (tmp_path / "set/images/train/00000.jpg").stat().st_mtime_ns == before
    monkeypatch.setattr(demo, "VERSION", demo.VERSION + 1)
    ensure_demo(tmp_path / "set", **SMALL)
    assert (tmp_path / "set/images/train/00000.jpg").stat().st_mtime_ns != before


def test_demo_is_rendered_into_the_cache_folder_and_a_folder_of_the_user_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("data.open.ensure_demo", lambda root: ensure_demo(root, **SMALL), raising=False)
    monkeypatch.setattr(demo, "ensure_demo", lambda root, make=ensure_demo: make(root, **SMALL))
    spec = open_set("demo", ["train"], cache_dir=str(tmp_path / "cache"))
    assert spec.root.is_relative_to(tmp_path / "cache")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("mine")
    assert str(tmp_path / "mine") in refusal(lambda: ensure_demo(tmp_path / "mine", **SMALL))
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
