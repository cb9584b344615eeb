"""Images that are in no split are missing from the split whose folders agree best with their file name."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from data.source.dataset_yaml import load_dataset_spec
from data.source.files import list_split
from tests.helpers.json_set import SPLITS, JsonSet, load, lost, numbered_set


@pytest.fixture
def json_set(tmp_path: Path) -> JsonSet:
    return numbered_set(tmp_path)


def test_an_image_of_no_split_does_not_explain_one_that_is_missing_in_another_folder(json_set):
    for i in range(5):
        json_set.add(f"images/val/{200 + i}.png", 2, exists=False)
        json_set.write_image(f"images/thumbs/{200 + i}.png")
    assert lost(json_set.describe()) == [(0, 0), (5, 10)]


@pytest.mark.parametrize("val", ["val.txt", "images/val"])
def test_missing_rows_of_one_file_name_count_in_the_split_of_their_folder(json_set, val):
    json_set.add("images/train/50.png", exists=False)
    json_set.add("images/val/50.png", 3, exists=False)
    for split, start in (("train", 0), ("val", 100)):
        names = [*range(start, start + 10), 50]
        (json_set.root / f"{split}.txt").write_text("".join(f"images/{split}/{name}.png\n" for name in names))
    assert lost(json_set.describe(train="train.txt", val=val)) == [(1, 1), (1, 3)]


@pytest.mark.parametrize("style", ["images/test/{}.png", "{}.png"])
@pytest.mark.parametrize("num_downloaded", [0, 1])
def test_entries_of_a_list_whose_images_are_not_downloaded_are_not_lost_in_another_split(
    json_set, style, num_downloaded
):
    for i in range(8):
        json_set.add(style.format(200 + i), 2, exists=False)
    for i in range(num_downloaded):
        json_set.write_image(f"images/test/{200 + i}.png")
    (json_set.root / "test.txt").write_text("".join(f"images/test/{200 + i}.png\n" for i in range(8)))
    assert lost(json_set.describe(test="test.txt")) == [(0, 0), (0, 0)]


@pytest.mark.parametrize("missing", [{}, {"test": "images/test"}])
@pytest.mark.parametrize("file_name", ["images/train/c/50.png", "train/c/50.png", "/home/val/images/train/c/50.png"])
def test_a_loss_counts_in_the_split_whose_folder_would_contain_it(json_set, file_name, missing):
    """Only val has a folder of that name, or a split is not downloaded."""
    json_set.add(file_name, 2, exists=False)
    if not missing:
        json_set.add("images/val/c/51.png")
    assert lost(json_set.describe(**missing)) == [(1, 2), (0, 0)]


@pytest.mark.parametrize(
    ("paths", "content"),
    [
        (("images/2021", "images/2022", "images/2023"), {"train": "train.txt", "val": "val.txt"}),
        (("x/a/train", "x/b/val", "x/b/extra"), {"train": "x/a/train", "val": "x/b/val"}),
    ],
)
def test_images_near_any_split_are_not_lost(tmp_path, paths, content):
    json_set = JsonSet(tmp_path)
    for split, folder in zip((*SPLITS, "extra"), paths):
        names = [f"{folder}/{split}{i}.png" for i in range(4)]
        for name in names:
            json_set.add(name)
        (tmp_path / f"{split}.txt").write_text("".join(f"{name}\n" for name in names))
    assert lost(json_set.describe(**content)) == [(0, 0), (0, 0)]


@pytest.mark.parametrize("style", ["{path}", "/home/test/data/{path}", "C:\\d\\{path}"])
@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize("below", ["x", "deep/x"])
def test_images_of_a_missing_subfolder_are_lost_in_no_other_split_with_such_a_folder(tmp_path, style, is_list, below):
    """The images of test/images are not downloaded. In val, the subfolder is gone."""
    json_set = JsonSet(tmp_path)
    for split in SPLITS:
        json_set.add(f"{split}/images/y/{split}.png", style=style)
    json_set.add(f"train/images/{below}/0.png", style=style)
    (tmp_path / "train.txt").write_text(f"train/images/y/train.png\ntrain/images/{below}/0.png\n")
    for i in range(1, 4):
        json_set.add(f"test/images/{below}/{i}.png", exists=False, style=style)
        json_set.add(f"val/images/{below}/{i + 10}.png", 2, exists=False, style=style)
    train = "train.txt" if is_list else "train/images"
    assert lost(json_set.describe(train=train, val="val/images", test="test/images")) == [(0, 0), (3, 6)]


def test_an_image_of_no_split_does_not_explain_one_in_a_subfolder_of_the_same_name(tmp_path):
    json_set = JsonSet(tmp_path)
    for split in SPLITS:
        json_set.add(f"{split}/{split}.png", style="/d/{path}")
    json_set.write_image("val_old/2020/x/0.png")
    json_set.add("val/2020/x/0.png", 3, exists=False, style="/d/{path}")
    assert lost(json_set.describe(train="train", val="val")) == [(0, 0), (1, 3)]


@pytest.mark.parametrize("layout", ["{}/images", "images/{}/data", "a/{}/img"])
@pytest.mark.parametrize("below", ["", "x/"])
def test_images_of_a_split_that_the_yaml_does_not_name_are_not_lost(tmp_path, layout, below):
    json_set = JsonSet(tmp_path)
    for split in (*SPLITS, "test"):
        for i in range(3):
            json_set.add(f"{layout.format(split)}/{below}{split}{i}.png")
    folders = {split: layout.format(split) for split in SPLITS}
    assert lost(json_set.describe(**folders)) == [(0, 0), (0, 0)]


def test_images_of_no_split_are_found_among_many_folders_with_different_subfolders(tmp_path):
    """As many pairs of a folder and another folder's subfolder as would take too long to try."""
    json_set = JsonSet(tmp_path)
    for split in SPLITS:
        names = [f"{split}{i}/{split}_frames{i}/{split}.png" for i in range(25)]
        for name in names:
            json_set.add(name)
        (tmp_path / f"{split}.txt").write_text("".join(f"{name}\n" for name in names))
        json_set.add(f"zz/{split}_frames9/old_{split}.png", 2)
    assert lost(json_set.describe(train="train.txt", val="val.txt")) == [(0, 0), (0, 0)]


def test_images_of_no_split_are_found_in_any_number_of_folders(json_set):
    for i in range(1010):
        folder = json_set.root / f"images/seq{i}"
        folder.mkdir()
        (folder / f"seq{i}.png").touch()
        json_set.add(f"images/seq{i}/seq{i}.png", exists=False)
    assert load(json_set.describe(), "train").report.ledger.lost_objects == 0


def test_a_list_of_many_folders_is_listed_in_time_in_proportion_to_them(tmp_path):
    """Each folder combined with the subfolders of all others would be tens of thousands of paths."""
    names = [f"seq{i}/frames{i}/0.png" for i in range(300)]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    (tmp_path / "train.txt").write_text("".join(f"{name}\n" for name in names))
    (tmp_path / "all.json").write_text("{}")
    (tmp_path / "data.yaml").write_text("train: train.txt\nannotations: all.json\nnames: [a]\n")
    start = time.process_time()
    listing = list_split(load_dataset_spec(tmp_path / "data.yaml"), "train")
    assert time.process_time() - start < 2
    assert len(listing.images) == len(names)
