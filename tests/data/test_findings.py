"""Rule D8: a dozen kinds of findings; information below 1 %, a warning from there, an error above ``--max-bad``."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from data.findings import BAD_ROW, FITTED, UNSUPPORTED
from tests.data.data_set import DataSet, coco, load, open_set, refusal, voc

BAD = "0 0.5 0.5 0.2\n"


def write(data: DataSet, good: int, bad: int) -> None:
    """Writes two images with as many rows."""
    data.pairs("train/x", rows="".join(f"0 {0.2 + i / 1000} 0.5 0.2 0.2\n" for i in range(good)) + BAD * bad)
    data.pairs("train/empty", rows="")
    data.yaml()


@pytest.mark.parametrize(("good", "bad", "level"), [(199, 1, logging.INFO), (99, 1, logging.WARNING)])
def test_a_loss_is_information_below_one_percent_and_a_warning_from_there(data, lines, good, bad, level):
    write(data, good, bad)
    for _ in range(2):  # scanned, then cached
        lines.clear()
        data.index()
        levels = {record.levelno for record in lines.records if "x.txt" in record.getMessage()}
        assert levels == {level}


def test_a_share_is_of_images_or_objects_whatever_the_number_of_findings(data, lines):
    data.images(*(f"images/train/{i}.png" for i in range(300)))
    for i in range(300):
        objects = [("a", 5, 5, 20, 20)] * (40 if i == 0 else 1)
        data.file(f"voc/{i}.xml", voc(*objects, hw=(120, 160) if i == 0 else (60, 80)))
        data.file(f"images/train/{i}.heic", b"")
    data.yaml(train="images/train", annotations={"train": "voc"})
    data.index()
    warnings = [record.getMessage() for record in lines.records if record.levelno == logging.WARNING]
    assert sum(UNSUPPORTED in text and "300" in text for text in warnings) == 1
    assert sum(FITTED in text and "40" in text for text in warnings) == 1


@pytest.mark.parametrize(("max_bad", "is_refused"), [(0.1, False), (0.0999, True), (0, True), (1, False)])
def test_a_loss_above_max_bad_is_an_error(data, max_bad, is_refused):
    write(data, 18, 2)
    for _ in range(2):
        if not is_refused:
            data.index(max_bad=max_bad)
            continue
        message = refusal(lambda: data.index(max_bad=max_bad))
        assert str(data.data) in message
        assert "labels/train/x.txt" in message
        assert f"{max_bad:g}" in message


def test_the_message_names_a_file_that_lists_all_findings(data, tmp_path):
    write(data, 1, 5)
    message = refusal(lambda: data.index(max_bad=0.1, cache_dir=str(tmp_path / "cache")))
    (path,) = re.findall(rf"{tmp_path}/cache/\S+\.txt", message)
    lines = Path(path).read_text().splitlines()
    for row in range(2, 7):
        assert sum(line.startswith(f"labels/train/x.txt:{row}: {BAD_ROW}") for line in lines) == 1


def test_the_boxes_of_each_class_are_told_and_a_class_of_ignore_regions_is_named(data, lines):
    """CVAT exports ellipses as crowds."""
    content = coco([("x.png", [(1, 5, 5, 20, 20), (2, 9, 9, 9, 9), (2, 30, 5, 9, 9)])])
    for annotation in content["annotations"][1:]:
        annotation["iscrowd"] = 1
    data.images("images/train/x.png")
    data.file("a.json", content)
    data.yaml(train="images/train", annotations={"train": "a.json"})
    data.index()
    assert any("a 1, b 0" in record.getMessage() for record in lines.records)
    (line,) = [record.getMessage() for record in lines.records if record.levelno == logging.WARNING]
    for word in ("'b'", "2", "iscrowd"):
        assert word in line


def test_a_held_out_or_chosen_part_is_judged_by_all_labels(data):
    write(data, 18, 2)
    refusal(lambda: data.index(max_bad=0.05, fraction=0.5))
    refusal(lambda: data.index(max_bad=0.05, single_cls=True))
    refusal(lambda: load(open_set(data.data, ["train"], classes=("b",)), max_bad=0.05))
