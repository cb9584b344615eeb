"""Each object of a JSON that several splits share is used, lost in one split, or of an image that no split has."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from data.index.index import DatasetIndex
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.labels.findings import ABSENT, BAD_ROW, CONFLICT, IMAGE_ELSEWHERE, OTHER_FOLDER, REPEATED_ENTRY, UNLISTED
from data.labels.image_entries import ImageEntry
from data.labels.label_format import LabelRequest
from data.labels.match_entries import MatchedEntries, match_entries
from data.labels.rows import RawLabels, RowProblem
from data.source.dataset_yaml import load_dataset_spec
from data.source.files import list_split
from data.split_files import ImageFile, OtherImages, SplitPlaces
from tests.helpers.messages import refused
from tests.helpers.three_formats import write_image

SPLITS = ("train", "val")
STYLES = ("{path}", "{below}", "/home/test/data/{path}", "C:\\d\\{path}")
MISSING_FOLDER = "labels of an image that is not here"


@dataclass
class JsonSet:
    """A data set in which every split has the same JSON, whose entries it collects."""

    root: Path
    file_names: list[str] = field(default_factory=list)
    num_objects: list[int] = field(default_factory=list)

    def add(self, path: str, count: int = 1, *, exists: bool = True, style: str = "{path}") -> None:
        """Adds an entry with ``count`` objects, and its image if it ``exists``."""
        if exists:
            self.write_image(path)
        self.file_names.append(style.format(path=path, below=path.partition("/")[2]))
        self.num_objects.append(count)

    def write_image(self, path: str) -> None:
        write_image(self.root / path, 20, 20)

    def describe(self, **content: object) -> Path:
        """Writes the JSON and the YAML."""
        image_ids = [i for i, count in enumerate(self.num_objects) for _ in range(count)]
        boxes = [[1 + k, 1, 5, 5] for count in self.num_objects for k in range(count)]
        coco = {
            "images": [{"id": i, "file_name": name} for i, name in enumerate(self.file_names)],
            "annotations": [
                {"id": k, "image_id": i, "category_id": 1, "bbox": box}
                for k, (i, box) in enumerate(zip(image_ids, boxes))
            ],
            "categories": [{"id": 1, "name": "a"}],
        }
        (self.root / "all.json").write_text(json.dumps(coco))
        path = self.root / "data.yaml"
        splits = {split: f"images/{split}" for split in SPLITS}
        path.write_text(yaml.safe_dump(splits | {"names": ["a"], "annotations": "all.json"} | content))
        return path


def load(data: Path, split: str, **options: object) -> DatasetIndex:
    settings = IndexSettings(**{"progress": False, "workers": 0, "max_bad": 1.0, "use_cache": False} | options)
    return load_index(load_dataset_spec(data), split, settings)


def lost(data: Path) -> list[tuple[int, int]]:
    """Returns the lost images and objects of train and val."""
    ledgers = [load(data, split).report.ledger for split in SPLITS]
    return [(ledger.lost_images, ledger.lost_objects) for ledger in ledgers]


@pytest.fixture
def json_set(tmp_path: Path) -> JsonSet:
    """Ten images for training and ten for validation, with other file names."""
    json_set = JsonSet(tmp_path)
    for i in range(10):
        json_set.add(f"images/train/{i}.png")
        json_set.add(f"images/val/{100 + i}.png")
    return json_set


@pytest.mark.parametrize("seed", range(20))
def test_random_sets_lose_what_was_deleted_where_it_was_deleted(tmp_path, seed):
    """The reference is the generator, which knows the split of every image that it deletes."""
    rng = random.Random(seed)
    json_set = JsonSet(tmp_path)
    layout = rng.choice(("images/{}", "{}/images", "images/{}/data", "{}"))
    style = rng.choice([style for style in STYLES if style != "{below}" or layout.startswith("images/")])
    is_list = rng.random() < 0.5
    test = rng.choice(("none", "folder", "list", "unnamed"))  # "unnamed": on the disk, but not in the YAML
    used = Counter[str]()
    lost_objects = Counter[str]()
    lost_images = Counter[str]()
    of_missing_folder = 0
    rows: dict[str, list[str]] = {split: [] for split in (*SPLITS, "test")}
    for split in SPLITS:
        folder = layout.format(split)
        json_set.add(f"{folder}/{split}.png", style=style)  # a split without images would be refused
        rows[split].append(f"{folder}/{split}.png")
        used[split] += 1
        for below in ("", "a/", "gone/"):
            for number in rng.sample(range(8), 3):
                path = f"{folder}/{below}{number}.png"
                count = rng.randint(1, 3)
                exists = below != "gone/" and rng.random() < 0.7
                json_set.add(path, count, exists=exists, style=style)
                rows[split].append(path)
                if exists:
                    used[split] += count
                else:
                    lost_objects[split] += count
                    lost_images[split] += 1
    for number in range(8):  # images of no split, some with entries, some with the names of deleted images
        json_set.write_image(f"{layout.format('thumbs')}/{number}.png")
        if rng.random() < 0.3:
            json_set.add(f"{layout.format('thumbs')}/{number}.png", style=style)
        path = f"{layout.format('test')}/{rng.choice(('', 'a/', 'gone/'))}{number}.png"
        if test != "none" and rng.random() < 0.3:
            json_set.add(path, exists=test == "unnamed", style=style)
            of_missing_folder += test == "folder"
            rows["test"].append(path)
    content: dict[str, object] = {split: layout.format(split) for split in SPLITS}
    if test == "folder":
        content["test"] = layout.format("test")
    if test == "list" and rows["test"]:
        content["test"] = "test.txt"
    for split in (*SPLITS, "test") if is_list else ("test",):
        (tmp_path / f"{split}.txt").write_text("".join(f"{row}\n" for row in rows[split]))
        if split in SPLITS:
            content[split] = f"{split}.txt"
    data = json_set.describe(**content)
    for split in SPLITS:
        report = load(data, split).report
        ledger = report.ledger
        assert (ledger.used_objects, ledger.lost_objects) == (used[split], lost_objects[split])
        assert ledger.lost_images == lost_images[split]
        assert sum(MISSING_FOLDER in line for line in report.lines) == of_missing_folder


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


def test_a_repeated_name_is_not_said_to_be_the_same_name(json_set):
    json_set.add("images/train/0.png", 3)
    assert lost(json_set.describe()) == [(1, 3), (0, 0)]
    (line,) = load(json_set.describe(), "train").report.lines
    assert "images/train/0.png is already used by another entry" in line


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


def test_entries_match_literally_or_by_name_and_folders_or_by_name_only():
    entries = [
        ImageEntry(name, i, RawLabels([], []))
        for i, name in enumerate(["images/train/0.png", "test/1.png", "D:/set/val/2.png"])
    ]
    train = [ImageFile(f"images/train/{i}.png", f"{i}.png", None) for i in range(2)]
    val = SplitPlaces(images=[(ImageFile("images/val/2.png", "2.png", None),)], folders=["images/val"])
    places = OtherImages(this=SplitPlaces(folders=["images/train"]), later=val)
    request = LabelRequest(images=train, files=[], root=Path("/"), names=None, others=places)
    matched = match_entries(entries, request)
    assert matched.entry_of == {0: entries[0], 1: entries[1]}
    assert matched.in_other_folders == [1]
    assert matched.unmatched == []


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


def test_entries_of_another_machine_are_not_reported(tmp_path):
    """None of the folders is known here, so that they do not show that an image is another one."""
    json_set = JsonSet(tmp_path)
    for i in range(4):
        json_set.write_image(f"images/train/{i}.png")
        json_set.add(f"/home/u/{'ab'[i % 2]}/{i}.png", exists=False)
    report = load(json_set.describe(train="images/train", val="images/train"), "train").report
    assert report.lines == []
    assert report.ledger.used_objects == 4


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

    def match(*entries: ImageEntry) -> MatchedEntries:
        images = [ImageFile(f"images/{i}.png", f"{i}.png", None) for i in range(2)]
        request = LabelRequest(images=images, files=[], root=Path("/"), names=None, others=OtherImages())
        return match_entries(entries, request)

    first = ImageEntry("a/0.png", 0, labels(0))
    assert match(first, ImageEntry("b/0.png", 1, labels(2))).entry_of == {0: first}
    assert match(first, ImageEntry("b/0.png", 1, labels(2, "got []"))).entry_of == {}
    (repeated,) = match(ImageEntry("0.png", 0, labels(0)), ImageEntry("0.png", 1, labels(2))).unmatched
    assert repeated.loss is not None
    assert repeated.loss.kind == REPEATED_ENTRY


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


def test_entries_of_another_machine_name_the_folder_of_a_split_that_is_the_data_sets(tmp_path):
    json_set = JsonSet(tmp_path)
    for folder in "ab":
        for i in range(4):
            json_set.add(f"{folder}/{folder}{i}.png", style="{path}" if i % 2 else "/home/u/{path}")
    report = load(json_set.describe(train=".", val="a"), "train").report
    assert report.ledger.used_objects == 8
    assert report.lines == []


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
    images = [ImageFile(f"images/train/{i}.png", f"{i}.png", None) for i in range(300)]
    file_names = [f"train/{i}.png" for i in range(300) if i not in (3, 4)]
    file_names += [f"test/{i}.png" for i in range(5)]
    entries = [ImageEntry(name, i, RawLabels([], [])) for i, name in enumerate(file_names)]
    others = OtherImages(this=SplitPlaces(folders=["images/train"]))
    request = LabelRequest(images=images, files=[], root=Path("/"), names=None, others=others)
    assert match_entries(entries, request).entry_of.keys() == set(range(300)) - {3, 4}


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


def test_an_image_of_no_split_with_a_bare_name_is_reported_but_not_lost(json_set):
    """Whether the entry is of this image or of a deleted one, its name does not say."""
    json_set.add("gone.png", 2, exists=False)
    json_set.write_image("images/thumbs/gone.png")
    assert lost(json_set.describe()) == [(0, 0), (0, 0)]
    (line,) = load(json_set.root / "data.yaml", "train").report.lines
    assert line == f"all.json: image 20: {MISSING_FOLDER}: gone.png is not among the split's images"


def test_reasons_take_time_in_proportion_to_the_entries():
    """A comparison of each entry with each folder, or with all images of its name, would take minutes."""
    folders = [f"seq{i}/img1" for i in range(1000)]
    images = [ImageFile(f"{folder}/{i}.png", f"{i}.png", None) for folder in folders for i in range(5)]
    names = ["{}.png", "img1/{}.png", "gone{folder}/img1/{}.png"]
    file_names = [name.format(i % 5, folder=i) for name in names for i in range(1500)]
    entries = [ImageEntry(name, i, RawLabels([], [])) for i, name in enumerate(file_names)]
    others = OtherImages(this=SplitPlaces(folders=folders), unassigned=[f"old/{image.name}" for image in images])
    request = LabelRequest(images=images, files=[], root=Path("/"), names=None, others=others, aliases={})
    start = time.process_time()
    matched = match_entries(entries, request)
    assert time.process_time() - start < 5
    assert len(matched.unmatched) == len(entries)


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
