"""Entries of a JSON that several splits share get to their images by literal names, or by folders and name."""

from __future__ import annotations

import pytest
import yaml

from data.split_files import OtherImages, SplitPlaces
from tests.helpers.json_set import SPLITS, JsonSet, entries_of, image_files, load, lost, match


@pytest.mark.parametrize("is_in_root", [True, False])
def test_a_name_below_the_data_sets_folder_may_also_be_one_below_a_splits(tmp_path, is_in_root):
    """train/0.png lies in two folders. The other names tell which one is meant."""
    json_set = JsonSet(tmp_path)
    for i in range(3):
        json_set.add(f"train/{i}.png", 1, style="{path}" if is_in_root else "{below}")
        json_set.add(f"val/train/{i}.png", 3, style="{path}" if is_in_root else "{below}")
        json_set.add(f"val/1{i}.png", 2, style="{path}" if is_in_root else "{below}")
    data = json_set.describe(train="train", val="val")
    for split, objects in (("train", [1, 1, 1]), ("val", [2, 2, 2, 3, 3, 3])):
        index = load(data, split)
        assert index.report.ledger.lost_objects == 0
        assert [int(end - start) for start, end in zip(index.offsets, index.offsets[1:])] == objects


def test_entries_match_literally_or_by_name_and_folders_or_by_name_only():
    entries = entries_of(["images/train/0.png", "test/1.png", "D:/set/val/2.png"])
    val = SplitPlaces(images=[(image,) for image in image_files("images/val", ["2.png"])], folders=["images/val"])
    others = OtherImages(this=SplitPlaces(folders=["images/train"]), later=val)
    matched = match(entries, image_files("images/train", ["0.png", "1.png"]), others)
    assert matched.entry_of == {0: entries[0], 1: entries[1]}
    assert matched.in_other_folders == [1]
    assert matched.unmatched == []


@pytest.mark.parametrize("first", ["images", "train.txt"])
def test_the_cached_index_is_not_that_of_other_names_in_the_split(tmp_path, first):
    """In a list, an image has a bare name, which the JSON may give to two images."""
    json_set = JsonSet(tmp_path)
    for path, count in (("images/x.png", 1), ("images/a/x.png", 2), ("images/y.png", 1)):
        json_set.add(path, count, style="{below}")
    (tmp_path / "train.txt").write_text("images/x.png\nimages/a/x.png\nimages/y.png\n")
    expected = {"images": 4, "train.txt": 3}  # "x.png" is ambiguous in the list
    data = json_set.describe()
    for train in (first, *sorted(expected.keys() - {first})):
        data.write_text(yaml.safe_dump({"train": train, "names": ["a"], "annotations": "all.json"}))
        index = load(data, "train", use_cache=True, cache_dir=str(tmp_path / "cache"))
        assert index.report.ledger.used_objects == expected[train]


@pytest.mark.parametrize("file_name", ["/home/u/{}", "D:\\q\\{}"])
def test_names_of_another_machine_match_the_shallower_of_two_images(tmp_path, file_name):
    """All folders of train/0.png agree, as far as it has any, with those in its name."""
    json_set = JsonSet(tmp_path)
    for i in range(3):
        json_set.add(f"val/train/{i}.png", 3, style=file_name.format("{path}"))
        json_set.add(f"train/{i}.png", 1, style=file_name.format("{path}"))
    data = json_set.describe(train="train", val="val")
    assert [load(data, split).report.ledger.used_objects for split in SPLITS] == [3, 9]
    assert lost(data) == [(0, 0), (0, 0)]


def test_entries_of_another_machine_are_not_reported(tmp_path):
    """None of the folders is known here, so that they do not show that an image is another one."""
    json_set = JsonSet(tmp_path)
    for i in range(4):
        json_set.write_image(f"images/train/{i}.png")
        json_set.add(f"/home/u/{'ab'[i % 2]}/{i}.png", exists=False)
    report = load(json_set.describe(train="images/train", val="images/train"), "train").report
    assert report.lines == []
    assert report.ledger.used_objects == 4


def test_entries_of_another_machine_name_the_folder_of_a_split_that_is_the_data_sets(tmp_path):
    json_set = JsonSet(tmp_path)
    for folder in "ab":
        for i in range(4):
            json_set.add(f"{folder}/{folder}{i}.png", style="{path}" if i % 2 else "/home/u/{path}")
    report = load(json_set.describe(train=".", val="a"), "train").report
    assert report.ledger.used_objects == 8
    assert report.lines == []


@pytest.mark.parametrize("style", ["/home/test/set/{path}", "https://example.org/{path}"])
def test_no_entry_is_in_another_folder_than_that_of_the_data_set(tmp_path, style):
    """Images in its subfolders have one folder in common with their entries, the others none."""
    json_set = JsonSet(tmp_path)
    for i in range(4):
        json_set.add(f"{i}.png", style=style)
        json_set.add(f"a/{4 + i}.png", style=style)
        json_set.add(f"D:/x/{8 + i}.png", exists=False)
        json_set.write_image(f"{8 + i}.png")
    index = load(json_set.describe(train=".", val="."), "train")
    assert len(index) == 12
    assert not index.report.lines
