"""Splits without images: commands that do not need them run without them, and no other split loses labels."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from data.index.index import DatasetIndex
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.labels.ledger import Ledger
from data.source.dataset_spec import DataSource
from data.source.open import open_data
from tests.data.source.denied_access import deny_access
from tests.helpers.messages import refused
from tests.helpers.three_formats import write_three_formats
from tests.helpers.tiny import write_dataset
from utils.distributed.context import DistributedContext

SPLITS = {"train": range(8), "val": range(8, 12), "test": range(12, 16)}
LABELS = {"COCO": "instances.json", "VOC": "voc"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Sixteen images in three folders, each with one object, which one JSON and one folder of XML label."""
    root = tmp_path / "set"
    names = [f"{i:02}.png" for numbers in SPLITS.values() for i in numbers]
    boxes = {name: [(0, 5, 10, 30, 40)] for name in names}
    write_three_formats(root, ["cat"], dict.fromkeys(names, (60, 80)), boxes)
    for split, numbers in SPLITS.items():
        (root / "images" / split).mkdir(exist_ok=True)
        for i in numbers:
            (root / "images/train" / f"{i:02}.png").rename(root / "images" / split / f"{i:02}.png")
    return root


def describe(root: Path, **content: object) -> Path:
    path = root / "data.yaml"
    path.write_text(yaml.safe_dump({split: f"images/{split}" for split in SPLITS} | {"names": ["cat"]} | content))
    return path


def name_folders(root: Path, form: str) -> None:
    """Writes each image's folder into the JSON."""
    content = json.loads((root / "instances.json").read_text())
    split_of = {f"{i:02}.png": split for split, numbers in SPLITS.items() for i in numbers}
    for entry in content["images"]:
        entry["file_name"] = form.format(split=split_of[entry["file_name"]], name=entry["file_name"])
    (root / "instances.json").write_text(json.dumps(content))


def opened(
    data: Path, splits: tuple[str, ...] = ("train", "val"), optional: tuple[str, ...] = (), stage: str = ""
) -> dict[str, DatasetIndex]:
    """Returns the indexes of the splits, whatever is lost."""
    source = DataSource(str(data), splits, optional=optional, stage=stage)
    spec = open_data(source, DistributedContext.single())
    return {split: load_index(spec, split, IndexSettings(progress=False, max_bad=1.0)) for split in splits}


def ledgers(data: Path) -> dict[str, Ledger]:
    return {split: index.report.ledger for split, index in opened(data).items()}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("form", ["{split}/{name}", "images/{split}/{name}", "C:\\x\\{split}\\{name}"])
@pytest.mark.parametrize("missing", ["test", "train"])
def test_losses_are_those_of_the_whole_data_set_if_the_labels_name_folders(root, form, missing):
    """Of two splits, an image that is missing; it is lost whether or not the folder of the third one exists."""
    data = describe(root, annotations="instances.json")
    name_folders(root, form)
    used = tuple(split for split in SPLITS if split != missing)
    for split in used:
        (root / "images" / split / f"{SPLITS[split][0]:02}.png").unlink()
    before = {split: index.report.ledger for split, index in opened(data, used).items()}
    assert [ledger.lost_objects for ledger in before.values()] == [1, 1]
    shutil.rmtree(root / "images" / missing)
    assert {split: index.report.ledger for split, index in opened(data, used).items()} == before


def test_a_folder_below_the_missing_one_is_not_that_of_a_split(root):
    data = describe(root, annotations="instances.json")
    name_folders(root, "{split}/day/{name}")
    for split in SPLITS:
        (root / "images" / split / "day").mkdir()
        for image in (root / "images" / split).glob("*.png"):
            image.rename(image.parent / "day" / image.name)
    shutil.rmtree(root / "images/test")
    assert [ledger.losses for ledger in ledgers(data).values()] == [(), ()]


@pytest.mark.parametrize("harm", [shutil.rmtree, lambda folder: [image.unlink() for image in folder.iterdir()]])
@pytest.mark.parametrize("labels", LABELS)
def test_labels_that_may_be_of_a_missing_folder_are_reported_but_not_lost(root, caplog, labels, harm):
    """The names have no folders, so the images may belong to any split. The other splits can be used, with one
    warning."""
    data = describe(root, annotations=LABELS[labels])
    harm(root / "images/test")
    caplog.set_level("INFO", "lockstep")
    for split, index in opened(data).items():
        assert index.report.ledger == Ledger(len(SPLITS[split]), len(SPLITS[split]))
        kinds = [line.split(": ")[-2] for line in index.report.lines]
        assert kinds == ["labels of an image that is not here"] * 4
    notes = [
        line for line in caplog.messages if "4 annotated images not found, which may be in a missing folder or" in line
    ]
    assert len(notes) == (2 if labels == "COCO" else 0)
    (warning,) = warnings(caplog)
    assert "images/test" in warning
    assert warning.endswith(f"labels in {root / LABELS[labels]} that may be of its images do not count as lost")


@pytest.mark.parametrize("labels", [False, True])
def test_a_second_entry_of_an_image_is_lost_although_a_folder_is_missing(root, labels):
    """Its labels differ from those of the first entry, so they are not a repetition."""
    content = json.loads((root / "instances.json").read_text())
    content["images"].append({"id": 7, "file_name": "00.png"})
    if labels:
        content["annotations"].append({**content["annotations"][0], "id": 999, "image_id": 7, "bbox": [1, 2, 9, 9]})
    (root / "instances.json").write_text(json.dumps(content))
    data = describe(root, annotations="instances.json")
    before = ledgers(data)
    assert before["train"].lost_objects == int(labels)
    shutil.rmtree(root / "images/test")
    assert ledgers(data) == before


def test_losses_of_a_split_count_again_when_the_missing_folder_exists(root):
    """The cached result of one state is not used for the other."""
    data = describe(root, annotations="instances.json")
    (root / "images/train/00.png").unlink()
    before = ledgers(data)
    (root / "images/test").rename(root / "elsewhere")
    assert ledgers(data) != before
    (root / "elsewhere").rename(root / "images/test")
    assert ledgers(data) == before
    assert sum(ledger.lost_objects for ledger in before.values()) == 1


@pytest.mark.parametrize("entry", ["private/test", "private/test.txt"])
@pytest.mark.parametrize("labels", [*LABELS, "YOLO"])
def test_a_split_without_access_that_is_not_used_is_like_a_missing_one(root, caplog, monkeypatch, labels, entry):
    content = {} if labels == "YOLO" else {"annotations": LABELS[labels]}
    data = describe(root, test=entry, **content)
    shutil.copytree(root / "labels/train", root / "labels/val")
    (root / "voc/00.xml").unlink()  # so that unused label files are explained
    (root / "labels/train/00.txt").unlink()
    before = ledgers(data)
    (root / "private").mkdir()
    (root / "images/test").rename(root / "private/test")
    (root / "private/test.txt").write_text("private/test/12.png\n")
    deny_access(monkeypatch, root / "private")
    caplog.clear()
    assert ledgers(data) == before
    (warning,) = [line for line in warnings(caplog) if "private" in line]
    assert warning.startswith(f"{root}/{entry}: permission denied (named by 'test' of {data})")


def test_a_missing_folder_without_shared_labels_is_one_warning(tmp_path, caplog):
    data = write_dataset(tmp_path, train=3, val=2)
    data.write_text(data.read_text() + "test: images/test\n")
    (tmp_path / "images/train/000.png").unlink()
    assert [ledger.lost_images for ledger in ledgers(data).values()] == [1, 0]
    assert [line for line in warnings(caplog) if "images/test" in line] == [
        f"{tmp_path}/images/test: not found (named by {data}); {tmp_path}/images has train, val; correct its paths; "
        "'test' is not used here"
    ]


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("labels", LABELS)
def test_an_optional_split_without_images_leaves_its_labels_in_a_shared_file(root, tmp_path, caplog, labels, is_copied):
    data = describe(root, annotations=LABELS[labels])
    shutil.rmtree(root / "images/val")
    stage = str(tmp_path / "stage") if is_copied else ""
    index = opened(data, ("train",), ("val",), stage)["train"]
    assert index.report.ledger == Ledger(8, 8)
    (warning,) = warnings(caplog)
    assert "'val' is left out, and part of 'train' is held out in its place; labels in " in warning


def test_a_data_set_of_only_an_optional_split_without_images_lacks_the_others(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "data.yaml").write_text("val: images\nnames: [a]\n")
    source = DataSource(str(tmp_path / "data.yaml"), ("train",), optional=("val",))
    with refused("data.yaml: has no 'train' split; add 'train: <folder>'"):
        open_data(source, DistributedContext.single())


def test_a_joined_optional_split_without_images_is_left_out(tmp_path, caplog):
    parts = [write_dataset(tmp_path / name, train=3, val=2) for name in ("a", "b")]
    data = tmp_path / "joined.yaml"
    data.write_text(yaml.safe_dump({split: [str(part) for part in parts] for split in ("train", "val")}))
    source = DataSource(str(data), ("train",), optional=("val",))
    shutil.rmtree(tmp_path / "a/images/val")
    assert "val" in open_data(source, DistributedContext.single()).splits
    shutil.rmtree(tmp_path / "b/images/val")
    caplog.clear()
    assert "val" not in open_data(source, DistributedContext.single()).splits
    (warning,) = warnings(caplog)
    assert warning.startswith(f"{tmp_path}/a/images/val: not found (named by {parts[0]})")


@pytest.mark.parametrize("missing", ["val", "train"])
def test_names_come_from_the_json_of_the_first_split_if_another_one_is_missing(root, missing):
    for split in SPLITS:
        shutil.copy(root / "instances.json", root / f"{split}.json")
    data = describe(root, annotations={split: f"{split}.json" for split in SPLITS}, names=None)
    (root / f"{missing}.json").unlink()
    source = DataSource(str(data), ("test",))
    if missing == "train":
        with refused("train.json: not found (named by .../data.yaml)..."):
            open_data(source, DistributedContext.single())
        return
    assert open_data(source, DistributedContext.single()).names == ("cat",)
