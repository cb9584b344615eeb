"""Each object of a JSON that several splits share is used, lost in one split, or of an image that no split has."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from data.labels.findings import ABSENT, IMAGE_ELSEWHERE, OTHER_FOLDER, UNLISTED
from data.split_files import OtherImages, SplitPlaces
from tests.helpers.json_set import SPLITS, JsonSet, entries_of, image_files, load, lost, match, numbered_set


@pytest.fixture
def json_set(tmp_path: Path) -> JsonSet:
    return numbered_set(tmp_path)


STYLES = ("{path}", "{below}", "/home/test/data/{path}", "C:\\d\\{path}")


@dataclass
class Expected:
    """What becomes of the entries of a random set, by split."""

    used: Counter[str] = field(default_factory=Counter)  # objects
    lost_objects: Counter[str] = field(default_factory=Counter)
    lost_images: Counter[str] = field(default_factory=Counter)
    num_in_missing_folder: int = 0  # entries of a test folder that the YAML names and that is missing


def random_set(root: Path, seed: int) -> tuple[Path, Expected]:
    """Writes a data set of which some images are deleted, and returns its YAML."""
    rng = random.Random(seed)
    json_set = JsonSet(root)
    layout = rng.choice(("images/{}", "{}/images", "images/{}/data", "{}"))
    style = rng.choice([style for style in STYLES if style != "{below}" or layout.startswith("images/")])
    is_list = rng.random() < 0.5
    test = rng.choice(("none", "folder", "list", "unnamed"))  # "unnamed": on the disk, but not in the YAML
    expected = Expected()
    rows: dict[str, list[str]] = {split: [] for split in (*SPLITS, "test")}
    for split in SPLITS:
        folder = layout.format(split)
        json_set.add(f"{folder}/{split}.png", style=style)  # a split without images would be refused
        rows[split].append(f"{folder}/{split}.png")
        expected.used[split] += 1
        for below in ("", "a/", "gone/"):
            for number in rng.sample(range(8), 3):
                path = f"{folder}/{below}{number}.png"
                count = rng.randint(1, 3)
                exists = below != "gone/" and rng.random() < 0.7
                json_set.add(path, count, exists=exists, style=style)
                rows[split].append(path)
                (expected.used if exists else expected.lost_objects)[split] += count
                expected.lost_images[split] += not exists
    for number in range(8):  # images of no split, some with entries, some with the names of deleted images
        json_set.write_image(f"{layout.format('thumbs')}/{number}.png")
        if rng.random() < 0.3:
            json_set.add(f"{layout.format('thumbs')}/{number}.png", style=style)
        path = f"{layout.format('test')}/{rng.choice(('', 'a/', 'gone/'))}{number}.png"
        if test != "none" and rng.random() < 0.3:
            json_set.add(path, exists=test == "unnamed", style=style)
            expected.num_in_missing_folder += test == "folder"
            rows["test"].append(path)

    content: dict[str, object] = {split: layout.format(split) for split in SPLITS}
    if test == "folder":
        content["test"] = layout.format("test")
    if test == "list" and rows["test"]:
        content["test"] = "test.txt"
    if is_list:
        content |= {split: f"{split}.txt" for split in SPLITS}
    for split, names in rows.items():
        (root / f"{split}.txt").write_text("".join(f"{name}\n" for name in names))
    return json_set.describe(**content), expected


@pytest.mark.parametrize("seed", range(20))
def test_random_sets_lose_what_was_deleted_where_it_was_deleted(tmp_path, seed):
    """The reference is the generator, which knows the split of every image that it deletes."""
    data, expected = random_set(tmp_path, seed)
    for split in SPLITS:
        report = load(data, split).report
        ledger = report.ledger
        assert (ledger.used_objects, ledger.lost_objects) == (expected.used[split], expected.lost_objects[split])
        assert ledger.lost_images == expected.lost_images[split]
        assert sum(IMAGE_ELSEWHERE in line for line in report.lines) == expected.num_in_missing_folder


@pytest.mark.parametrize(
    ("file_name", "is_used", "expected", "kind"),
    [
        ("images/train/1.png", True, [(0, 0), (0, 0)], ""),
        ("1.png", True, [(0, 0), (0, 0)], ""),
        ("train/1.png", True, [(0, 0), (0, 0)], ""),
        ("test/1.png", True, [(0, 0), (0, 0)], OTHER_FOLDER),
        ("train/0.png", False, [(1, 1), (0, 0)], ABSENT),
        ("val/0.png", False, [(0, 0), (1, 1)], ""),
        ("val/9.png", False, [(0, 0), (1, 1)], ""),
        ("9.png", False, [(1, 1), (0, 0)], ABSENT),
        ("test/9.png", False, [(1, 1), (0, 0)], ABSENT),
        ("images/old/9.png", False, [(0, 0), (0, 0)], ""),
        ("9.png next to images/old/9.png", False, [(0, 0), (0, 0)], IMAGE_ELSEWHERE),
    ],
)
def test_the_file_name_of_an_entry_decides_whether_it_is_used_or_where_it_is_lost(
    tmp_path, file_name, is_used, expected, kind
):
    """Train has an image without another entry, images/train/1.png. ``kind``: of the finding in train."""
    json_set = JsonSet(tmp_path)
    json_set.add("images/train/0.png")
    json_set.write_image("images/train/1.png")
    json_set.add("images/val/2.png")
    if "old" in file_name:
        json_set.write_image("images/old/9.png")
    json_set.add(file_name.partition(" ")[0], exists=False)
    data = json_set.describe()
    assert lost(data) == expected
    index = load(data, "train")
    assert ("images/train/1.png" in index.paths) == is_used
    lines = [line for line in index.report.lines if f": {UNLISTED}: " not in line]
    assert [line.split(": ")[2] for line in lines] == [kind][: bool(kind)]


def test_a_missing_image_counts_once_although_the_splits_have_common_images(json_set):
    """Five images are in both lists; an image that is in neither may belong to either."""
    names = [f"images/train/{i}.png" for i in range(10)]
    for i in range(6):
        json_set.add(f"elsewhere/gone{i}.png", exists=False)
    (json_set.root / "train.txt").write_text("".join(f"{name}\n" for name in names))
    (json_set.root / "val.txt").write_text("".join(f"images/val/{100 + i}.png\n" for i in range(3)))
    with (json_set.root / "val.txt").open("a") as file:
        file.writelines(f"{name}\n" for name in names[5:])
    assert lost(json_set.describe(train="train.txt", val="val.txt")) == [(6, 6), (0, 0)]
    lines = load(json_set.root / "data.yaml", "val").report.lines
    assert sum("counted as lost in an earlier split" in line for line in lines) == 6


def test_entries_without_annotations_are_no_findings_and_a_repeated_one_has_its_own_kind(json_set):
    json_set.add("images/train/50.png", 0, exists=False)
    json_set.add("images/train/1.png", 0)
    assert load(json_set.describe(), "train").report.lines == []
    json_set.add("images/train/0.png")
    (line,) = load(json_set.describe(), "train").report.lines
    assert line.startswith(
        "all.json: image 22: repeated image entry: images/train/0.png is already used by another entry"
    )


def test_a_repeated_name_is_not_said_to_be_the_same_name(json_set):
    json_set.add("images/train/0.png", 3)
    assert lost(json_set.describe()) == [(1, 3), (0, 0)]
    (line,) = load(json_set.describe(), "train").report.lines
    assert "images/train/0.png is already used by another entry" in line


def test_an_image_of_no_split_with_a_bare_name_is_reported_but_not_lost(json_set):
    """Whether the entry is of this image or of a deleted one, its name does not say."""
    json_set.add("gone.png", 2, exists=False)
    json_set.write_image("images/thumbs/gone.png")
    assert lost(json_set.describe()) == [(0, 0), (0, 0)]
    (line,) = load(json_set.root / "data.yaml", "train").report.lines
    assert line == f"all.json: image 20: {IMAGE_ELSEWHERE}: gone.png is not among the split's images"


def test_reasons_take_time_in_proportion_to_the_entries():
    """A comparison of each entry with each folder, or with all images of its name, would take minutes."""
    folders = [f"seq{i}/img1" for i in range(1000)]
    images = [image for folder in folders for image in image_files(folder, [f"{i}.png" for i in range(5)])]
    styles = ["{}.png", "img1/{}.png", "gone{folder}/img1/{}.png"]
    entries = entries_of(style.format(i % 5, folder=i) for style in styles for i in range(1500))
    others = OtherImages(this=SplitPlaces(folders=folders), unassigned=[f"old/{image.name}" for image in images])
    start = time.process_time()
    matched = match(entries, images, others)
    assert time.process_time() - start < 5
    assert len(matched.unmatched) == len(entries)
