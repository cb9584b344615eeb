"""Each defect of a data set is reported, costs only what it damages, and changes no file."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from tests.data.index.small_set import LABELS, load, take_messages, tree_state, write_yaml
from tests.helpers.messages import refused
from tests.helpers.three_formats import write_image

JSON_NUMBERS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity", "1e999": "1e999"}


@pytest.fixture
def damaged(root):
    """The small data set with defects of most kinds, in images and in YOLO labels."""
    images = root / "images/train"
    labels = root / "labels/train"
    rows = [
        "0 0.5 0.5 0.2 0.2",
        "0 0.5 0.5",
        "7 0.5 0.5 0.2 0.2",
        "0 0.5 0.5 0.2 0.2",
        "1 0.9 0.5 0.4 0.2",
        "1 0.5 0.5 0 0.2",
        "1 0.5 0.5 -0.1 0.2",
        "1 0.5 0.5 0.2 0",
        "a b c d e",
        "1 3 3 0.1 0.1",
    ]
    (labels / "a.txt").write_text("\n".join(rows))
    (labels / "b.txt").write_bytes(b"\xff\xfe\x30")
    (images / "d.png").write_bytes((images / "d.png").read_bytes()[:-30])
    (labels / "sub/c.txt").write_text("5 0.5 0.5 0.1 0.1\n0 320 240 20 20\n")
    write_image(images / "e.jpg", 20, 20)
    (labels / "e.txt").write_text("0 0.5 0.5 0 0.1\n")
    (images / "f.gif").write_bytes(b"GIF89a")
    (images / "._a.jpg").write_bytes(b"left by macOS")
    return root


def load_damaged(root, tmp_path):
    return load(root, tmp_path / "cache", max_bad=0.9, repeats=False)


def test_each_defect_is_reported_on_a_line_of_its_own(damaged, tmp_path):
    starts = (
        "images/train/f.gif: file of an unsupported kind: .gif",
        "labels/train/a.txt:2: bad row: 3 fields",
        "labels/train/a.txt:3: unknown class: class 7 is not among the classes (0 to 2)",
        "labels/train/a.txt:4: duplicate box",
        "labels/train/a.txt:5: box clipped",
        "labels/train/a.txt:6: box without area",
        "labels/train/a.txt:7: corners in the wrong order: corners 44, 24, 36, 36 px",
        "labels/train/a.txt:8: box without area: corners",
        "labels/train/a.txt:9: bad row: not numbers",
        "labels/train/a.txt:10: box outside the image",
        "labels/train/b.txt: unusable label file: not UTF-8 but apparently UTF-16; save it as UTF-8",
        "images/train/d.png: unreadable image: cannot be decoded",
        "labels/train/sub/c.txt:1: unknown class: class 5",
        "labels/train/sub/c.txt:2: box outside the image",
        "labels/train/sub/c.txt:1: unusable label file: no row can be used: class 5 is not among the classes (0 to 2)",
        "labels/train/e.txt:1: box without area",
        "labels/train/e.txt:1: unusable label file: no row can be used: the boxes have no area",
        "labels/train/ü.txt: missing label file",
    )
    report = list(load_damaged(damaged, tmp_path).report.lines)
    for start in starts:
        assert sum(line.startswith(start) for line in report) == 1, start
    assert len(report) == len(starts)


def test_a_scan_does_not_change_a_damaged_data_set(damaged, tmp_path):
    before = tree_state(damaged)
    load_damaged(damaged, tmp_path)
    assert tree_state(damaged) == before


def test_what_can_be_used_of_a_damaged_data_set_is_in_the_index(damaged, tmp_path):
    index = load_damaged(damaged, tmp_path)
    assert list(index.paths) == ["images/train/a.jpg", "images/train/ü.jpg"]
    assert index.incomplete.tolist() == [True, False]
    usable_rows = [[0, 0.5, 0.5, 0.2, 0.2], [1, 0.85, 0.5, 0.3, 0.2], [1, 0.5, 0.5, 0.1, 0.2]]
    np.testing.assert_allclose(index.labels(0), usable_rows, atol=1e-7)


def test_the_report_counts_defects_and_what_they_cost(damaged, tmp_path):
    report = load_damaged(damaged, tmp_path).report
    totals = report.totals
    assert (totals["images"], totals["backgrounds"], totals["boxes"]) == (2, 1, 3)
    assert (totals["bad row"], totals["unknown class"], totals["box without area"]) == (2, 2, 3)
    assert report.problems == 17
    ledger = report.ledger
    assert (ledger.used_images, ledger.lost_images) == (2, 4)  # b, d, c, e
    assert (ledger.used_objects, ledger.lost_objects) == (4, 9)  # six of a, two of c, one of e; those of b are unknown


def test_the_log_sums_up_the_defects_and_names_the_report(damaged, tmp_path, lines):
    index = load_damaged(damaged, tmp_path)
    message, *_ = take_messages(lines)
    start = "train: 2 images, 1 background (1 without a label file), 3 boxes, 17 problems (3 box without area, "
    assert message.startswith(start)
    report = Path(message.split("report: ")[1])
    assert report.read_text(encoding="utf-8").splitlines()[1:] == list(index.report.lines)


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_data_set_with_too_many_defects_is_refused_with_their_reasons(damaged, tmp_path, is_cached):
    if is_cached:
        load_damaged(damaged, tmp_path)
    with refused(
        "set/d.yaml: 'train': 4 of 6 images and 9 of 13 labeled objects can't be used (--max-bad is 0.4): "
        "unusable label file: labels/train/b.txt: not UTF-8 but apparently UTF-16; save it as UTF-8, "
        "such as with iconv -f UTF-16 -t UTF-8; unreadable image: images/train/d.png: cannot be decoded "
        "(damaged, or not an image); unusable label file: labels/train/e.txt:1: no row can be used: the "
        "boxes have no area; and 5 other reasons; report: ..."
    ):
        load(damaged, tmp_path / "cache", max_bad=0.4)


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e999"])
@LABELS
def test_files_with_non_finite_labels_are_bad(root, tmp_path, label, number):
    """Even if other rows of the file are valid, the object's pixels would be trained as background."""
    text = (root / "instances.json").read_text().replace('"bbox": [8, ', f'"bbox": [{JSON_NUMBERS[number]}, ')
    (root / "instances.json").write_text(text)
    (root / "voc/a.xml").write_text((root / "voc/a.xml").read_text().replace("<xmin>8<", f"<xmin>{number}<"))
    (root / "labels/train/a.txt").write_text(f"1 0.5 0.5 0.1 0.1\n0 0.5 {number} 0.5 0.5\n")
    write_yaml(root, label)
    with refused(
        "set/d.yaml: 'train': 1 of 5 images and 2 of 4 labeled objects can't be used (--max-bad is 0.1): unusable "
        "label file: ...2: a number is not finite; report: ..."
    ):
        load(root, tmp_path / "cache")
    index = load(root, tmp_path / "cache", max_bad=0.5)
    assert "images/train/a.jpg" not in list(index.paths)
    assert index.report.totals["number not finite"] == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0 0.5 0.5 0.1 0.1 0.9", "6 fields, expected 5 (class cx cy w h); a confidence column?;"),
        ("0,0.5,0.5,0.1,0.1", "fields are separated by commas, expected spaces;"),
        ("cat 0.5 0.5 0.1 0.1", "the class is not a number; expected its position in the names, from 0;"),
        ("0 320 240 20 20", "the boxes are outside the image; coordinates in pixels?;"),
    ],
)
def test_the_commonest_cause_of_unusable_labels_is_said_once(root, tmp_path, row, message):
    for number, name in enumerate(("a", "b", "sub/c")):
        (root / f"labels/train/{name}.txt").write_text(f"\n{row}{number}\n{row}\n")
    (root / "labels/train/d.txt").write_text("7 0.5 0.5 0.1 0.1\n")
    with refused(
        "set/d.yaml: 'train': 4 of 5 images and 7 of 7 labeled objects can't be used (--max-bad is 0.1): unusable "
        f"label file: 3 images with 6 objects, first labels/train/a.txt:2: no row can be used: {message} unusable "
        "label file: labels/train/d.txt:1: no row can be used: class 7 is not among the classes (0 to 2); report: ..."
    ):
        load(root, tmp_path / "cache")


@pytest.mark.parametrize("failing", ["images/train/b.png", "labels/train/b.txt", "labels/train"])
def test_a_failing_disk_does_not_change_the_data_set(root, tmp_path, monkeypatch, failing):
    """An image that was left out or treated as background would stay so: names and times of its files do not change."""

    def fails_there(call):
        def called(path, *rest, **options):
            if str(path).endswith(failing):
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            return call(path, *rest, **options)

        return called

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fails_there(os.open))
        patch.setattr(os, "stat", fails_there(os.stat))
        with pytest.raises(OSError, match=f"Input/output error.*{failing}"):
            load(root, tmp_path / "cache", max_bad=1.0)
    index = load(root, tmp_path / "cache")
    assert len(index) == 5
    assert len(index.classes) == 4
