"""`python -m tools.check` on a small data set: each kind of issue, exit statuses, JSON, where the page is."""

from __future__ import annotations

import json
import os
import re
import shutil

import cv2
import numpy as np
import pytest

from data.findings import BAD_IMAGE, FITTED, NO_LABEL
from data.formats.label_format import Classes
from data.formats.yolo import read_yolo
from data.index import IndexSettings
from data.load import load_index
from data.read_spec import load_dataset_spec
from engine.report.label_errors import MISSING_LABEL, WRONG_CLASS, Issue, LabelBox
from tests.helpers.editable_set import NAMES, ROWS, EditableSet
from tests.helpers.html_page import check_self_contained, photos_of
from tests.helpers.scripts import error_of
from tests.helpers.synthetic_index import smooth_image
from tests.helpers.tiny import write_weights
from tools.check.__main__ import main
from tools.check.content import check_content
from tools.check.dataset_check import NO_OBJECTS, REFUSED, UNREADABLE_SPLIT, CheckResult, scan_splits
from tools.check.duplicates import DUPLICATES_ACROSS_SPLITS, DUPLICATES_WITHIN_SPLIT
from tools.check.labels import DOUBLED, NOT_TRAINED, SIMILAR, SMALL_OBJECTS, TINY, TWO_CLASSES, UNUSED
from utils.boxes import scale_boxes
from utils.errors import UserError
from utils.process.main import run_main

HOSTILE = "<img src=x onerror=alert(1)>"
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
    assert out.splitlines()[-1] == "report: runs/check/exp/report.html"
    content = json.loads(check(capsys, data.yaml, "--json")[1])
    assert (content["issues"], content["report"]) == ([], "runs/check/exp2/report.html")
    assert json.loads(check(capsys, data.yaml, "--json", "--noplots")[1])["report"] is None
    assert len(list((tmp_path / "runs" / "check").iterdir())) == 2


def test_doubled_boxes_and_boxes_of_two_classes(data, capsys):
    data.write("train/1", "0 0.3 0.3 0.3 0.3\n0 0.32 0.3 0.3 0.3\n1 0.7 0.7 0.3 0.3\n")  # IoU 0.875
    assert issues_of(capsys, data) == []
    data.write("train/1", "0 0.3 0.3 0.3 0.3\n1 0.7 0.7 0.2 0.2\n\n0 0.301 0.3 0.3 0.3\n1 0.3 0.3 0.3 0.301\n")
    issues = issues_of(capsys, data)
    assert [issue["kind"] for issue in issues] == [DOUBLED.name, TWO_CLASSES.name, TWO_CLASSES.name]
    doubled = issues[0]
    assert (doubled["images"], doubled["where"]) == (["images/train/1.png"], "labels/train/1.txt:4")
    assert [(box["where"], box["class_name"]) for box in doubled["boxes"]] == [
        ("labels/train/1.txt:1", "cat"),
        ("labels/train/1.txt:4", "cat"),
    ]
    np.testing.assert_allclose(doubled["boxes"][0]["xyxy_px"], [24, 19.2, 72, 57.6])


def test_findings_of_the_scan_and_what_training_refuses_with_its_line(data, capsys):
    for name in ("val/0", "val/1"):
        data.write(name, "")
    (issue,) = issues_of(capsys, data)
    assert (issue["kind"], issue["split"]) == (NO_OBJECTS.name, "val")
    data.write("train/0", "0 0.95 0.5 0.3 0.3\n1 0.3 0.3 0.3 0.3\n")
    (data.root / "labels/train/1.txt").unlink()
    data.image("train/3").write_bytes(b"not an image")
    shutil.rmtree(data.root / "labels/val")
    issues = issues_of(capsys, data)
    found = {issue["kind"]: issue for issue in issues}
    assert found[FITTED]["where"] == "labels/train/0.txt:1"
    np.testing.assert_allclose(found[FITTED]["boxes"][0]["xyxy_px"], [128, 44.8, 176, 83.2])  # as labeled, of 160x128
    assert found[NO_LABEL]["images"] == ["images/train/1.png"]
    assert found[BAD_IMAGE]["split"] == "train"
    for kind, split in ((REFUSED.name, "train"), (UNREADABLE_SPLIT.name, "val")):
        with pytest.raises(UserError) as trained:
            load_index(load_dataset_spec(data.yaml), split, IndexSettings(progress=False))
        assert [issue["split"] for issue in issues if issue["kind"] == kind] == [split]
        assert str(trained.value).partition("; report")[0] in [issue["text"] for issue in issues]


def test_small_and_tiny_boxes_depend_on_imgsz(data, capsys):
    for name in EVERY_IMAGE:
        data.write(name, "0 0.3 0.3 0.05 0.0625\n1 0.7 0.7 0.05 0.0625\n0 0.5 0.5 0.01 0.01\n")  # 8x8, 1.6x1.28 px
    assert {issue["kind"] for issue in issues_of(capsys, data, "--imgsz", 640)} == set()
    issues = issues_of(capsys, data, "--imgsz", 160)
    assert [issue["kind"] for issue in issues] == [TINY.name] * 6 + [SMALL_OBJECTS.name]
    assert issues[0]["where"].endswith(":3")
    assert "--imgsz 320" in issues[-1]["text"]  # twice the size: 16 px


def test_near_duplicates_within_and_across_splits(data, capsys):
    image = cv2.imread(str(data.image("train/0")))
    data.add("val/copy", cv2.resize(image, None, fx=0.7, fy=0.7, interpolation=cv2.INTER_AREA))
    other = cv2.imread(str(data.image("train/1")))
    data.add("train/copy", cv2.convertScaleAbs(other, alpha=1, beta=15))
    issues = {issue["kind"]: issue for issue in issues_of(capsys, data)}
    assert set(issues) == {DUPLICATES_ACROSS_SPLITS.name, DUPLICATES_WITHIN_SPLIT.name}
    assert issues[DUPLICATES_ACROSS_SPLITS.name]["images"] == ["images/train/0.png", "images/val/copy.png"]
    assert issues[DUPLICATES_ACROSS_SPLITS.name]["splits"] == ["train", "val"]
    assert issues[DUPLICATES_WITHIN_SPLIT.name]["images"] == ["images/train/1.png", "images/train/copy.png"]
    assert issues_of(capsys, data, "--split", "val") == []


def test_copies_of_one_image_by_roboflow(data, capsys):
    """Copies are recognized by name, since they may be rotated or cropped."""
    image = smooth_image(np.random.default_rng(5), 96, 96)
    data.add("train/a_jpg.rf.0a1b", image)
    data.add("train/a_jpg.rf.2c3d", cv2.convertScaleAbs(image, alpha=1, beta=9))  # which nobody has to delete
    data.add("val/a_jpg.rf.4e5f", np.rot90(image).copy())
    (issue,) = issues_of(capsys, data)
    assert (issue["kind"], issue["splits"]) == (DUPLICATES_ACROSS_SPLITS.name, ["train", "train", "val"])


def test_classes_that_are_unused_untrained_or_misspelt(data, capsys):
    data.describe([*NAMES, "cow", "hen", "pig"])
    data.write("val/0", ROWS + "3 0.5 0.2 0.2 0.2\n")
    unused, not_trained = sorted(issues_of(capsys, data), key=lambda issue: issue["kind"] == NOT_TRAINED.name)
    assert (unused["kind"], not_trained["kind"]) == (UNUSED.name, NOT_TRAINED.name)
    assert "cow (2), pig (4)" in unused["text"]
    assert "'hen'" in not_trained["text"]
    data.describe([*NAMES, "dogg"])
    data.write("val/0", "".join(f"1 0.{i} 0.3 0.1 0.1\n" for i in range(10, 70)))
    data.write("train/0", "2 0.3 0.3 0.3 0.3\n")
    similar = [issue["text"] for issue in issues_of(capsys, data) if issue["kind"] == SIMILAR.name]
    assert similar == ["'dogg' has 1 box, 'dog' 64"]


def test_the_page_of_an_untrained_model_shows_the_other_issues_and_hostile_names_as_text(data, tmp_path, capsys):
    """Such a model sees nothing, so it cannot tell which labels are wrong; the data set is not changed."""
    data.describe([HOSTILE, "b&b"])
    name = "train/'><b onclick=x>\u202e"
    rng = np.random.default_rng(0)
    data.add(name, smooth_image(rng, 64, 64), "0 0.95 0.5 0.3 0.3\n1 0.3 0.3 0.3 0.3\n")
    data.add(os.fsdecode(b"train/\xff\xfe"), smooth_image(rng, 64, 64), "0 0.95 0.5 0.3 0.3\n")
    data.write("train/0", "0 0.3 0.3 0.3 0.3\n0 0.301 0.3 0.3 0.3\n1 0.3 0.301 0.3 0.3\n")
    data.image("val/0").write_bytes(b"not an image")
    before = data.content()
    weights = write_weights(tmp_path / "best.pt", [HOSTILE, "b&b"])
    status, text = check(capsys, data.yaml, "--weights", weights, "--device", "cpu", "--out", tmp_path / "page")
    assert status == 1
    assert data.content() == before
    assert f"report: {tmp_path / 'page' / 'report.html'}" in text
    html = (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    page = check_self_contained(html)
    assert HOSTILE not in html
    assert HOSTILE in page.sections["Data"]
    assert "'><b onclick=x>" in page.sections["Images"]
    for shown in (text, page.sections["Summary"]):
        assert f"too weak to judge labels of {HOSTILE}" in shown
    table = {row[0]: row[1] for row in page.tables["Issues by kind"][1:]}
    assert (table[DOUBLED.name], table[FITTED]) == ("1", "2")
    shown = [label.partition(" in ")[0] for label in photos_of(page)]
    assert sorted(shown) == sorted([DOUBLED.name, TWO_CLASSES.name, FITTED, FITTED])
    assert "This image cannot be read" in page.sections["Images"]
    (listed,) = (rows for name, rows in page.tables.items() if name.endswith("issues"))
    assert {row[2] for row in listed} >= {"labels/train/0.txt:2", "images/val/0.png"}


def test_corrections_are_rows_that_give_the_right_labels(data):
    """Applied to the label files, the suggested rows are read as the boxes that the model suggests."""
    cat = LabelBox("cat", 0, (24.0, 19.2, 72.0, 57.6), "labels/train/0.txt:1")
    dog = LabelBox("dog", 1, (88.0, 70.4, 136.0, 108.8))
    other = LabelBox("dog", 1, cat.xyxy_px)
    image = ("images/train/0.png",)
    errors = [
        Issue(MISSING_LABEL, "object without a label that looks like dog", "train", image, "", (), 0.9, dog),
        Issue(WRONG_CLASS, "cat that looks like dog", "train", image, cat.where, (cat,), 0.8, other),
    ]
    spec = load_dataset_spec(data.yaml)
    splits, _ = scan_splits(spec, [], workers=2)
    sections = check_content(CheckResult(spec, splits, errors, [], 640, "best.pt")).sections
    notes = [card.note for gallery in sections[1].blocks for card in gallery.cards]
    rows = [re.search(r"(?:add|write) (.*)", note)[1] for note in notes]
    for row, box in zip(rows, (dog, other), strict=True):
        class_id, x1, y1, x2, y2, *_ = read_yolo(row.encode(), Classes("ab"))[0].rows[0]
        assert class_id == box.class_id
        np.testing.assert_allclose(scale_boxes(np.array([x1, y1, x2, y2]), 160, 128), box.xyxy_px, atol=1e-3)


@pytest.mark.parametrize("here", ["images/train", "images/val"])
def test_the_page_is_not_written_among_the_images(data, tmp_path, monkeypatch, capsys, here):
    """If the working folder is among the images, the page is in the cache folder."""
    before = data.content()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(data.root / here)
    assert "is in " in error_of(capsys, main, data.yaml, "--out", "page")
    assert check(capsys, data.yaml)[1].endswith(f"report: {tmp_path}/cache/lockstep/check/exp/report.html\n")
    assert data.content() == before
