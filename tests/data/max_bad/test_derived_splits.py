"""What is derived from a split (a part, tiles, a joined set, shards, a copy) is judged by all labels of the split."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest
import yaml

from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.samples.tiles import TiledIndex
from data.samples.weights import tile_weights
from data.source.dataset_spec import DataSource
from data.source.dataset_yaml import load_dataset_spec
from data.source.open import open_data
from tests.data.max_bad.twenty_images import (
    EACH_FORMAT,
    HEIGHT,
    IMAGES,
    NAMES,
    WIDTH,
    edit_rows,
    flatten_dogs,
    load,
    one_good_row_of_ten,
    rename_every_second_class,
    with_unknown_class,
    write_yaml,
)
from tests.helpers.three_formats import write_three_formats
from tools.shard.write_shards import write_set
from utils.config.settings import Hyperparameters
from utils.distributed.context import DistributedContext
from utils.errors import UserError

SELECTIONS = {
    "classes": ({"classes": {"cat": "animal", "dog": "animal"}}, {}, lambda spec: spec),
    "ignore": ({"ignore": ["dog"]}, {}, lambda spec: spec),
    "--classes": ({}, {}, lambda spec: spec.use_classes(["cat"])),
    "--fraction": ({}, {"fraction": 0.2}, lambda spec: spec),
    "--val-fraction": ({}, {}, lambda spec: spec.hold_out([f"images/train/{name}" for name in IMAGES[:4]])),
    "tile": ({"tile": 32}, {}, lambda spec: spec),
    "without repeats": ({}, {"repeats": False}, lambda spec: spec),
}


@EACH_FORMAT
@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_selection_from_a_split_is_judged_by_all_of_its_labels(root, reader, selection):
    content, options, change = SELECTIONS[selection]
    path = write_yaml(root, reader, **content)
    load(path, change=change, **options)
    rename_every_second_class(root)
    for split in ("train", "val"):
        for _ in range(2):
            with pytest.raises(UserError, match="20 of 40 labeled objects can't be used"):
                load(path, split, change, **options)
    assert len(load(path, change=change, max_bad=0.6, **options))


@EACH_FORMAT
def test_single_cls_takes_all_classes_and_loses_other_rows(root, reader):
    path = write_yaml(root, reader)
    rename_every_second_class(root)
    index = load(path, single_cls=True)  # which need no names
    assert len(index.classes) == 40
    assert index.report.ledger.losses == ()
    for name in IMAGES:
        edit_rows(root, name, one_good_row_of_ten)
    with pytest.raises(UserError, match="180 of 200 labeled objects can't be used"):
        load(path, single_cls=True)


@EACH_FORMAT
def test_ignored_classes_do_not_count_as_lost(root, caplog, reader):
    path = write_yaml(root, reader, ignore=["dog"])
    for change in (lambda spec: spec, lambda spec: spec.use_classes(["cat"])):
        index = load(path, change=change)
        assert index.report.ledger.losses == ()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@EACH_FORMAT
def test_an_image_with_lost_rows_is_no_background_for_chosen_classes(root, reader):
    """Its lost row may be one of the class."""
    path = write_yaml(root, reader)
    edit_rows(root, IMAGES[0], lambda rows: [(7, *rows[0][1:]), rows[1]])  # its only dog is left
    edit_rows(root, IMAGES[1], lambda rows: rows[1:])
    whole = load(path)
    cats = load(path, change=lambda spec: spec.use_classes(["cat"]))
    assert list(cats.paths) == [f"images/train/{name}" for name in IMAGES[1:]]
    assert cats.report.totals["backgrounds"] == 1
    assert list(whole.paths) == [f"images/train/{name}" for name in IMAGES]
    assert len(load(path, change=lambda spec: spec.use_classes(["dog"]))) == 20
    assert len(load(write_yaml(root, reader, ignore=["dog"]))) == 19


@EACH_FORMAT
def test_a_part_of_a_joined_set_is_judged_by_itself(root, tmp_path, reader):
    path = write_yaml(root, reader)
    other = tmp_path / "other"
    rows = {f"{i:03}.png": [(0, 5, 10, 30, 40)] for i in range(200)}
    write_three_formats(other, NAMES, dict.fromkeys(rows, (HEIGHT, WIDTH)), rows)
    both = tmp_path / "both.yaml"
    both.write_text(yaml.safe_dump({"train": [str(write_yaml(other, reader)), str(path)]}))
    assert len(load(both)) == 220
    rename_every_second_class(root)
    with pytest.raises(UserError, match=re.escape(f"{path}: 'train': 20 of 40 labeled objects can't be used")):
        load(both)
    ledger = load(both, max_bad=0.6).report.ledger
    assert (ledger.used_images, ledger.used_objects, ledger.lost_objects) == (220, 220, 20)


@EACH_FORMAT
def test_what_was_labeled_is_judged_before_a_part_of_it_is_chosen(root, caplog, reader):
    path = write_yaml(root, reader)
    flatten_dogs(root)
    chosen = {
        "fraction": lambda: load(path, fraction=0.3),
        "classes": lambda: load(path, change=lambda spec: spec.use_classes(["dog"])),
        "held out": lambda: load(path, "val", change=lambda spec: spec.hold_out(["of another data set"])),
    }
    with caplog.at_level(logging.INFO, "lockstep"):
        for choose in chosen.values():
            with pytest.raises(UserError, match="'train': 20 of 40 labeled objects can't be used"):
                choose()
    assert not [line for line in caplog.messages if not line.startswith("scanning")]


@EACH_FORMAT
def test_shards_keep_the_ledger(root, tmp_path, reader):
    spec = load_dataset_spec(write_yaml(root, reader))
    for name in IMAGES[:4]:
        edit_rows(root, name, with_unknown_class)
    write_set(spec, tmp_path / "whole", 10**9, IndexSettings())
    assert load(tmp_path / "whole/data.yaml").report.ledger.lost_objects == 4
    assert load(tmp_path / "whole/data.yaml").incomplete.sum() == 4
    rename_every_second_class(root)
    with pytest.raises(UserError, match="20 of 40 labeled objects can't be used"):
        write_set(spec, tmp_path / "half", 10**9, IndexSettings())
    write_set(spec, tmp_path / "half", 10**9, IndexSettings(max_bad=0.6))
    with pytest.raises(UserError, match="20 of 40 labeled objects can't be used"):
        load(tmp_path / "half/data.yaml")
    assert len(load(tmp_path / "half/data.yaml", max_bad=0.6)) == 20


@EACH_FORMAT
def test_a_staged_copy_is_judged_like_its_original(root, tmp_path, reader):
    path = write_yaml(root, reader)
    source = DataSource(str(path), ("train", "val"), stage=str(tmp_path / "stage"))
    assert len(load_index(open_data(source, DistributedContext.single()), "train", IndexSettings(progress=False))) == 20
    rename_every_second_class(root)
    spec = open_data(source, DistributedContext.single())
    with pytest.raises(UserError, match="20 of 40 labeled objects can't be used"):
        load_index(spec, "train", IndexSettings(progress=False))


def test_rows_of_lists_that_are_no_images_are_counted_also_in_a_staged_copy(root, tmp_path):
    path = write_yaml(root, "yolo", train="list.txt")
    rows = ["# the images", '"images/train/00.png"', "images/train/01.png 0 1", "images/train/gone.png"]
    rows += [f"images/train/{name}" for name in IMAGES[4:]]
    (root / "list.txt").write_text("\n".join(rows))
    spec = load_dataset_spec(path)
    staged = open_data(DataSource(str(path), ("train",), stage=str(tmp_path / "stage")), DistributedContext.single())
    for each in (spec, staged):
        with pytest.raises(UserError, match="4 of 20 images can't be used") as refused:
            load_index(each, "train", IndexSettings(progress=False))
        assert "bad row of a list: 3 images, first list.txt:1: '# the images' is not the path" in str(refused.value)
    index = load_index(spec, "train", IndexSettings(progress=False, max_bad=0.2))
    assert len(index) == 16


def test_tiles_of_an_image_with_lost_rows_are_no_backgrounds(tmp_path):
    root = tmp_path / "large"
    rows = {f"{i}.png": [(0, 5, 5, 30, 30)] for i in range(2)}
    write_three_formats(root, NAMES, dict.fromkeys(rows, (128, 128)), rows)
    path = write_yaml(root, "yolo", tile=64)
    with open(root / "labels/train/0.txt", "a") as file:
        file.write("7 0.8 0.8 0.1 0.1\n")
    tiles = TiledIndex(load(path, max_bad=0.5), 64, hyp=Hyperparameters())
    weights = tile_weights(tiles, 1.0)
    has_object = np.bincount(tiles.tile_index.image_of_box, minlength=len(tiles.tile_index)) > 0
    assert weights[has_object].tolist() == [1.0, 1.0]
    assert (weights[~has_object & (tiles.image == 0)] == 0).all()
    assert (weights[~has_object & (tiles.image == 1)] > 0).all()
