"""Entries of another folder are used and reported, unless they seem to be of missing images of the same names."""

from __future__ import annotations

import pytest

from data.labels.findings import OTHER_FOLDER, UNLISTED
from data.split_files import OtherImages, SplitPlaces
from tests.helpers.json_set import SPLITS, JsonSet, entries_of, image_files, load, lost, match
from tests.helpers.messages import refused


@pytest.mark.parametrize("style", ["{path}", "/home/u/{path}"])
@pytest.mark.parametrize("is_val_missing", [False, True])
def test_an_image_without_entry_gets_no_boxes_of_an_image_of_another_split(tmp_path, style, is_val_missing):
    """Both splits are numbered from 0. Where train has images without entry, those of val were deleted."""
    json_set = JsonSet(tmp_path)
    for i in range(6):
        json_set.write_image(f"images/train/{i}.png")
        json_set.add(f"images/val/{i}.png", 3, exists=i < 4 and not is_val_missing, style=style)
        if i < 4:
            json_set.add(f"images/train/{i}.png", style=style)
    data = json_set.describe()
    index = load(data, "train")
    assert list(index.paths) == [f"images/train/{i}.png" for i in range(4)]
    assert (index.report.ledger.used_objects, index.report.ledger.lost_objects) == (4, 0)
    assert sum("doesn't name it; left out" in line for line in index.report.lines) == 2
    if not is_val_missing:
        assert lost(data) == [(0, 0), (2, 6)]
        lines = load(data, "val").report.lines
        assert sum("images; images/train/" in line and "is in another folder" in line for line in lines) == 2


@pytest.mark.parametrize("style", ["{path}", "{below}", "/home/u/{path}"])
def test_an_image_gets_no_boxes_from_a_folder_that_the_yaml_does_not_name(tmp_path, style):
    """All splits are numbered from 0. The images of test/ are not here, and two of train/ have no entry yet."""
    json_set = JsonSet(tmp_path)
    for i in range(6):
        json_set.write_image(f"images/train/{i}.png")
        json_set.add(f"images/val/1{i}.png", style=style)
        json_set.add(f"images/test/{i}.png", 4, exists=False, style=style)
        if i < 4:
            json_set.add(f"images/train/{i}.png", style=style)
    data = json_set.describe()
    index = load(data, "train")
    assert list(index.paths) == [f"images/train/{i}.png" for i in range(4)]
    assert lost(data) == [(6, 24), (0, 0)]
    folder = style.format(path="images/test", below="test")
    with refused(f"; if {folder} is a folder of another split, name it in the YAML"):
        load(data, "train", max_bad=0.1)


@pytest.mark.parametrize("style", ["images/train/{}.png", "{}.png"])
def test_an_entry_of_an_unknown_folder_is_reported_if_it_labels_an_image(tmp_path, style):
    json_set = JsonSet(tmp_path)
    for i in range(4):
        json_set.add(style.format(i), exists=False)
        json_set.write_image(f"images/train/{i}.png")
    json_set.add("images/test/4.png", 5, exists=False)
    json_set.write_image("images/train/4.png")
    report = load(json_set.describe(train="images/train", val="images/train"), "train").report
    (line,) = [line for line in report.lines if OTHER_FOLDER in line]
    assert "images/test/4.png" in line
    assert any("names 1 image in other folders" in note for note in report.notes)


def test_a_split_whose_folder_was_renamed_keeps_its_labels(tmp_path):
    """Only the names of two images are ambiguous, because the other split has them, too."""
    json_set = JsonSet(tmp_path)
    for i in range(40):
        json_set.write_image(f"images/train/{i}.png")
        json_set.add(f"images/train2017/{i}.png", exists=False)
    for i in (0, 1, *range(100, 110)):
        json_set.add(f"images/val2017/{i}.png")
    data = json_set.describe(val="images/val2017")
    assert [load(data, split).report.ledger.used_objects for split in SPLITS] == [38, 12]


@pytest.mark.parametrize("style", ["{path}", "/home/u/{path}"])
@pytest.mark.parametrize("layout", ["{}/images", "images/{}/data"])
@pytest.mark.parametrize("first", [0, 6])
def test_a_folder_name_that_all_splits_have_does_not_tell_the_split(tmp_path, layout, style, first):
    """The YAML does not name test. Half of train has no entry yet: it gets boxes of test only if test's numbers do not
    repeat, and then with a finding for each image."""
    json_set = JsonSet(tmp_path)
    for i in range(12):
        json_set.write_image(f"{layout.format('train')}/{i}.png")
        if i < 6:
            json_set.add(f"{layout.format('train')}/{i}.png", style=style)
        if i >= first:
            json_set.add(f"{layout.format('test')}/{i}.png", 2, exists=False, style=style)
    json_set.add(f"{layout.format('val')}/100.png", style=style)
    report = load(json_set.describe(**{split: layout.format(split) for split in SPLITS}), "train").report
    assert report.ledger.used_objects == (18 if first else 6)
    assert sum(OTHER_FOLDER in line for line in report.lines) == (6 if first else 0)


def test_images_without_entry_get_the_boxes_of_an_unknown_folder_with_a_note(tmp_path):
    """Whether test/5.png was moved to train or is another image, its name does not say. That val repeats names of train
    shows nothing about test."""
    json_set = JsonSet(tmp_path)
    for i in range(10):
        json_set.add(f"images/{'train' if i < 5 else 'test'}/{i}.png", exists=i < 5)
        json_set.write_image(f"images/train/{i}.png")
        if i < 5:
            json_set.add(f"images/val/{i}.png")
    report = load(json_set.describe(), "train").report
    assert report.ledger.used_objects == 10
    assert sum(OTHER_FOLDER in line for line in report.lines) == 5
    assert any("names 5 images in other folders" in note for note in report.notes)


@pytest.mark.parametrize("has_repetition", [False, True])
def test_names_of_former_folders_match_images_that_were_split_anew(tmp_path, has_repetition):
    json_set = JsonSet(tmp_path)
    for i in range(10):
        json_set.write_image(f"images/{'val' if i % 2 else 'train'}/{i}.png")
        json_set.add(f"images/{'val' if i > 7 else 'train'}/{i}.png", 2, exists=False)
    if has_repetition:
        json_set.add("images/old/0.png", 0, exists=False)
    data = json_set.describe()
    indexes = {split: load(data, split) for split in SPLITS}
    assert [index.report.ledger.used_objects for index in indexes.values()] == [10, 10]
    assert lost(data)[1] == (0, 0)
    for split, numbers in (("train", [8]), ("val", [1, 3, 5, 7])):
        former = {"train": "val", "val": "train"}[split]
        lines = [line.split(f"{OTHER_FOLDER}: ")[1] for line in indexes[split].report.lines if OTHER_FOLDER in line]
        assert lines == [
            f"images/{former}/{i}.png matches images/{split}/{i}.png, which is in another folder" for i in numbers
        ]
        assert any(f"the label file names {len(numbers)} image" in note for note in indexes[split].report.notes)


def test_a_folder_that_was_moved_to_another_split_keeps_its_boxes(tmp_path):
    json_set = JsonSet(tmp_path)
    for i in range(4):
        json_set.write_image(f"images/val/a/{i}.png")
        json_set.write_image(f"images/train/b/{i}.png")
        json_set.add(f"train/a/{i}.png", 2, exists=False)
        json_set.add(f"val/b/{i}.png", 3, exists=False)
    data = json_set.describe()
    assert [load(data, split).report.ledger.used_objects for split in SPLITS] == [12, 8]
    assert lost(data) == [(0, 0), (0, 0)]


def test_images_that_were_moved_keep_their_labels_although_another_split_repeats_names(tmp_path):
    """Only the two images of batch2 whose names val has are ambiguous."""
    json_set = JsonSet(tmp_path)
    for i in range(30):
        json_set.write_image(f"images/train/{i}.png")
        json_set.add(f"{'batch2' if i >= 20 else 'train'}/{i}.png", exists=False)
    for i in range(28, 40):
        json_set.add(f"images/val/{i}.png", 3)
    data = json_set.describe()
    assert [load(data, split).report.ledger.used_objects for split in SPLITS] == [28, 36]
    report = load(data, "train").report
    assert sum(OTHER_FOLDER in line for line in report.lines) == 8


@pytest.mark.parametrize("test", [{}, {"test": "images/test"}])
def test_images_without_an_entry_get_no_boxes_of_a_missing_split_with_the_same_numbers(tmp_path, test):
    """A third of train is annotated. Entries of test match several images if val has their number, and else one."""
    json_set = JsonSet(tmp_path)
    for i in range(12):
        json_set.write_image(f"images/train/{i}.png")
    for i in range(4):
        json_set.add(f"train/{i}.png", exists=False)
        json_set.add(f"images/val/{i}.png", 3)
    for i in [*range(4), *range(6, 12)]:
        json_set.add(f"test/{i}.png", 2, exists=False)
    data = json_set.describe(**test)
    assert [load(data, split).report.ledger.used_objects for split in SPLITS] == [4, 12]


@pytest.mark.parametrize("style", ["{below}", "{path}"])
def test_images_without_an_entry_get_no_boxes_of_a_folder_of_which_val_has_most_numbers(tmp_path, style):
    """Only two entries of test, which the YAML does not name, match a single image."""
    json_set = JsonSet(tmp_path)
    for i in range(8):
        json_set.write_image(f"images/train/{i}.png")
        json_set.add(f"images/test/{i}.png", 2, exists=False, style=style)
        if i < 6:
            json_set.add(f"images/train/{i}.png", style=style)
            json_set.add(f"images/val/{i}.png", 3, style=style)
    index = load(json_set.describe(), "train")
    assert index.report.ledger.used_objects == len(index) == 6
    assert sum(UNLISTED in line for line in index.report.lines) == 2


def test_an_entry_of_a_missing_split_does_not_cancel_that_of_a_moved_image(tmp_path):
    json_set = JsonSet(tmp_path)
    for i in range(10):
        json_set.write_image(f"images/train/{i}.png")
        json_set.add(f"batch1/{i}.png", exists=False)
    json_set.add("images/val/20.png")
    json_set.add("test/3.png", 2, exists=False)
    data = json_set.describe(test="images/test")
    assert load(data, "train").report.ledger.used_objects == 10
    assert lost(data) == [(0, 0), (0, 0)]


@pytest.mark.parametrize("test", [{}, {"test": "images/test"}])
def test_a_subfolder_of_the_same_name_gives_an_image_no_boxes_of_another_split(tmp_path, test):
    """The images of test/ are not here, and five of train/ have no entry yet."""
    json_set = JsonSet(tmp_path)
    json_set.add("images/val/100.png")
    for i in range(10):
        json_set.write_image(f"images/train/a/{i}.png")
        json_set.add(f"images/train/b/{i}.png", style="{below}")
        json_set.add(f"images/test/a/{i}.png", 2, exists=False, style="{below}")
        if i < 5:
            json_set.add(f"images/train/a/{i}.png", style="{below}")
    index = load(json_set.describe(**test), "train")
    assert index.report.ledger.used_objects == len(index) == 15


def test_a_few_entries_of_a_missing_split_label_no_images_of_a_large_one():
    """Only test/3.png and test/4.png match images without another entry."""
    names = [f"{i}.png" for i in range(300)]
    labeled = [f"train/{name}" for i, name in enumerate(names) if i not in (3, 4)]
    entries = entries_of(labeled + [f"test/{name}" for name in names[:5]])
    others = OtherImages(this=SplitPlaces(folders=["images/train"]))
    matched = match(entries, image_files("images/train", names), others)
    assert matched.entry_of.keys() == set(range(300)) - {3, 4}


@pytest.mark.parametrize("num_background_entries", [0, 3])
def test_a_background_gets_no_boxes_of_a_missing_split_with_a_subfolder_of_its_splits_name(
    tmp_path, num_background_entries
):
    """test/train/0.png of another machine is not train/0.png, although no image is in test."""
    json_set = JsonSet(tmp_path)
    for i in range(6):
        json_set.write_image(f"train/{i}.png")
        if i >= 3 or i < num_background_entries:
            json_set.add(f"train/{i}.png", int(i >= 3), style="/h/u/{path}")
        json_set.add(f"val/train/{i}.png", 2, style="/h/u/{path}")
        json_set.add(f"test/train/{i}.png", 5, exists=False, style="/h/u/{path}")
    data = json_set.describe(train="train", val="val", test="test")
    assert [load(data, split).report.ledger.used_objects for split in SPLITS] == [3, 12]
    assert len(load(data, "train")) == 3 + num_background_entries
