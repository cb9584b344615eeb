"""The page of a check shows each issue at its place; its text is escaped, and its size is bounded."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np

from data.findings import BAD_BOX, BAD_IMAGE, FITTED
from data.formats.label_format import Classes
from data.formats.yolo import read_yolo
from data.read_spec import load_dataset_spec
from engine.report.issues import Issue, LabelBox
from engine.report.label_errors import MISSING_LABEL, WRONG_CLASS
from tests.helpers.editable_set import EditableSet
from tests.helpers.html_page import HtmlPage, check_self_contained, photos_of
from tests.helpers.synthetic_index import smooth_image
from tools.check.boxes import box_pairs, box_sizes
from tools.check.dataset_check import CheckResult, scan_issues, scan_splits
from tools.check.duplicates import image_issues
from tools.check.issue_kinds import DOUBLED, TINY, TWO_CLASSES
from tools.check.page import FILE_NAME, write_page
from utils.boxes import scale_boxes

HOSTILE = "<img src=x onerror=alert(1)>"


def page_of(data: EditableSet, out: Path, more=(), imgsz: int = 640) -> tuple[HtmlPage, list[Issue]]:
    """Returns the page of the issues that need no model, and of ``more``; and all these issues."""
    spec = load_dataset_spec(data.yaml)
    splits, _ = scan_splits(spec, [], workers=2)
    issues = [issue for split in splits for issue in (*scan_issues(split), *box_pairs(split))]
    issues += [*image_issues(splits, 2), *box_sizes(splits, imgsz), *more]
    result = CheckResult(spec, splits, issues, [], imgsz, "best.pt" if more else "")
    assert write_page(result, out) == out / FILE_NAME
    return check_self_contained((out / FILE_NAME).read_text(encoding="utf-8")), issues


def cards(read: HtmlPage, section: str) -> dict[str, int]:
    """Returns the number of cards of each kind in the galleries of a section."""
    shown = re.findall(r"^(.+) \((\d+)\)$", read.sections[section], re.MULTILINE)
    return {kind: int(count) for kind, count in shown}


def test_each_image_has_one_card_with_its_issues(data, tmp_path):
    data.write("train/0", "0 0.3 0.3 0.3 0.3\n0 0.301 0.3 0.3 0.3\n1 0.3 0.301 0.3 0.3\n")
    data.write("train/1", "0 0.95 0.5 0.3 0.3\n1 0.5 0.5 0.002 0.002\n0 2 2 0.1 0.1\n")
    data.write("val/1", "1 0.0 0.5 0.3 0.3\n")
    data.image("val/0").write_bytes(b"not an image")
    read, issues = page_of(data, tmp_path / "out")
    kinds = (DOUBLED, TWO_CLASSES, TINY, FITTED, BAD_BOX)
    images = {(i.split, i.images[0]): i.kind for i in reversed(issues) if i.kind in kinds}
    assert cards(read, "Images and boxes").keys() <= set(kinds)
    assert sum(cards(read, "Images and boxes").values()) == len(images) == 3
    table = {row[0]: [row[1], row[4]] for row in read.tables["Issues by kind"][1:]}
    assert table[BAD_IMAGE] == ["1", "val: 1"]
    assert table[FITTED] == ["2", "train: 1; val: 1"]
    locations = {row[2] for row in read.tables["Issues, with their locations"][1:]}
    assert locations >= {"labels/train/0.txt:2", "images/val/0.png"}
    assert len(photos_of(read)) == 3


def test_corrections_are_rows_that_give_the_right_labels(data, tmp_path):
    """Applied to the label files, the suggested rows are read as the boxes that the model suggests."""
    cat = LabelBox("cat", 0, (24.0, 19.2, 72.0, 57.6), 0, "labels/train/0.txt:1")
    dog = LabelBox("dog", 1, (88.0, 70.4, 136.0, 108.8))
    image = ("images/train/0.png",)
    other = LabelBox("dog", 1, cat.xyxy_px)
    errors = [
        Issue(MISSING_LABEL, "object without a label that looks like dog", "train", image, "", (), 0.9, dog),
        Issue(WRONG_CLASS, "cat that looks like dog", "train", image, cat.where, (cat,), 0.8, other),
    ]
    read, _ = page_of(data, tmp_path / "out", errors)
    assert cards(read, "Label errors") == {MISSING_LABEL: 1, WRONG_CLASS: 1}
    written = (tmp_path / "out" / FILE_NAME).read_text(encoding="utf-8")
    rows = re.findall(r"(?:add|write) <code>(.*?)</code>", written)
    for row, box in zip(rows, (dog, other), strict=True):
        class_id, x1, y1, x2, y2, *_ = read_yolo(row.encode(), Classes("ab"))[0].rows[0]
        assert class_id == box.class_id
        np.testing.assert_allclose(scale_boxes(np.array([x1, y1, x2, y2]), 160, 128), box.xyxy_px, atol=1e-3)


def test_hostile_names_are_text(data, tmp_path):
    data.describe([HOSTILE, "b&b"])
    rng = np.random.default_rng(0)
    name = "train/'><b onclick=x>\u202e"
    data.add(name, smooth_image(rng, 64, 64), "0 0.95 0.5 0.3 0.3\n1 0.3 0.3 0.3 0.3\n")
    surrogate = os.fsdecode(b"train/\xff\xfe")
    data.add(surrogate, smooth_image(rng, 64, 64), "0 0.95 0.5 0.3 0.3\n")
    read, _ = page_of(data, tmp_path / "out")
    assert sum(cards(read, "Images and boxes").values()) == 2
    assert (tmp_path / "out" / FILE_NAME).read_text(encoding="utf-8").count(HOSTILE) == 0
    assert "'><b onclick=x>" in read.sections["Images and boxes"]
    assert HOSTILE in read.sections["Data"]
