"""Of several entries that are equally likely to be that of an image, none is used, unless their labels are equal."""

from __future__ import annotations

import pytest

from data.labels.findings import BAD_ROW, CONFLICT, OTHER_FOLDER, REPEATED_ENTRY
from data.labels.image_entries import ImageEntry
from data.labels.rows import RawLabels, RowProblem
from tests.helpers.json_set import JsonSet, image_files, load, lost, match
from tests.helpers.messages import refused


@pytest.mark.parametrize("counts", [(2, 3), (3, 2)])
def test_an_image_is_lost_once_if_entries_of_two_unknown_folders_fit_it_equally(tmp_path, counts):
    json_set = JsonSet(tmp_path)
    for i in range(4):
        json_set.write_image(f"images/train/{i}.png")
        json_set.write_image(f"images/val/{10 + i}.png")
        json_set.add(f"a/{i}.png", counts[0], exists=False)
        json_set.add(f"c/{10 + i}.png", exists=False)
    json_set.add("b/0.png", counts[1], exists=False)
    data = json_set.describe()
    index = load(data, "train")
    assert list(index.paths) == [f"images/train/{i}.png" for i in (1, 2, 3)]
    assert index.report.ledger.images == 4
    assert lost(data) == [(1, sum(counts)), (0, 0)]
    assert index.report.lines == [
        f"all.json: image 0: {CONFLICT}: a/0.png, b/0.png match images/train/0.png equally well, "
        "so it is unknown which is right; left out"
    ]
    assert not any("doesn't name" in note for note in index.report.notes)


def test_either_of_two_entries_with_the_same_boxes_is_used(tmp_path):
    json_set = JsonSet(tmp_path)
    for i in range(4):
        json_set.write_image(f"images/train/{i}.png")
        json_set.add(f"a/{i}.png", 2, exists=False)
    json_set.add("b/1.png", 2, exists=False)
    data = json_set.describe(val="images/train")
    assert load(data, "train").report.ledger.used_objects == 8
    assert lost(data)[0] == (1, 2)


def test_a_conflict_in_an_image_of_two_splits_counts_in_the_first(tmp_path):
    json_set = JsonSet(tmp_path)
    for i in range(4):
        json_set.write_image(f"images/{i}.png")
        json_set.add(f"a/{i}.png", exists=False)
    json_set.add("b/0.png", 2, exists=False)
    for split, count in (("train", 4), ("val", 3)):
        (tmp_path / f"{split}.txt").write_text("".join(f"images/{i}.png\n" for i in range(count)))
    data = json_set.describe(train="train.txt", val="val.txt")
    assert lost(data) == [(1, 3), (0, 0)]
    (line,) = load(data, "val").report.lines
    assert "a/0.png, b/0.png" in line
    assert "counted as lost in an earlier split" in line


def test_a_conflict_names_only_entries_that_agree_equally(tmp_path):
    """One of the others has no annotations, the last one more folders. The objects of all are lost."""
    json_set = JsonSet(tmp_path)
    for i in range(20):
        json_set.write_image(f"images/train/{i}.png")
        json_set.add(f"a/{i}.png", exists=False)
    for name, count in (("b/0.png", 2), ("c/0.png", 0), ("d/e/0.png", 4), ("b/0.png", 2)):
        json_set.add(name, count, exists=False)
    data = json_set.describe(val="images/train")
    assert lost(data)[0] == (1, 9)
    (line,) = load(data, "train").report.lines
    assert "a/0.png, b/0.png match images/train/0.png equally well" in line


def test_entries_of_a_missing_split_are_reported_if_others_of_it_are_in_conflict(tmp_path):
    """Two of train's images are annotated. Entries of test match the others as well as if these had been moved."""
    json_set = JsonSet(tmp_path)
    for i in range(20):
        json_set.write_image(f"ds/train/images/{i}.png")
        json_set.add(f"test2017/{i}.png", 2, exists=False)
    for i in range(2):
        json_set.add(f"train2017/{i}.png", exists=False)
    report = load(json_set.describe(train="ds/train/images", val="ds/train/images"), "train").report
    assert sum(CONFLICT in line for line in report.lines) == 2
    assert sum(OTHER_FOLDER in line for line in report.lines) == 18


def test_entries_in_conflict_are_named_if_no_image_has_another(tmp_path):
    json_set = JsonSet(tmp_path)
    for i in range(3):
        json_set.write_image(f"images/train/{i}.png")
        json_set.add(f"a/{i}.png", exists=False)
        json_set.add(f"b/{i}.png", 2, exists=False)
    with refused(
        "all.json: image 0: a/0.png, b/0.png match images/train/0.png equally well, so it is unknown which is right; "
        "delete the wrong entries"
    ):
        load(json_set.describe(), "train")


def test_entries_with_the_same_unusable_annotation_are_equal():
    """Either of them is used, and a second entry of the same file name is only a repeated one."""

    def labels(row: int, text: str = "got [1, 2, 3]") -> RawLabels:
        return RawLabels([(0, 1, 1, 5, 5, 16, 0, row, 0)], [RowProblem(row + 1, BAD_ROW, text)])

    images = image_files("images", ["0.png", "1.png"])
    first = ImageEntry("a/0.png", 0, labels(0))
    assert match([first, ImageEntry("b/0.png", 1, labels(2))], images).entry_of == {0: first}
    assert match([first, ImageEntry("b/0.png", 1, labels(2, "got []"))], images).entry_of == {}
    (repeated,) = match([ImageEntry("0.png", 0, labels(0)), ImageEntry("0.png", 1, labels(2))], images).unmatched
    assert repeated.loss.kind == REPEATED_ENTRY
