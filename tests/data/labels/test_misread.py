"""Signs that labels or pixels mean something else than in their format, and the advice about them."""

from __future__ import annotations

import logging
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.labels.findings import MISREAD
from data.labels.label_format import CENTERS, CORNERS, TOP_LEFT
from data.source.dataset_yaml import load_dataset_spec
from engine.report.photos import Album, Overlay, PhotoFile
from tests.helpers.editable_set import EditableSet
from tests.helpers.html_page import HtmlPage, photos_of
from tests.helpers.messages import refused
from tools.check.checks.scan import scan_issues
from tools.check.scan_splits import scan_dataset


@pytest.fixture
def data(tmp_path: Path) -> EditableSet:
    return EditableSet(tmp_path / "set")


def advice_of(data: EditableSet, tmp_path: Path, caplog, **options) -> str:
    """The warning of training, besides that of the gate, which a cached index gives too, and the issue of a check."""
    logger = logging.getLogger("lockstep")
    spec = load_dataset_spec(data.yaml)
    messages = []
    logger.propagate = True
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "lockstep"):
            index = load_index(
                spec, "train", IndexSettings(cache_dir=str(tmp_path / "cache"), progress=False, **options)
            )
        messages += [text for text in caplog.messages if "decod" not in text and "can't be used" not in text]
    logger.propagate = False
    (split,) = scan_dataset(spec, ("train",), workers=0)
    found = [issue.text for issue in scan_issues(split) if issue.kind == MISREAD]
    assert messages == [f"train: {text}" for text in found * 2]
    assert sum(MISREAD in line for line in index.report.lines) == len(found)  # which report.html lists
    return "".join(found)


def boxes(seed: int = 0, count: int = 40) -> np.ndarray:
    """Corners of boxes all over an image, as fractions."""
    rng = np.random.default_rng(seed)
    low = rng.uniform(0, 0.6, (count, 2))
    return np.c_[low, low + rng.uniform(0.05, 0.4, (count, 2))]


WRITTEN = {
    CENTERS: lambda c: np.c_[(c[:, :2] + c[:, 2:]) / 2, c[:, 2:] - c[:, :2]],
    TOP_LEFT: lambda c: np.c_[c[:, :2], c[:, 2:] - c[:, :2]],
    CORNERS: lambda c: c,
}


@pytest.mark.parametrize("notation", WRITTEN)
def test_another_notation_of_yolo_txt_is_named(data, tmp_path, caplog, notation):
    rows = WRITTEN[notation](boxes())
    for i in range(4):
        text = "".join(f"0 {' '.join(f'{v:.6f}' for v in row)}\n" for row in rows[i::4])
        data.write(f"train/{i}", text)
    advice = advice_of(data, tmp_path, caplog, max_bad=1.0)
    assert advice.endswith(f"do as {notation}: convert them to {CENTERS}") if notation != CENTERS else advice == ""
    assert ("of 40 boxes do not fit into their images as cx cy w h, but all do" in advice) == (notation != CENTERS)


@pytest.mark.parametrize("notation", [CENTERS, TOP_LEFT])
def test_another_notation_of_voc_is_named(data, tmp_path, caplog, notation):
    (data.root / "voc").mkdir()
    numbers = WRITTEN[notation](boxes()) * [160, 128, 160, 128]
    tags = ("xmin", "ymin", "xmax", "ymax")
    for i in range(4):
        rows = ("".join(f"<{t}>{v:.3f}</{t}>" for t, v in zip(tags, row)) for row in numbers[i::4])
        objects = "".join(f"<object><name>cat</name><bndbox>{row}</bndbox></object>\n" for row in rows)
        (data.root / "voc" / f"{i}.xml").write_text(f"<annotation>\n{objects}</annotation>")
    content = {"train": "images/train", "names": ["cat"], "annotations": {"train": "voc"}}
    data.yaml.write_text(yaml.safe_dump(content))
    assert f"all do as {notation}: convert them to {CORNERS}" in advice_of(data, tmp_path, caplog, max_bad=1.0)


def test_class_ids_that_start_at_1_get_advice(data, tmp_path, caplog):
    for i in range(4):
        data.write(f"train/{i}", "1 0.3 0.3 0.3 0.3\n2 0.7 0.7 0.2 0.2\n")
    advice = advice_of(data, tmp_path, caplog, max_bad=0.5)
    assert advice.startswith(
        "the class ids seem to start at 1 (4 rows of class 2, none of class 0); YOLO's start at 0: "
    )
    data.describe(["unused", "cat", "dog"])
    assert advice_of(data, tmp_path, caplog) == ""
    data.describe(["cat", "dog"])
    with refused(
        "set/data.yaml: 'train': 4 of 8 labeled objects can't be used (--max-bad is 0.1): unknown class: "
        "4 objects, first labels/train/0.txt:2: class 2 is not among the classes (0 to 1); the class ids "
        "seem to start at 1 (4 rows of class 2, none of class 0); YOLO's start at 0: subtract 1 from the "
        "first number of each row, or put an unused name before the others in 'names'; report: ..."
    ):  # half of the objects have no name
        load_index(
            load_dataset_spec(data.yaml), "train", IndexSettings(cache_dir=str(tmp_path / "cache"), progress=False)
        )
    data.write("train/0", "0 0.3 0.3 0.3 0.3\n2 0.7 0.7 0.2 0.2\n")  # a typing error
    assert advice_of(data, tmp_path, caplog, max_bad=0.5) == ""
    data.describe(["cat"])
    for i in range(4):
        data.write(f"train/{i}", "1 0.3 0.3 0.3 0.3\n")
    with refused(
        "set/data.yaml: the names don't match the labels: 4 of 4 objects in 'train' have a class that is "
        "not in 'names' (first: labels/train/0.txt:1: class 1 is not among the classes (0 to 0)); "
        "the class ids seem to start at 1 (4 rows of class 1, none of class 0); YOLO's start at 0: "
        "subtract 1 from the first number of each row, or put an unused name before the others in 'names'"
    ):  # most objects have no name
        load_index(
            load_dataset_spec(data.yaml), "train", IndexSettings(cache_dir=str(tmp_path / "cache"), progress=False)
        )


@pytest.mark.parametrize(
    ("bits", "declared", "is_dark"), [(12, 8, True), (12, 12, False), (16, 8, False), (10, 16, True)]
)
def test_16_bit_files_of_fewer_bits_are_told_to_name_them(data, tmp_path, caplog, bits, declared, is_dark):
    rng = np.random.default_rng(0)
    for i in range(4):
        image = rng.integers(0, 1 << bits, (128, 160, 3), dtype=np.uint16)
        data.image(f"train/{i}").write_bytes(cv2.imencode(".png", image)[1].tobytes())
    with open(data.yaml, "a") as file:
        file.write(f"bits: {declared}\n")
    advice = advice_of(data, tmp_path, caplog)
    assert (f"write 'bits: {bits}' in the data set's YAML" in advice) == is_dark
    source = PhotoFile(str(data.image("train/0")), 128, 160)
    (picture,) = Album(max_bytes=100_000).pictures(source, source.whole(), 160, Overlay("photo", "photo", ()))
    assert photos_of(HtmlPage(picture.picture))["photo"].max() > 200
