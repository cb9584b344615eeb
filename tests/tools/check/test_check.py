"""`python -m tools.check` on a small data set: each kind of issue, exit statuses, JSON, where the page is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

from data.dataset.yaml_file import load_dataset_spec
from data.index.index import IndexSettings
from data.index.load import load_index
from data.labels.findings import BAD_IMAGE, FITTED, NO_LABEL, UNKNOWN_CLASS
from tests.helpers.editable_set import NAMES, ROWS, EditableSet
from tests.helpers.html_page import check_self_contained
from tests.helpers.scripts import error_of
from tests.helpers.synthetic_index import smooth_image
from tests.helpers.three_formats import write_three_formats
from tests.helpers.tiny import write_weights
from tools.check.__main__ import main
from tools.check.boxes import box_pairs
from tools.check.dataset_check import scan_issues, scan_split
from tools.check.issue_kinds import (
    COPIES_ACROSS_SPLITS,
    DOUBLED,
    DUPLICATES_ACROSS_SPLITS,
    DUPLICATES_WITHIN_SPLIT,
    IMBALANCE,
    NO_OBJECTS,
    NOT_TRAINED,
    REFUSED,
    SMALL_OBJECTS,
    TINY,
    TWO_CLASSES,
    UNREADABLE_SPLIT,
    UNUSED,
)
from tools.shard.write_shards import write_set
from utils.errors import UserError
from utils.process.main import run_main

EVERY_IMAGE = ("train/0", "train/1", "train/2", "train/3", "val/0", "val/1")


def check(capsys: pytest.CaptureFixture, *argv: object) -> tuple[int, str]:
    """Returns exit status and standard output."""
    capsys.readouterr()
    status = 0
    try:
        run_main(main, [str(a) for a in argv])
    except SystemExit as ended:
        status = ended.code
    return status, capsys.readouterr().out


def issues_of(capsys: pytest.CaptureFixture, data: EditableSet, *argv: object) -> list[dict]:
    status, out = check(capsys, data.yaml, "--json", "--noplots", *argv)
    issues = json.loads(out)["issues"]
    assert status == (1 if issues else 0)
    return issues


def test_a_clean_set_has_no_issues_and_the_json_names_the_page(data, tmp_path, capsys):
    status, out = check(capsys, data.yaml)
    assert status == 0
    assert out.splitlines()[-2:] == ["nothing to report", "report: runs/check/exp/report.html"]
    assert (tmp_path / "runs/check/exp/report.html").stat().st_size > 10_000
    content = json.loads(check(capsys, data.yaml, "--json")[1])
    assert (content["issues"], content["report"]) == ([], "runs/check/exp2/report.html")
    assert json.loads(check(capsys, data.yaml, "--json", "--noplots")[1])["report"] is None
    assert len(list((tmp_path / "runs" / "check").iterdir())) == 2


def test_the_data_set_may_be_named_as_in_training(data, capsys):
    assert check(capsys, "--data", data.yaml, "--noplots") == check(capsys, data.yaml, "--noplots")


def test_doubled_boxes_and_boxes_of_two_classes(data, capsys):
    data.write("train/1", "0 0.3 0.3 0.3 0.3\n0 0.32 0.3 0.3 0.3\n1 0.7 0.7 0.3 0.3\n")  # IoU 0.875
    assert issues_of(capsys, data) == []
    data.write("train/1", "0 0.3 0.3 0.3 0.3\n1 0.7 0.7 0.2 0.2\n\n0 0.301 0.3 0.3 0.3\n1 0.3 0.3 0.3 0.301\n")
    issues = issues_of(capsys, data)
    assert [issue["kind"] for issue in issues] == [DOUBLED, TWO_CLASSES, TWO_CLASSES]
    doubled = issues[0]
    assert (doubled["images"], doubled["where"]) == (["images/train/1.png"], "labels/train/1.txt:4")
    assert [(b["line"], b["number"], b["class_name"]) for b in doubled["boxes"]] == [(1, 0, "cat"), (4, 2, "cat")]
    np.testing.assert_allclose(doubled["boxes"][0]["xyxy_px"], [24, 19.2, 72, 57.6])
    assert {b["line"] for issue in issues[1:] for b in issue["boxes"]} == {1, 4, 5}


def test_findings_of_the_scan(data, capsys):
    data.write("train/0", "0 0.95 0.5 0.3 0.3\n1 0.3 0.3 0.3 0.3\n")
    (data.root / "labels/train/1.txt").unlink()
    data.image("val/0").write_bytes(b"not an image")
    issues = {issue["kind"]: issue for issue in issues_of(capsys, data)}
    assert set(issues) == {FITTED, NO_LABEL, BAD_IMAGE, REFUSED}
    assert issues[REFUSED]["split"] == "val"
    assert "1 of 2 images" in issues[REFUSED]["text"]
    assert issues[FITTED]["where"] == "labels/train/0.txt:1"
    np.testing.assert_allclose(issues[FITTED]["boxes"][0]["xyxy_px"], [128, 44.8, 176, 83.2])  # as labeled, of 160x128
    assert issues[NO_LABEL]["images"] == ["images/train/1.png"]
    assert issues[BAD_IMAGE]["split"] == "val"


def test_what_training_refuses_is_an_issue_with_its_line(data, capsys):
    data.image("train/3").write_bytes(b"not an image")
    shutil.rmtree(data.root / "labels/val")
    issues = issues_of(capsys, data)
    for kind, split in ((REFUSED, "train"), (UNREADABLE_SPLIT, "val")):
        with pytest.raises(UserError) as trained:
            load_index(load_dataset_spec(data.yaml), split, IndexSettings(progress=False))
        assert [issue["split"] for issue in issues if issue["kind"] == kind] == [split]
        assert str(trained.value).partition("; report")[0] in [issue["text"] for issue in issues]
    out = check(capsys, data.yaml)[1]
    page = check_self_contained(Path(out.splitlines()[-1].removeprefix("report: ")).read_text(encoding="utf-8"))
    assert REFUSED in {row[0] for table in page.tables.values() for row in table}


def test_another_split_without_objects_is_an_issue(data, capsys):
    for name in ("val/0", "val/1"):
        data.write(name, "")
    (issue,) = issues_of(capsys, data)
    assert (issue["kind"], issue["split"]) == (NO_OBJECTS, "val")
    assert issue["text"].startswith(f"{data.yaml}: 'val' ")
    assert "warning: " not in check(capsys, data.yaml, "--noplots")[1]


def test_small_and_tiny_boxes_depend_on_imgsz(data, capsys):
    for name in EVERY_IMAGE:
        data.write(name, "0 0.3 0.3 0.05 0.0625\n1 0.7 0.7 0.05 0.0625\n0 0.5 0.5 0.01 0.01\n")  # 8x8, 1.6x1.28 px
    assert {issue["kind"] for issue in issues_of(capsys, data, "--imgsz", 640)} == set()
    issues = issues_of(capsys, data, "--imgsz", 160)
    assert [issue["kind"] for issue in issues] == [TINY] * 6 + [SMALL_OBJECTS]
    assert issues[0]["boxes"][0]["line"] == 3
    assert "--imgsz 320" in issues[-1]["text"]  # twice the size: 16 px


def test_near_duplicates_within_and_across_splits(data, capsys):
    image = cv2.imread(str(data.image("train/0")))
    data.add("val/copy", cv2.resize(image, None, fx=0.7, fy=0.7, interpolation=cv2.INTER_AREA))
    other = cv2.imread(str(data.image("train/1")))
    data.add("train/copy", cv2.convertScaleAbs(other, alpha=1, beta=15))
    issues = {issue["kind"]: issue for issue in issues_of(capsys, data)}
    assert set(issues) == {DUPLICATES_ACROSS_SPLITS, DUPLICATES_WITHIN_SPLIT}
    assert issues[DUPLICATES_ACROSS_SPLITS]["images"] == ["images/train/0.png", "images/val/copy.png"]
    assert issues[DUPLICATES_ACROSS_SPLITS]["splits"] == ["train", "val"]
    assert issues[DUPLICATES_WITHIN_SPLIT]["images"] == ["images/train/1.png", "images/train/copy.png"]
    assert issues_of(capsys, data, "--split", "val") == []


def test_copies_of_one_image_by_roboflow(data, capsys):
    """Copies are recognized by name, since they may be rotated or cropped."""
    rng = np.random.default_rng(5)
    image = smooth_image(rng, 96, 96)
    data.add("train/a_jpg.rf.0a1b", image)
    data.add("train/a_jpg.rf.2c3d", cv2.convertScaleAbs(image, alpha=1, beta=9))
    assert issues_of(capsys, data) == []  # within a split nobody has to do anything
    data.add("val/a_jpg.rf.4e5f", np.rot90(image).copy())
    (issue,) = issues_of(capsys, data)
    assert (issue["kind"], issue["splits"]) == (COPIES_ACROSS_SPLITS, ["train", "train", "val"])


def test_classes_that_are_unused_or_unevenly_distributed(data, capsys):
    data.describe([*NAMES, "cow", "hen", "pig"])
    data.write("val/0", ROWS + "3 0.5 0.2 0.2 0.2\n")
    unused, not_trained = sorted(issues_of(capsys, data), key=lambda issue: issue["kind"] == NOT_TRAINED)
    assert (unused["kind"], not_trained["kind"]) == (UNUSED, NOT_TRAINED)
    assert unused["text"] == "2 of 5 classes have no box in train, val: cow (2), pig (4)"
    assert not_trained["text"].startswith("'hen': 0 boxes in 0 of 4 images of train")
    rng = np.random.default_rng(9)
    data.describe(NAMES)
    data.write("val/0", ROWS)
    for i in range(30):
        data.add(f"train/more{i}", smooth_image(rng, 96, 96), "0 0.3 0.3 0.3 0.3\n")
        data.add(f"val/more{i}", smooth_image(rng, 96, 96))
    (issue,) = issues_of(capsys, data)
    assert issue["kind"] == IMBALANCE
    assert "'dog': 4 boxes in 4 of 34 images of train, 32 in 32 of 32 of val" in issue["text"]


def test_a_finding_in_the_folder_of_two_splits_is_one_issue(data, capsys):
    data.write("train/0", "2 0.5 0.5 0.3 0.3\n" + ROWS)
    data.yaml.write_text(yaml.safe_dump({"train": "images/train", "val": "images/train", "names": NAMES}))
    (issue,) = (issue for issue in issues_of(capsys, data) if issue["kind"] == UNKNOWN_CLASS)
    assert issue["where"] == "labels/train/0.txt:1"


def test_label_errors_of_an_untrained_model(data, tmp_path, capsys):
    """Such a model sees nothing, so it cannot tell which labels are wrong; the data set is not changed."""
    data.write("train/1", "0 0.3 0.3 0.3 0.3\n0 0.301 0.3 0.3 0.3\n1 0.7 0.7 0.3 0.3\n")
    before = data.content()
    weights = write_weights(tmp_path / "best.pt", NAMES)
    status, text = check(capsys, data.yaml, "--weights", weights, "--device", "cpu", "--out", tmp_path / "page")
    assert status == 1
    assert f"{DOUBLED}: 1 " in text
    assert f"report: {tmp_path / 'page' / 'report.html'}" in text
    page = check_self_contained((tmp_path / "page" / "report.html").read_text(encoding="utf-8"))
    weak = "it is too weak to judge labels of cat"
    assert weak in page.sections["Label errors"]
    assert "No label errors are listed." in page.sections["Label errors"]
    assert weak in text
    assert data.content() == before


@pytest.mark.parametrize("here", ["images/train", "images/val"])
def test_the_page_is_not_written_among_the_images(data, tmp_path, monkeypatch, capsys, here):
    """If the working folder is among the images, the page is in the cache folder."""
    before = data.content()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(data.root / here)
    assert "is in " in error_of(capsys, main, data.yaml, "--out", "page")
    assert check(capsys, data.yaml)[1].endswith(f"report: {tmp_path}/cache/lockstep/check/exp/report.html\n")
    assert data.content() == before


SCANNED = ["cat", "dog", "DontCare"]
# Class, x1, y1, x2, y2 in images of 160 x 128: a doubled box, one that exceeds its image, and a region to ignore.
OBJECTS = [(0, 16, 16, 80, 64), (1, 16, 16, 80, 65), (1, 120, 16, 168, 64), (2, 0, 80, 160, 128)]


@pytest.mark.parametrize("annotations", [{}, {"annotations": "voc"}, {"annotations": "instances.json"}])
def test_merged_and_ignored_classes_are_read_as_by_training(tmp_path, annotations):
    sizes = dict.fromkeys(("0.png", "1.png"), (128, 160))
    write_three_formats(tmp_path, SCANNED, sizes, {"0.png": OBJECTS, "1.png": []})
    content = {"train": "images/train", "names": SCANNED, "classes": {"dog": "cat"}, "ignore": ["DontCare"]}
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


@pytest.mark.parametrize("annotations", [{}, {"annotations": "instances.json"}])
def test_findings_of_shards_and_joined_sets_are_those_of_the_files(tmp_path, annotations):
    """Places have colons: those of annotations in COCO JSON, and file names as they are."""
    names = [f"a: {i}: b.png" for i in range(3)]
    objects = {name: [(0, 16, 16, 80, 64), (1, 120, 16, 168, 64)] for name in names}
    write_three_formats(tmp_path / "set", SCANNED, dict.fromkeys(names, (128, 160)), objects)
    data = tmp_path / "set" / "data.yaml"
    data.write_text(yaml.safe_dump({"train": "images/train", "names": SCANNED} | annotations))
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
