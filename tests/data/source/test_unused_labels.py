"""A label file that no image uses is lost once, in one split, or explained; an image that it may label is left out."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from data.index.index import DatasetIndex
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.labels.findings import IMAGE_ELSEWHERE, ORPHAN, SECOND_LABEL
from data.source.dataset_yaml import load_dataset_spec
from tests.helpers.three_formats import voc_text, write_image, yolo_text

HEIGHT, WIDTH = 48, 64


def image(root: Path, name: str) -> None:
    write_image(root / "images" / name, HEIGHT, WIDTH)


def label(root: Path, name: str, count: int = 1) -> None:
    """Writes the XML file ``voc/name`` with ``count`` objects."""
    path = root / "voc" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(voc_text([(0, 1 + i, 2, 30, 40) for i in range(count)], ["a"], HEIGHT, WIDTH))


def yolo_label(root: Path, name: str, count: int = 1) -> None:
    """Writes the file ``labels/name`` with ``count`` objects."""
    path = root / "labels" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yolo_text([(0, 1 + i, 2, 30, 40) for i in range(count)], HEIGHT, WIDTH))


def read(root: Path, splits: Mapping[str, str], *used: str, annotations: str | None = "voc") -> dict[str, DatasetIndex]:
    """Returns the indexes of the splits ``used``, or of all of them, whatever is lost. ``annotations``: None for YOLO
    txt."""
    content = {**splits, "names": ["a"]} | ({} if annotations is None else {"annotations": annotations})
    (root / "data.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    spec = load_dataset_spec(root / "data.yaml")
    settings = IndexSettings(progress=False, workers=0, max_bad=1.0, use_cache=False)
    return {split: load_index(spec, split, settings) for split in used or splits}


def losses(indexes: Mapping[str, DatasetIndex]) -> dict[str, tuple[int, int]]:
    """Returns the lost images and objects of each split."""
    return {name: (i.report.ledger.lost_images, i.report.ledger.lost_objects) for name, i in indexes.items()}


def reported(index: DatasetIndex, kind: str = ORPHAN) -> list[str]:
    return [line.split(":")[0] for line in index.report.lines if f": {kind}: " in line]


TRAIN_AND_VAL = {"train": "images/train", "val": "images/val"}


@dataclass(frozen=True)
class Case:
    """A row of the table in unused_file.py: an unused label file, and what the training split reports about it."""

    unused: str  # in voc, with two objects
    kind: str = ""  # of the finding; "" if nothing is reported
    lost: tuple[int, int] = (0, 0)  # images and objects
    message: str = ""  # how it begins
    images: tuple[str, ...] = ()  # without a label file, besides train/0.png and val/1.png
    named_image: str = ""  # in the file
    is_copy: bool = False  # of voc/train/0.xml


CASES = {
    "image uses a copy": Case("0.xml", is_copy=True),
    "image without a label file": Case(
        "q.xml",
        ORPHAN,
        (2, 2),
        "belongs to no image; if it labels images/train/a/x.png, which is left out, rename it to voc/train/a/x.xml",
        images=("train/a/x.png", "train/b/x.png"),
        named_image="c/x.png",
    ),
    "image uses another file": Case(
        "0.xml", SECOND_LABEL, message="images/train/0.png uses voc/train/0.xml instead; remove one of the two"
    ),
    "image of another split": Case("1.xml"),
    "image of an unsupported kind": Case(
        "train/h.xml", ORPHAN, (1, 2), "images/train/h.heic is of an unsupported kind", images=("train/h.heic",)
    ),
    "similar name": Case(
        "train/x-1.xml", ORPHAN, (1, 2), "belongs to no image; if it labels images/train/x.png", ("train/x.png",)
    ),
    "name of a labeled image": Case(
        "old/0.xml", SECOND_LABEL, message="is named like images/train/0.png, which has labels elsewhere"
    ),
    "copy with the name of a labeled image": Case("old/0.xml", is_copy=True),
    "name of an image of no split": Case("old/9.xml", images=("old/9.png",)),
    "folder of a missing split": Case("test/q.xml", IMAGE_ELSEWHERE, message="its image may be in "),
    "folder of a split": Case("train/q.xml", ORPHAN, (1, 2), "belongs to no image; rename it like its image"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_unused_label_file_is_explained_by_the_first_case_that_applies(tmp_path, case):
    for name in ("train/0", "val/1"):
        image(tmp_path, f"{name}.png")
        label(tmp_path, f"{name}.xml")
    for name in case.images:
        image(tmp_path, name.replace(".heic", ".png"))
        (tmp_path / "images" / name).with_suffix(".png").rename(tmp_path / "images" / name)
    label(tmp_path, case.unused, 1 if case.is_copy else 2)
    path = tmp_path / "voc" / case.unused
    path.write_text(path.read_text().replace("<annotation>", f"<annotation><filename>{case.named_image}</filename>"))
    splits = TRAIN_AND_VAL | ({"test": "images/test"} if case.unused.startswith("test/") else {})
    index = read(tmp_path, splits, "train")["train"]
    lines = [line for line in index.report.lines if line.startswith(f"voc/{case.unused}: ")]
    assert [line.split(": ")[1] for line in lines] == [case.kind][: bool(case.kind)]
    assert all(line.startswith(f"voc/{case.unused}: {case.kind}: {case.message}") for line in lines)
    assert (index.report.ledger.lost_images, index.report.ledger.lost_objects) == case.lost


def test_a_list_that_names_the_missing_image_of_a_label_file_loses_its_objects(tmp_path):
    """The row counts as the lost image."""
    image(tmp_path, "train/0.png")
    label(tmp_path, "train/0.xml")
    label(tmp_path, "train/7.xml", count=2)
    (tmp_path / "train.txt").write_text("images/train/0.png\nimages/train/7.png\n")
    index = read(tmp_path, {"train": "train.txt"})["train"]
    assert losses({"train": index}) == {"train": (1, 2)}
    (line,) = [line for line in index.report.lines if ORPHAN in line]
    assert line == f"voc/train/7.xml: {ORPHAN}: images/train/7.png, which a list names, is missing"


def test_labels_in_folders_that_mirror_the_image_folders_are_used(tmp_path):
    """A file that is in none of these folders labels the image of this name that has no other."""
    for split, count in (("train", 1), ("val", 2)):
        for name in ("a/0", "b/0", "1"):
            image(tmp_path, f"{split}/{name}.png")
            label(tmp_path, f"{split}/{name}.xml", count)
    (tmp_path / "voc/val/1.xml").rename(tmp_path / "voc/1.xml")
    indexes = read(tmp_path, TRAIN_AND_VAL)
    assert losses(indexes) == {"train": (0, 0), "val": (0, 0)}
    assert [indexes[split].report.ledger.used_objects for split in ("train", "val")] == [3, 6]


def test_a_background_named_like_an_image_of_another_split_is_used(tmp_path):
    for name in "012":
        for split in ("train", "val"):
            image(tmp_path, f"{split}/{name}.png")
            if (split, name) != ("train", "2"):
                label(tmp_path, f"{split}/{name}.xml")
    indexes = read(tmp_path, TRAIN_AND_VAL)
    assert losses(indexes) == {"train": (0, 0), "val": (0, 0)}
    assert len(indexes["train"]) == 3


@pytest.mark.parametrize(("folder", "loser"), [("", "train"), ("train/", "train"), ("val/", "val"), ("more/", "train")])
def test_a_label_file_without_an_image_is_lost_in_the_split_of_its_folder(tmp_path, folder, loser):
    """It is lost in the first split if the folder belongs to all of them."""
    for split in ("train", "val"):
        image(tmp_path, f"{split}/{split}.png")
        label(tmp_path, f"{split}/{split}.xml")
    label(tmp_path, f"{folder}gone.xml", count=2)
    indexes = read(tmp_path, TRAIN_AND_VAL)
    assert losses(indexes) == {"train": (0, 0), "val": (0, 0)} | {loser: (1, 2)}
    assert [name for name, index in indexes.items() if reported(index)] == [loser]


def test_only_label_files_outside_the_folder_of_a_split_may_be_of_a_missing_one(tmp_path):
    image(tmp_path, "train/0.png")
    for name in ("train/0", "train/gone", "gone", "val/gone"):
        label(tmp_path, f"{name}.xml")
    indexes = read(tmp_path, TRAIN_AND_VAL, "train")
    assert losses(indexes) == {"train": (1, 1)}
    assert reported(indexes["train"]) == ["voc/train/gone.xml"]
    assert reported(indexes["train"], IMAGE_ELSEWHERE) == ["voc/gone.xml", "voc/val/gone.xml"]
    lines = "".join(indexes["train"].report.lines)
    assert f"its image may be in {tmp_path}/images/val, which is empty or missing" in lines


def test_labels_of_an_image_of_no_split_are_not_lost_wherever_the_image_is(tmp_path):
    for name in ("a/train/0", "b/val/1", "b/more/2"):
        image(tmp_path, f"{name}.png")
        label(tmp_path, f"{name[-1]}.xml")
    indexes = read(tmp_path, {"train": "images/a/train", "val": "images/b/val"})
    assert losses(indexes) == {"train": (0, 0), "val": (0, 0)}


def test_labels_of_a_missing_folder_leave_out_no_image_of_the_same_name(tmp_path):
    for name in "01":
        image(tmp_path, f"train/{name}.png")
        label(tmp_path, f"val/{name}.xml")
    label(tmp_path, "train/0.xml")
    indexes = read(tmp_path, TRAIN_AND_VAL, "train")
    assert len(indexes["train"]) == 2
    assert losses(indexes) == {"train": (0, 0)}
    assert reported(indexes["train"], IMAGE_ELSEWHERE) == ["voc/val/0.xml", "voc/val/1.xml"]


def test_the_second_file_that_may_label_an_image_is_not_of_a_missing_folder(tmp_path):
    for name in ("0", "x"):
        image(tmp_path, f"train/{name}.png")
    for name in ("0", "x-1", "x-2"):
        label(tmp_path, f"{name}.xml")
    indexes = read(tmp_path, TRAIN_AND_VAL, "train")
    assert losses(indexes) == {"train": (1, 2)}
    assert reported(indexes["train"]) == ["voc/x-1.xml", "voc/x-2.xml"]


def test_a_file_that_may_label_images_of_two_splits_leaves_out_both_and_is_lost_once(tmp_path):
    for split in ("train", "val"):
        image(tmp_path, f"{split}/{split}.png")
        label(tmp_path, f"{split}.xml")
        image(tmp_path, f"{split}/x.png")
    label(tmp_path, "more/x.xml", count=3)
    assert losses(read(tmp_path, TRAIN_AND_VAL)) == {"train": (1, 3), "val": (1, 0)}


@pytest.mark.parametrize("num_present", [0, 1])
def test_labels_of_a_missing_image_of_a_list_are_lost_in_the_split_of_the_list(tmp_path, num_present):
    """If no image of the list exists, its split cannot be read, and the others report the files."""
    for name in "01":
        image(tmp_path, f"train/{name}.png")
    for name in "0126789":
        label(tmp_path, f"{name}.xml", count=2)
    for name in "789"[:num_present]:
        image(tmp_path, f"test/{name}.png")
    (tmp_path / "test.txt").write_text("".join(f"images/test/{name}.png\n" for name in "789"))
    splits = {"train": "images/train", "test": "test.txt"}
    indexes = read(tmp_path, splits, *list(splits)[: 1 + num_present])
    assert losses(indexes) == ({"train": (2, 4), "test": (2, 4)} if num_present else {"train": (2, 4)})
    assert reported(indexes["train"]) == ["voc/2.xml", "voc/6.xml"]
    assert len(reported(indexes["train"], IMAGE_ELSEWHERE)) == (0 if num_present else 3)


def test_a_list_without_existing_images_hides_no_label_file(tmp_path):
    image(tmp_path, "val/0.png")
    for name in ("0", "missing", "other"):
        label(tmp_path, f"{name}.xml")
    (tmp_path / "train.txt").write_text("images/train/missing.png\n")
    (tmp_path / "val.txt").write_text("images/val/0.png\nimages/train/missing.png\n")
    indexes = read(tmp_path, {"train": "train.txt", "val": "val.txt"}, "val")
    assert losses(indexes) == {"val": (1, 1)}
    assert reported(indexes["val"]) == ["voc/missing.xml", "voc/other.xml"]


def test_yolo_labels_of_the_missing_images_of_a_list_are_lost(tmp_path):
    """Even if all images of their folder are missing, and all others have their labels."""
    image(tmp_path, "a/0.png")
    yolo_label(tmp_path, "a/0.txt")
    yolo_label(tmp_path, "b/1.txt", count=3)
    (tmp_path / "train.txt").write_text("images/a/0.png\nimages/b/1.png\n")
    indexes = read(tmp_path, {"train": "train.txt"}, annotations=None)
    assert losses(indexes) == {"train": (1, 3)}


def test_yolo_labels_in_the_folder_of_another_split_leave_out_the_image_of_their_name(tmp_path):
    for split in ("train", "val"):
        for i in range(2):
            image(tmp_path, f"{split}/{split}{i}.png")
            yolo_label(tmp_path, f"{split}/{split}{i}.txt")
    image(tmp_path, "val/x.png")
    image(tmp_path, "val/background.png")
    yolo_label(tmp_path, "train/x.txt", 3)
    yolo_label(tmp_path, "train/x-1.txt")
    indexes = read(tmp_path, TRAIN_AND_VAL, annotations=None)
    assert losses(indexes) == {"train": (1, 1), "val": (1, 3)}
    assert [name for name, index in indexes.items() if "labels/train/x.txt" in reported(index)] == ["val"]
    assert "images/val/background.png" in indexes["val"].paths


@pytest.mark.parametrize("is_yolo", [False, True])
def test_labels_of_deleted_images_say_nothing_about_backgrounds_of_the_same_number_in_another_split(tmp_path, is_yolo):
    write_label = yolo_label if is_yolo else label
    suffix = ".txt" if is_yolo else ".xml"
    for i in range(6):
        if i != 3:
            image(tmp_path, f"train/{i}.png")
        if i not in (3, 4):
            write_label(tmp_path, f"val/{i}{suffix}")
        write_label(tmp_path, f"train/{i}{suffix}", 2)
        image(tmp_path, f"val/{i}.png")
    indexes = read(tmp_path, TRAIN_AND_VAL, annotations=None if is_yolo else "voc")
    assert losses(indexes) == {"train": (1, 2), "val": (0, 0)}
    assert len(indexes["val"]) == 6
    (line,) = indexes["train"].report.lines
    folder = "labels" if is_yolo else "voc"
    rename = f"if it labels images/val/3.png, a background of another split, rename it to {folder}/val/3{suffix}"
    assert line.endswith(f"belongs to no image; {rename}; else rename it like its image, or remove it")


def test_labels_of_a_split_that_the_yaml_does_not_name_are_not_only_to_be_renamed_or_removed(tmp_path):
    """Of train/1.png, which has no label file, and of train/0.png, which has one."""
    for name in "012":
        image(tmp_path, f"train/{name}.png")
        label(tmp_path, f"val/{name}.xml", 2)
        label(tmp_path, f"train/{name}.xml")
    label(tmp_path, "val/3.xml")
    (tmp_path / "voc/train/1.xml").unlink()
    index = read(tmp_path, {"train": "images/train"})["train"]
    assert reported(index, SECOND_LABEL) == ["voc/val/0.xml", "voc/val/2.xml"]
    assert reported(index) == ["voc/val/1.xml", "voc/val/3.xml"]
    hint = "; if voc/val has the labels of another split, name this split in the YAML"
    lines = [line for line in index.report.lines if line.startswith("voc/val/")]
    assert len(lines) == 4
    assert all(line.endswith(hint) for line in lines)


def test_one_common_name_does_not_hide_that_labels_are_in_the_folder_of_another_split(tmp_path):
    """The common name itself does not tell the split: the unused file labels an image of val."""
    for split in ("train", "val"):
        for name in ("cover", *(f"{split}{i}" for i in range(20))):
            image(tmp_path, f"{split}/{name}.png")
            yolo_label(tmp_path, f"{'val' if name == 'train1' else split}/{name}.txt")
    (tmp_path / "labels/train/cover.txt").unlink()
    (tmp_path / "images/val/cover.png").unlink()
    image(tmp_path, "val/a/cover.png")
    indexes = read(tmp_path, TRAIN_AND_VAL, annotations=None)
    assert "images/train/train1.png" not in indexes["train"].paths
    assert "images/train/cover.png" in indexes["train"].paths
    assert reported(indexes["train"]) == ["labels/val/train1.txt"]


def test_labels_of_a_split_without_images_say_nothing_about_backgrounds_of_another(tmp_path):
    for name in "01":
        image(tmp_path, f"train/{name}.png")
        yolo_label(tmp_path, f"val/{name}.txt")
    yolo_label(tmp_path, "train/0.txt")
    (tmp_path / "images/val").mkdir()
    indexes = read(tmp_path, TRAIN_AND_VAL, "train", annotations=None)
    assert losses(indexes) == {"train": (0, 0)}
    assert len(indexes["train"]) == 2


def test_an_image_of_no_split_explains_no_label_file_in_the_folder_of_a_split(tmp_path):
    image(tmp_path, "train/0.png")
    image(tmp_path, "more/1.png")
    for name in ("train/0", "train/1", "more/1", "old/1"):
        label(tmp_path, f"{name}.xml")
    indexes = read(tmp_path, {"train": "images/train"})
    assert losses(indexes) == {"train": (1, 1)}
    assert reported(indexes["train"]) == ["voc/train/1.xml"]


def test_another_version_of_the_labels_of_an_image_is_reported_once_but_a_copy_is_not(tmp_path):
    for split in ("train", "val"):
        for name in "01":
            image(tmp_path, f"{split}/{name}.png")
            label(tmp_path, f"{split}/{name}.xml")
    label(tmp_path, "old/0.xml", 2)
    label(tmp_path, "old/1.xml")
    indexes = read(tmp_path, TRAIN_AND_VAL)
    assert losses(indexes) == {"train": (0, 0), "val": (0, 0)}
    assert reported(indexes["train"], SECOND_LABEL) == ["voc/old/0.xml"]
    assert reported(indexes["val"], SECOND_LABEL) == []


@dataclass
class RandomSet:
    """A data set with unused label files. Folders of label files are relative to the folder for all of them."""

    root: Path
    is_yolo: bool
    images: dict[str, list[str]] = field(default_factory=dict)  # stems by split
    missing_rows: dict[str, list[str]] = field(default_factory=dict)  # stems in the list of a split, without an image
    missing_split: str = ""
    num_objects: dict[str, int] = field(default_factory=dict)  # by label file, without suffix

    @property
    def outside(self) -> str:
        """A folder where no split expects label files."""
        return "" if self.is_yolo else "more"

    @property
    def splits(self) -> list[str]:
        return [split for split in self.images if split != self.missing_split]

    def splits_of(self, folder: str, stem: str) -> list[str]:
        """The splits whose images a file in a folder may label."""
        is_of_list = self.is_yolo and folder in self.missing_rows  # its folder is not searched for other splits
        if self.tells_split(stem) and not is_of_list:
            return self.splits
        if folder in self.splits:
            return [folder]
        return [split for split in self.splits if not (self.is_yolo and split in self.missing_rows)]  # no list is near

    def files(self, split: str, stem: str) -> set[str]:
        """The label files of an image."""
        return {f"{split}/{stem}"} if self.is_yolo else {f"{split}/{stem}", stem}

    def tells_split(self, stem: str) -> bool:
        """Whether only one split has a stem, all splits are known, and at most one in twenty of the stems of any split
        is also in another. No image is in two splits."""
        if self.missing_split:
            return False
        stems_of = {split: {*stems, *self.missing_rows.get(split, [])} for split, stems in self.images.items()}
        for split, stems in stems_of.items():
            in_others = [stem for other in stems_of if other != split for stem in stems & stems_of[other]]
            if 20 * len(set(in_others)) > len(stems):
                return False
        return sum(stem in stems for stems in stems_of.values()) <= 1

    def expected(self) -> tuple[dict[str, list[str]], dict[str, int], int]:
        """Reads the data set naively: returns the stems of the images that each split uses, its lost objects, and the
        number of second label files."""
        files = {
            (s, stem): self.files(s, stem) & self.num_objects.keys() for s in self.splits for stem in self.images[s]
        }
        labels_of: dict[str, set[int]] = {}  # numbers of objects, which differ if the labels do, by stem
        for (_, stem), own in files.items():
            labels_of.setdefault(stem, set()).update(self.num_objects[file] for file in own)
        num_second = 0
        left_out: set[tuple[str, str]] = set()
        lost = dict.fromkeys(self.splits, 0)
        for file in self.num_objects.keys() - {file for own in files.values() for file in own}:
            folder, _, stem = file.rpartition("/")
            affected = [split for split in self.splits_of(folder, stem) if files.get((split, stem)) == set()]
            lists = [s for s, rows in self.missing_rows.items() for row in rows if file in self.files(s, row)]
            loser = ""
            if lists:
                loser = lists[0]
            elif folder and folder == self.missing_split:
                continue
            elif affected:
                loser = affected[0]
                left_out |= {(split, stem) for split in affected}
            elif folder in self.splits:
                loser = "" if folder in self.missing_rows else folder  # lists lose no file that they do not name
            elif folder == self.outside and labels_of.get(stem):
                num_second += self.num_objects[file] not in labels_of[stem]
            elif not self.missing_split:
                loser = self.splits[0]
            if loser:
                lost[loser] += self.num_objects[file]
        used = {s: sorted(stem for stem in self.images[s] if (s, stem) not in left_out) for s in self.splits}
        return used, lost, num_second

    def write(self) -> dict[str, str]:
        """Writes the files. Returns the folder or list of each split."""
        entries = {split: f"images/{split}" for split in self.images}
        for split in self.splits:
            for stem in self.images[split]:
                image(self.root, f"{split}/{stem}.png")
        for split, rows in self.missing_rows.items():
            entries[split] = f"{split}.txt"
            names = [f"images/{split}/{stem}.png\n" for stem in self.images[split] + rows]
            (self.root / entries[split]).write_text("".join(names))
        for file, count in self.num_objects.items():
            if self.is_yolo:
                yolo_label(self.root, f"{file}.txt", count)
            else:
                label(self.root, f"{file}.xml", count)
        return entries


def random_set(root: Path, rng: random.Random, *, is_yolo: bool) -> RandomSet:
    made = RandomSet(root, is_yolo)
    is_mirrored = is_yolo or rng.random() < 0.6
    splits = ("train", "val", "test")[: rng.randint(2, 3)]
    stems = ["".join(rng.choices("bcdfgh", k=8)) for _ in range(9)]
    others = ["".join(rng.choices("jklmn", k=8)) for _ in range(6)]
    names = rng.choice(("same", "distinct", "one common"))
    if names == "same":
        made.images = {split: rng.sample(stems, 4) for split in splits}
    else:
        size = 22 if names == "one common" else 4
        stems = ["".join(rng.choices("bcdfgh", k=8)) for _ in range(size * len(splits) + 3)]
        made.images = {split: stems[size * i : size * (i + 1)] for i, split in enumerate(splits)}
    if names == "one common":
        for split in splits[1:]:
            made.images[split][rng.choice((1, 2))] = stems[1]
        stems = stems[:4] + stems[-4:]
    last = rng.choice(("whole", "whole", "missing", "list"))
    if last == "list":
        made.missing_rows[splits[-1]] = others[:2]
    elif last == "missing" and not is_yolo:
        made.missing_split = splits[-1]
    for split in splits:
        for i, stem in enumerate(made.images[split]):
            if i == 0 or rng.random() < 0.6:
                made.num_objects[f"{split}/{stem}" if is_mirrored else stem] = rng.randint(1, 3)
    for _ in range(4):
        folder = rng.choice((*splits, "", made.outside) if is_mirrored else ("", made.outside))
        stem = others.pop(rng.randrange(len(others)))
        if (folder or is_yolo) and rng.random() < 0.6:
            stem = stems.pop(rng.randrange(len(stems)))
        made.num_objects.setdefault(f"{folder}/{stem}".lstrip("/"), rng.randint(1, 3))
    return made


@pytest.mark.parametrize("is_yolo", [False, True])
def test_random_label_files_are_used_or_lost_once_or_explained(tmp_path, is_yolo):
    for seed in range(10):
        made = random_set(tmp_path / str(seed), random.Random(seed), is_yolo=is_yolo)
        (tmp_path / str(seed)).mkdir()
        entries = made.write()
        used, lost, num_second = made.expected()
        indexes = read(made.root, entries, *used, annotations=None if is_yolo else "voc")
        used_stems = {split: sorted(Path(path).stem for path in index.paths) for split, index in indexes.items()}
        assert used_stems == used, f"seed {seed}"
        assert {split: objects for split, (_, objects) in losses(indexes).items()} == lost, f"seed {seed}"
        assert sum(len(reported(index, SECOND_LABEL)) for index in indexes.values()) == num_second, f"seed {seed}"
