"""A data set that joins others, of which each labels some of the classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from data.index.dataset_yaml import load_dataset_spec
from data.index.files import list_split
from data.index.index import load_index
from tests.helpers.tiny import write_dataset
from utils.errors import UserError


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """Set a labels light and dark; set b labels dark, as number 0, and glow."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in "ab":
        write_dataset(tmp_path / name, train=4, val=3)
    (tmp_path / "b" / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [dark, glow]\n")
    return tmp_path


def spec_of(root: Path, **more):
    parts = ["a/data.yaml", "b/data.yaml"]
    (root / "both.yaml").write_text(yaml.safe_dump({"train": parts, "val": parts, **more}))
    return load_dataset_spec(root / "both.yaml")


def test_classes_are_merged_by_name_and_others_ignored(root):
    spec = spec_of(root)
    assert spec.names == ("light", "dark", "glow")
    a, b, both = (load_index(s, "train", progress=False) for s in (
        load_dataset_spec(root / "a" / "data.yaml"), load_dataset_spec(root / "b" / "data.yaml"), spec))  # fmt: skip
    assert [both.path(i) for i in range(8)] == [a.path(i) for i in range(4)] + [b.path(i) for i in range(4)]
    truth = both.ground_truth()
    image = np.repeat(np.arange(8), np.diff(truth.offsets))
    np.testing.assert_array_equal(image[truth.crowd], np.arange(8))  # each image has one class that it does not label
    np.testing.assert_array_equal(truth.classes[truth.crowd], [2] * 4 + [0] * 4)
    np.testing.assert_array_equal(truth.boxes_xywh_px[truth.crowd], [[0, 0, 64, 64]] * 8)
    objects = ~truth.crowd
    np.testing.assert_array_equal(truth.classes[objects], np.r_[a.classes, b.classes + 1])
    np.testing.assert_array_equal(truth.boxes_xywh_px[objects], np.r_[a.boxes_xywh_px, b.boxes_xywh_px])
    assert both.report.totals["images"] == 8
    assert both.report.totals["boxes"] == len(a.classes) + len(b.classes)


def test_the_names_may_be_in_another_order_and_classes_chosen(root):
    spec = spec_of(root, names=["glow", "light", "dark", "other"])
    index = load_index(spec.use_classes(["light", "glow"]), "val", progress=False)
    assert index.names == ("glow", "light")
    truth = index.ground_truth()
    np.testing.assert_array_equal(truth.classes[truth.crowd].reshape(6, 1)[:, 0], [0] * 3 + [1] * 3)


def test_the_same_classes_need_no_regions(root):
    (root / "b" / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [dark, light]\n")
    assert not load_index(spec_of(root), "train", progress=False).crowd.any()


def test_a_fraction_and_a_fingerprint(root):
    spec = spec_of(root)
    half, whole = (load_index(spec, "train", progress=False, fraction=f) for f in (0.5, 1.0))
    assert len(half) == 4
    assert half.fingerprint != whole.fingerprint
    again = load_index(spec_of(root, names=["light", "dark", "glow", "more"]), "train", progress=False)
    assert again.fingerprint != whole.fingerprint


def test_held_out_images_are_those_of_the_whole(root):
    """As --val-fraction does."""
    spec = spec_of(root)
    whole = load_index(spec, "train", progress=False)
    chosen = {whole.paths[i] for i in (1, 5, 6)}
    parts = {split: load_index(spec.hold_out(chosen), split, progress=False) for split in ("train", "val")}
    assert set(parts["val"].paths) == chosen
    assert set(parts["train"].paths) == {*whole.paths} - chosen
    assert parts["val"].fingerprint != parts["train"].fingerprint


def test_what_does_not_join_says_so(root):
    with pytest.raises(UserError, match=r"'train' joins other data sets, which is for training and scoring; name one"):
        list_split(spec_of(root), "train")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"train": ["a/data.yaml", "images"]}, r"images: not a YAML of a data set; name YAMLs only"),
        ({"train": ["a/data.yaml", "c/data.yaml"]}, r"c/data.yaml: not a YAML of a data set"),
        ({"train": ["both.yaml"]}, r"both.yaml names other YAMLs itself"),
        ({"test": ["a/data.yaml"]}, r"data.yaml: has no 'test' split"),
        ({"names": ["light", "dark"]}, r"names: without 'glow', a class of a data set that it joins; add it"),
    ],
)
def test_mistakes_are_one_line(root, content, message):
    with pytest.raises(UserError, match=message):
        spec_of(root, **content)
