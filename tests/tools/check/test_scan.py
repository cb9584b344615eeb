"""Issues that the scan of a split finds, read as training reads it."""

from __future__ import annotations

import numpy as np
import pytest
import yaml

from data.dataset.yaml_file import load_dataset_spec
from data.index.index import IndexSettings
from data.index.load import load_index
from data.labels.findings import FITTED
from tests.helpers.three_formats import write_three_formats
from tests.helpers.tiny import write_dataset
from tools.check.boxes import box_pairs
from tools.check.dataset_check import scan_issues, scan_split
from tools.check.issue_kinds import DOUBLED
from tools.shard.write_shards import write_set

NAMES = ["cat", "dog", "DontCare"]
# Class, x1, y1, x2, y2 in images of 160 x 128: a doubled box, one that exceeds its image, and a region to ignore.
OBJECTS = [(0, 16, 16, 80, 64), (1, 16, 16, 80, 65), (1, 120, 16, 168, 64), (2, 0, 80, 160, 128)]


@pytest.mark.parametrize("annotations", [{}, {"annotations": "voc"}, {"annotations": "instances.json"}])
def test_merged_and_ignored_classes_are_read_as_by_training(tmp_path, annotations):
    sizes = dict.fromkeys(("0.png", "1.png"), (128, 160))
    write_three_formats(tmp_path, NAMES, sizes, {"0.png": OBJECTS, "1.png": []})
    content = {"train": "images/train", "names": NAMES, "classes": {"dog": "cat"}, "ignore": ["DontCare"]}
    (tmp_path / "data.yaml").write_text(yaml.safe_dump(content | annotations))
    spec = load_dataset_spec(tmp_path / "data.yaml")
    split = scan_split(spec, "train", workers=0)
    trained = load_index(spec, "train", IndexSettings(cache_dir=str(tmp_path / "cache"), progress=False))
    assert split.index.names == trained.names == ("cat",)
    assert split.index.counts() == trained.counts()
    for array in ("offsets", "boxes_xywh_px", "classes", "crowd"):
        np.testing.assert_array_equal(getattr(split.index, array), getattr(trained, array))
    (clipped,) = [issue for issue in scan_issues(split) if issue.boxes]
    assert (clipped.kind, clipped.boxes[0].class_name, clipped.boxes[0].class_id) == (FITTED, "cat", 0)
    doubled = next(issue for issue in box_pairs(split) if issue.images == ("images/train/0.png",))
    assert (doubled.kind, [box.class_name for box in doubled.boxes]) == (DOUBLED, ["cat", "cat"])
    where = split.parts[0].source.where(0, int(trained.row_number[1]))
    assert doubled.where == where


def test_joined_sets_are_checked_with_the_places_in_each(tmp_path):
    for name in "ab":
        write_dataset(tmp_path / name, train=4, val=3)
    (tmp_path / "b" / "data.yaml").write_text("train: images/train\nnames: [dark, glow]\n")
    (tmp_path / "b/labels/train/001.txt").write_text("1 0.5 0.5 0.25 0.25\n0 0.9 0.5 0.4 0.2\n1 0.5 0.5 0.25 0.251\n")
    (tmp_path / "both.yaml").write_text("train: [a/data.yaml, b/data.yaml]\n")
    spec = load_dataset_spec(tmp_path / "both.yaml")
    split = scan_split(spec, "train", workers=0)
    trained = load_index(spec, "train", IndexSettings(cache_dir=str(tmp_path / "cache"), progress=False))
    np.testing.assert_array_equal(split.index.boxes_xywh_px, trained.boxes_xywh_px)
    assert list(trained.report.findings) == list(split.index.report.findings)
    (clipped,) = scan_issues(split)
    assert (clipped.where, clipped.images) == ("b/labels/train/001.txt:2", ("b/images/train/001.png",))
    assert clipped.boxes[0].class_name == "dark"
    assert trained.report.findings[0].where == "b/labels/train/001.txt:2"
    doubled = box_pairs(split)[-1]
    assert [(box.where, box.class_name) for box in doubled.boxes] == [
        ("b/labels/train/001.txt:1", "glow"),
        ("b/labels/train/001.txt:3", "glow"),
    ]


@pytest.mark.parametrize("annotations", [{}, {"annotations": "instances.json"}])
def test_findings_of_shards_and_joined_sets_are_those_of_the_files(tmp_path, annotations):
    """Places have colons: those of annotations in COCO JSON, and file names as they are."""
    names = [f"a: {i}: b.png" for i in range(3)]
    objects = {name: [(0, 16, 16, 80, 64), (1, 120, 16, 168, 64)] for name in names}
    write_three_formats(tmp_path / "set", NAMES, dict.fromkeys(names, (128, 160)), objects)
    data = tmp_path / "set" / "data.yaml"
    data.write_text(yaml.safe_dump({"train": "images/train", "names": NAMES} | annotations))
    write_set(load_dataset_spec(data), tmp_path / "shards", 10**9, IndexSettings(cache_dir=str(tmp_path)))
    (tmp_path / "joined.yaml").write_text("train: [set/data.yaml]\n")

    files = scan_split(load_dataset_spec(data), "train", workers=0)
    shards = scan_split(load_dataset_spec(tmp_path / "shards/data.yaml"), "train", workers=0)
    joined = scan_split(load_dataset_spec(tmp_path / "joined.yaml"), "train", workers=0)
    expected = [(FITTED, issue.text, issue.where) for issue in scan_issues(files)]
    assert len(expected) == 3
    assert [(issue.kind, issue.text, issue.where) for issue in scan_issues(shards)] == expected
    places = [f"set/{where}" for _, _, where in expected]
    assert [finding.where for finding in joined.index.report.findings] == places
    assert str(joined.index.report.findings[0]) == f"{places[0]}: {FITTED}: {expected[0][1]}"
