"""Issues of a scanned split, read as training reads it, its census, and the warning about small boxes."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.labels.findings import CLIPPED
from data.source.dataset_yaml import load_dataset_spec
from engine.issues.issue import CheckedSplit
from engine.issues.small_boxes import remedy_for_small_boxes, warn_of_small_boxes
from engine.report.census import take_census
from tests.helpers.editable_set import EditableSet
from tests.helpers.three_formats import write_three_formats
from tests.helpers.tiny import write_dataset
from tools.check.checks.box_pairs import MAX_PARTNERS, SAME_IOU, box_pairs
from tools.check.checks.scan import scan_dataset, scan_issues
from tools.check.issue_kinds import DOUBLED, TWO_CLASSES
from tools.convert.to_coco import convert
from tools.shard.write_shards import write_set
from utils.logger import get_logger

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
    (split,) = scan_dataset(spec, ("train",), workers=0)
    trained = load_index(spec, "train", IndexSettings(cache_dir=str(tmp_path / "cache"), progress=False))
    assert split.index.names == trained.names == ("cat",)
    assert split.index.report.totals == trained.report.totals
    for array in ("offsets", "boxes_xywh_px", "classes", "crowd"):
        np.testing.assert_array_equal(getattr(split.index, array), getattr(trained, array))
    (clipped,) = [issue for issue in scan_issues(split) if issue.boxes]
    assert (clipped.kind, clipped.boxes[0].class_name, clipped.boxes[0].class_id) == (CLIPPED, "cat", 0)
    doubled = next(issue for issue in box_pairs(split) if issue.images == ("images/train/0.png",))
    assert (doubled.kind, [box.class_name for box in doubled.boxes]) == (DOUBLED, ["cat", "cat"])
    where = split.parts[0].source.where(0, int(trained.row_number[1]))
    assert doubled.where == where


def many_boxes(folder: Path, kind: str, count: int) -> CheckedSplit:
    """A split of three images, the first with ``count`` boxes: copies of one another, a pile of one class with a single
    box of another, rows and cells of a table, or boxes all over the image."""
    data = EditableSet(folder)
    rng = np.random.default_rng(0)
    classes = rng.integers(0, 2, count)
    centers = rng.uniform(0.1, 0.9, (count, 2))
    sizes = rng.uniform(0.02, 0.1, (count, 2))
    if kind in ("copies", "one of another class"):
        centers = 0.5 + rng.normal(0, 0.01, (count, 2))
        sizes = 0.3 + rng.normal(0, 0.01, (count, 2))
    if kind == "one of another class":
        classes = np.arange(count) == count // 2
    elif kind == "rows":
        centers = np.stack([np.full(count, 0.5), np.linspace(0.1, 0.9, count)], 1)
        sizes = np.stack([np.full(count, 0.9), np.full(count, 0.8 / count)], 1)
    boxes = np.concatenate([classes[:, None], centers, sizes], 1)
    data.write("train/0", "".join(f"{int(c)} {x:.6f} {y:.6f} {w:.7f} {h:.7f}\n" for c, x, y, w, h in boxes))
    (split,) = scan_dataset(load_dataset_spec(data.yaml), ("train",), workers=0)
    return split


def iou_of(xyxy: np.ndarray) -> np.ndarray:
    """(n, n), of boxes (n, 4)."""
    sides = np.minimum(xyxy[:, None, 2:], xyxy[None, :, 2:]) - np.maximum(xyxy[:, None, :2], xyxy[None, :, :2])
    overlap = sides.clip(0).prod(2)
    areas = (xyxy[:, 2:] - xyxy[:, :2]).prod(1)
    return overlap / (areas[:, None] + areas[None] - overlap)


@pytest.mark.parametrize("comparisons", [1, 100])
def test_pairs_of_boxes_do_not_depend_on_how_many_are_compared_at_a_time(tmp_path, monkeypatch, comparisons):
    split = many_boxes(tmp_path / "set", "copies", 60)
    expected = box_pairs(split)
    monkeypatch.setattr("tools.check.checks.box_pairs.COMPARISONS", comparisons)
    assert box_pairs(split) == expected


@pytest.mark.parametrize("kind", ["copies", "one of another class", "rows", "all over"])
def test_every_box_that_repeats_an_earlier_one_is_listed(tmp_path, kind):
    """Each is listed with at most a few of its partners. The reference is a plain comparison of all pairs."""
    split = many_boxes(tmp_path / "set", kind, 300)
    first = slice(*split.index.offsets[:2])
    xywh = split.index.boxes_xywh_px[first]
    classes = split.index.classes[first]
    is_pair = np.triu(iou_of(np.concatenate([xywh[:, :2], xywh[:, :2] + xywh[:, 2:]], 1)) > SAME_IOU, 1)
    is_pair &= ~split.index.repeated[first][:, None] & ~split.index.repeated[first][None]
    same = classes[:, None] == classes[None]
    issues = [issue for issue in box_pairs(split) if issue.images == ("images/train/0.png",)]
    for issue_kind, expected in ((DOUBLED, is_pair & same), (TWO_CLASSES, is_pair & ~same)):
        found = np.zeros_like(expected)
        for issue in (issue for issue in issues if issue.kind == issue_kind):
            found[issue.boxes[0].number, issue.boxes[1].number] = True
        assert not (found & ~expected).any()
        np.testing.assert_array_equal(found.sum(0), expected.sum(0).clip(max=MAX_PARTNERS))
    assert (len(issues) > 100) == (kind in ("copies", "one of another class"))


@pytest.mark.parametrize(
    "kind",
    ["copies", "all over", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("one of another class", "rows"))],
)
def test_the_time_for_pairs_of_boxes_does_not_grow_with_their_square(tmp_path, kind):
    """10,000 boxes of one image, of which all may overlap: there are 50 million pairs."""
    split = many_boxes(tmp_path / "set", kind, 10_000)
    started = time.process_time()
    issues = box_pairs(split)
    assert len(issues) <= 2 * MAX_PARTNERS * 10_010
    assert time.process_time() - started < 20


def test_regions_that_convert_writes_are_no_unknown_class(tmp_path):
    data = EditableSet(tmp_path / "set")
    (tmp_path / "kitti").mkdir()
    rows = [("Car", 16, 16, 80, 64), ("DontCare", 0, 80, 150, 120)]
    text = "".join(f"{name} 0 0 0 {x1} {y1} {x2} {y2} 0 0 0 0 0 0 0\n" for name, x1, y1, x2, y2 in rows)
    (data.root / "images/train/0.txt").write_text(text)
    convert(data.root / "images/train", tmp_path / "out.json", "kitti")
    (split,) = scan_dataset(load_dataset_spec(tmp_path / "out.yaml"), ("train",), workers=0)
    assert [issue.kind for issue in scan_issues(split) if "class" in issue.kind] == []
    assert split.index.report.totals["boxes"] == split.index.report.totals["crowd"] == 1


def test_joined_sets_are_checked_with_the_places_in_each(tmp_path):
    for name in "ab":
        write_dataset(tmp_path / name, train=4, val=3)
    (tmp_path / "b" / "data.yaml").write_text("train: images/train\nnames: [dark, glow]\n")
    (tmp_path / "b/labels/train/001.txt").write_text("1 0.5 0.5 0.25 0.25\n0 0.9 0.5 0.4 0.2\n1 0.5 0.5 0.25 0.251\n")
    (tmp_path / "both.yaml").write_text("train: [a/data.yaml, b/data.yaml]\n")
    spec = load_dataset_spec(tmp_path / "both.yaml")
    (split,) = scan_dataset(spec, ("train",), workers=0)
    trained = load_index(spec, "train", IndexSettings(cache_dir=str(tmp_path / "cache"), progress=False))
    np.testing.assert_array_equal(split.index.boxes_xywh_px, trained.boxes_xywh_px)
    assert list(trained.report.lines) == list(split.index.report.lines)
    (clipped,) = scan_issues(split)
    assert (clipped.where, clipped.images) == ("b/labels/train/001.txt:2", ("b/images/train/001.png",))
    assert clipped.boxes[0].class_name == "dark"
    assert f"{Path('b/labels/train/001.txt:2')}: box clipped" in trained.report.lines[0]
    doubled = box_pairs(split)[-1]
    assert [(box.where, box.class_name) for box in doubled.boxes] == [
        ("b/labels/train/001.txt:1", "glow"),
        ("b/labels/train/001.txt:3", "glow"),
    ]


@pytest.fixture
def index(tmp_path):
    spec = load_dataset_spec(write_dataset(tmp_path / "set", train=20, val=2))
    return load_index(spec, "train", IndexSettings(cache_dir=str(tmp_path / "index"), progress=False))


def test_small_boxes_are_warned_of_with_a_size_at_which_they_no_longer_are(index, monkeypatch):
    lines = []
    monkeypatch.setattr(get_logger(), "warning", lambda text, *values: lines.append(text % values))
    boxes = index.boxes_xywh_px[:, 2:] / 64  # the images have 64 x 64 pixels
    median = float(np.median(np.sqrt(boxes.prod(1))))
    large = int(17 / median)
    small = int(12 / median)
    warn_of_small_boxes(index, imgsz=large, stride=32)
    assert lines == []
    warn_of_small_boxes(index, imgsz=small, stride=32)
    assert len(lines) == 1
    assert f"{median * small:.1f} px at --imgsz {small}" in lines[0]
    better = int(re.search(r"use --imgsz (\d+)", lines[0])[1])
    assert better % 32 == 0
    assert median * (better - 32) < 16 <= median * better


def test_sizes_that_nobody_trains_at_are_not_advised():
    assert remedy_for_small_boxes(16.0, 640, 32) is None
    assert "--imgsz 640 " in remedy_for_small_boxes(8.0, 320, 32)
    assert "--imgsz 352 " in remedy_for_small_boxes(15.9, 320, 32)
    assert "--imgsz 2048 " in remedy_for_small_boxes(5.0, 640, 32)
    assert remedy_for_small_boxes(4.9, 640, 32).startswith("add 'tile: 640' to the data set's YAML")


def test_a_set_with_tiles_is_advised_smaller_ones():
    assert remedy_for_small_boxes(8.0, 320, 32, tile=640) == (
        "use --imgsz 640 or more, or smaller tiles ('tile: 320' in the data set's YAML)"
    )
    assert remedy_for_small_boxes(4.9, 640, 32, tile=640) == "use smaller tiles ('tile: 192' in the data set's YAML)"
    assert "'tile: 32'" in remedy_for_small_boxes(0.1, 640, 32, tile=64)
    assert remedy_for_small_boxes(16.0, 640, 32, tile=64) is None


def test_counts_are_those_of_the_labels(index):
    found = take_census(index, "train", 64)
    assert found.images == 20
    assert found.boxes == len(index.boxes_xywh_px) == found.centers.sum()
    assert found.class_boxes.tolist() == np.bincount(index.classes, minlength=2).tolist()
    assert found.backgrounds == int((np.diff(index.offsets) == 0).sum())


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

    (files,) = scan_dataset(load_dataset_spec(data), ("train",), workers=0)
    (shards,) = scan_dataset(load_dataset_spec(tmp_path / "shards/data.yaml"), ("train",), workers=0)
    (joined,) = scan_dataset(load_dataset_spec(tmp_path / "joined.yaml"), ("train",), workers=0)
    expected = [(CLIPPED, issue.text, issue.where) for issue in scan_issues(files)]
    assert len(expected) == 3
    assert [(issue.kind, issue.text, issue.where) for issue in scan_issues(shards)] == expected
    places = [f"set/{where}" for _, _, where in expected]
    assert [finding.where for finding in joined.index.report.findings] == places
    assert joined.index.report.lines[0] == f"{places[0]}: {CLIPPED}: {expected[0][1]}"
