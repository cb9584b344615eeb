"""The images and classes that a run uses, and where in the label files they are."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import yaml

from data.index.index_settings import IndexSettings
from data.index.load import CheckScan, load_index, scan_for_check
from data.source.dataset_yaml import load_dataset_spec
from engine.issues.issue import CheckedSplit
from tests.helpers.editable_set import EditableSet
from tests.helpers.synthetic_index import smooth_image
from tests.helpers.tiny import write_dataset

BAD_ROW = "1 0.5 0.5 0.2\n"


@pytest.fixture
def data(tmp_path) -> EditableSet:
    """The second of four images has a cat, and a row that may have been a dog."""
    data = EditableSet(tmp_path / "set")
    data.write("train/1", "0 0.3 0.3 0.3 0.3\n" + BAD_ROW)
    return data


def settings(tmp_path, **more) -> IndexSettings:
    return IndexSettings(cache_dir=str(tmp_path / "cache"), progress=False, max_bad=0.5, workers=0, **more)


def places(scanned: CheckScan) -> list[str]:
    """The image of each box, and where its label is."""
    index = scanned.index
    split = CheckedSplit("train", index, scanned.scans)
    boxes = [split.box(row) for row in range(len(index.classes))]
    return [f"{index.paths[split.image_of(row)]} {box.where}" for row, box in enumerate(boxes)]


def test_a_check_logs_the_notes_also_if_too_much_is_lost(tmp_path, caplog):
    path = write_dataset(tmp_path / "set", train=4, val=1)
    for number, text in enumerate(["", "", "", "0 0.5 0.5 0.2 0.2\nx\ny\n"]):
        (tmp_path / "set" / "labels" / "train" / f"00{number}.txt").write_text(text)
    with caplog.at_level(logging.INFO, "lockstep"):
        refusals = scan_for_check(load_dataset_spec(path), "train", settings(tmp_path)).refusals
    assert ["2 of 3 labeled objects can't be used" in refusal for refusal in refusals] == [True]
    assert "train: 3 of 4 labeled images have no object" in caplog.text


@pytest.mark.parametrize("change", [{"ignore": ["cat"]}, {"--classes": ["dog"]}, {"fraction": 0.5}])
def test_boxes_of_a_part_of_the_images_keep_their_places(data, tmp_path, change):
    content = yaml.safe_load(data.yaml.read_text())
    data.yaml.write_text(yaml.safe_dump(content | {"ignore": change.get("ignore", [])}))
    spec = load_dataset_spec(data.yaml).use_classes(change.get("--classes", []))
    scanned = scan_for_check(spec, "train", settings(tmp_path, fraction=change.get("fraction", 1.0)))
    index = scanned.index
    assert len(index) < 4
    stems = [image.removesuffix(".png").rpartition("/")[2] for image in index.paths]
    expected_images = np.repeat(stems, np.diff(index.offsets))
    lines = {"ignore": [1, 2], "--classes": [2]}.get(next(iter(change)))
    for i, place in enumerate(places(scanned)):
        stem = expected_images[i]
        assert place.startswith(f"images/train/{stem}.png labels/train/{stem}.txt:")
        if lines:
            assert place.endswith(f":{lines[i % len(lines)]}")


def test_boxes_of_joined_sets_keep_their_places(data, tmp_path):
    """In both, an image is left out by the joining YAML; in the second, one more by its own."""
    other = EditableSet(tmp_path / "other")
    other.add("train/4", smooth_image(np.random.default_rng(1), 128, 160), BAD_ROW + "2 0.5 0.5 0.2 0.2\n")
    other.write("train/0", "0 0.3 0.3 0.3 0.3\n" + BAD_ROW)
    content = {"train": "images/train", "names": ["cat", "dog", "cow"], "classes": {"cow": "ignore"}}
    other.yaml.write_text(yaml.safe_dump(content))
    (tmp_path / "both.yaml").write_text("train: [set/data.yaml, other/data.yaml]\n")
    spec = load_dataset_spec(tmp_path / "both.yaml").use_classes(["dog"])
    scanned = scan_for_check(spec, "train", settings(tmp_path))
    images = [f"set/images/train/{i}.png" for i in (0, 2, 3)] + [f"other/images/train/{i}.png" for i in (1, 2, 3)]
    assert list(scanned.index.paths) == images
    assert places(scanned) == [
        f"{image} {image.replace('images', 'labels').replace('.png', '.txt')}:2" for image in images
    ]


@pytest.mark.parametrize(("images", "level"), [(4, logging.WARNING), (120, logging.INFO)])
def test_images_left_out_for_lost_labels_are_named_and_the_labels_are_lost(data, tmp_path, caplog, images, level):
    """One image of four is enough for a warning. The ledger counts the row, but no image, whose other classes are
    used."""
    for i in range(4, images):
        data.add(f"train/{i}", smooth_image(np.random.default_rng(i), 16, 16))
    spec = load_dataset_spec(data.yaml)
    with caplog.at_level(logging.INFO, "lockstep"):
        index = load_index(spec.use_classes(["dog"]), "train", settings(tmp_path))
    assert len(index) == images - 1
    assert (index.report.ledger.lost_images, index.report.ledger.lost_objects) == (0, 1)
    (record,) = [record for record in caplog.records if "no object of the classes in use" in record.message]
    assert record.levelno == level
    assert f"'train': 1 of {images} images left out" in record.message
    assert len(load_index(spec, "train", settings(tmp_path))) == images
