"""`python -m data.check` on a small data set: each kind of issue, exit statuses, JSON, sheets."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

from data.check.__main__ import main
from data.check.issues import (
    ACROSS,
    DOUBLED,
    IMBALANCE,
    NOT_TRAINED,
    SMALL_OBJECTS,
    TINY,
    TWO_CLASSES,
    UNUSED,
    WITHIN,
)
from data.labels.findings import BAD_IMAGE, CLIPPED, NO_LABEL
from tests.helpers.scripts import error_of
from tests.helpers.synthetic_index import smooth_image
from tests.helpers.tiny import write_weights
from utils.entrypoint import run_main

ROOT = Path(__file__).parents[3]
NAMES = ["cat", "dog"]
ROWS = "0 0.3 0.3 0.3 0.3\n1 0.7 0.7 0.3 0.3\n"


class Set:
    """A clean data set of four training and two validation images, whose files a test changes."""

    def __init__(self, root: Path) -> None:
        self.root, self.yaml = root, root / "data.yaml"
        rng = np.random.default_rng(0)
        for split, count in (("train", 4), ("val", 2)):
            for i in range(count):
                self.add(f"{split}/{i}", smooth_image(rng, 128, 160))
        self.describe(NAMES)

    def describe(self, names: list[str]) -> None:
        content = {"train": "images/train", "val": "images/val", "names": names}
        self.yaml.write_text(yaml.safe_dump(content), encoding="utf-8")

    def add(self, name: str, image: np.ndarray, rows: str | None = ROWS) -> None:
        path = self.image(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(cv2.imencode(".png", image)[1].tobytes())
        if rows is not None:
            self.write(name, rows)

    def image(self, name: str) -> Path:
        return self.root / "images" / f"{name}.png"

    def write(self, name: str, rows: str) -> None:
        path = self.root / "labels" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(rows, encoding="utf-8")


@pytest.fixture
def data(tmp_path: Path) -> Set:
    return Set(tmp_path / "set")


def check(capsys: pytest.CaptureFixture, *argv: object) -> tuple[int, str]:
    """Exit status and standard output."""
    capsys.readouterr()
    status = 0
    try:
        run_main(main, [str(a) for a in argv])
    except SystemExit as ended:
        status = ended.code
    return status, capsys.readouterr().out


def issues_of(capsys: pytest.CaptureFixture, data: Set, *argv: object) -> list[dict]:
    status, out = check(capsys, data.yaml, "--json", *argv)
    issues = json.loads(out)["issues"]
    assert status == (1 if issues else 0)
    return issues


def test_a_clean_set_has_no_issues(data, capsys):
    status, out = check(capsys, data.yaml)
    assert status == 0
    assert out.splitlines()[-1] == "nothing to report"
    assert issues_of(capsys, data) == []


def test_doubled_boxes_and_boxes_of_two_classes(data, capsys):
    data.write("train/1", "0 0.3 0.3 0.3 0.3\n1 0.7 0.7 0.2 0.2\n\n0 0.301 0.3 0.3 0.3\n1 0.3 0.3 0.3 0.301\n")
    issues = issues_of(capsys, data)
    assert [issue["kind"] for issue in issues] == [DOUBLED, TWO_CLASSES, TWO_CLASSES]
    doubled = issues[0]
    assert doubled["images"] == ["images/train/1.png"]
    assert doubled["where"] == "labels/train/1.txt:4"
    assert [(b["line"], b["number"], b["class_name"]) for b in doubled["boxes"]] == [(1, 0, "cat"), (4, 2, "cat")]
    np.testing.assert_allclose(doubled["boxes"][0]["xyxy_px"], [24, 19.2, 72, 57.6])
    assert {b["line"] for issue in issues[1:] for b in issue["boxes"]} == {1, 4, 5}


def test_overlap_below_the_limit_is_no_issue(data, capsys):
    data.write("train/1", "0 0.3 0.3 0.3 0.3\n0 0.32 0.3 0.3 0.3\n1 0.7 0.7 0.3 0.3\n")  # IoU 0.875
    assert issues_of(capsys, data) == []


def test_findings_of_the_scan(data, capsys):
    data.write("train/0", "0 0.95 0.5 0.3 0.3\n1 0.3 0.3 0.3 0.3\n")
    (data.root / "labels/train/1.txt").unlink()
    data.image("val/0").write_bytes(b"not an image")
    issues = {issue["kind"]: issue for issue in issues_of(capsys, data)}
    assert set(issues) == {CLIPPED, NO_LABEL, BAD_IMAGE}
    assert issues[CLIPPED]["where"] == "labels/train/0.txt:1"
    assert issues[NO_LABEL]["images"] == ["images/train/1.png"]
    assert issues[BAD_IMAGE]["split"] == "val"


def test_small_and_tiny_boxes_depend_on_imgsz(data, capsys):
    for name in ("train/0", "train/1", "train/2", "train/3", "val/0", "val/1"):
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
    assert set(issues) == {ACROSS, WITHIN}
    assert issues[ACROSS]["images"] == ["images/train/0.png", "images/val/copy.png"]
    assert issues[ACROSS]["splits"] == ["train", "val"]
    assert issues[WITHIN]["images"] == ["images/train/1.png", "images/train/copy.png"]
    assert issues_of(capsys, data, "--split", "val") == []


def test_classes_that_are_unused_or_unevenly_distributed(data, capsys):
    data.describe([*NAMES, "cow", "hen"])
    data.write("val/0", ROWS + "3 0.5 0.2 0.2 0.2\n")
    assert {i["kind"]: i["text"].split(":")[0].split(" ")[0] for i in issues_of(capsys, data)} == {
        UNUSED: "'cow'",
        NOT_TRAINED: "'hen'",
    }
    rng = np.random.default_rng(9)
    data.describe(NAMES)
    data.write("val/0", ROWS)
    for i in range(30):
        data.add(f"train/more{i}", smooth_image(rng, 96, 96), "0 0.3 0.3 0.3 0.3\n")
        data.add(f"val/more{i}", smooth_image(rng, 96, 96))
    (issue,) = issues_of(capsys, data)
    assert issue["kind"] == IMBALANCE
    assert "'dog': 4 boxes in 4 of 34 images of train, 32 in 32 of 32 of val" in issue["text"]


def test_json_is_alone_on_standard_output(data, capsys):
    """In a process of its own; progress and warnings go to standard error."""
    data.write("train/0", "0 0.95 0.5 0.3 0.3\n")
    command = [sys.executable, "-m", "data.check", str(data.yaml), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    content = json.loads(done.stdout)
    assert content["splits"]["train"]["images"] == 4
    assert "scanning train" in done.stderr


def test_what_cannot_run_is_one_line(data, tmp_path, capsys):
    assert "no such file" in error_of(capsys, main, tmp_path / "none.yaml")
    assert "has no 'test' split" in error_of(capsys, main, data.yaml, "--split", "test")
    weights = write_weights(tmp_path / "other.pt", ["one", "two", "three"])
    line = error_of(capsys, main, data.yaml, "--weights", weights, "--device", "cpu")
    assert "other classes (one, two, three)" in line
    shutil.rmtree(data.root / "images" / "val")
    assert "images/val: not found" in error_of(capsys, main, data.yaml)


def test_sheets_and_label_errors_of_an_untrained_model(data, tmp_path, capsys):
    """Such a model sees nothing, so it cannot tell which labels are wrong; the data set is not changed."""
    data.write("train/1", "0 0.3 0.3 0.3 0.3\n0 0.301 0.3 0.3 0.3\n1 0.7 0.7 0.3 0.3\n")
    before = {path: path.read_bytes() for path in data.root.rglob("*") if path.is_file()}
    weights = write_weights(tmp_path / "best.pt", NAMES)
    out = tmp_path / "sheets"
    status, text = check(capsys, data.yaml, "--weights", weights, "--device", "cpu", "--out", out)
    assert status == 1
    assert f"{DOUBLED}: 1 " in text
    assert [path.name for path in out.iterdir()] == ["doubled_box.jpg"]
    assert cv2.imread(str(out / "doubled_box.jpg")).shape[0] == 320
    assert {path: path.read_bytes() for path in data.root.rglob("*") if path.is_file()} == before
