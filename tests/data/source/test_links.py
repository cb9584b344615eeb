"""Data sets behind symbolic links have the images and labels of the same set without links, in every command's reader.

The set is ``store/users/u/proj``, and its images are outside of it. It is opened by way of the link ``homes/u``, so the
names of images relative to it begin with ``..``; where the kernel would follow these, there are other files.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

from data.index.index import DatasetIndex
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.loading.build import build_run_val_loader
from data.render.letterbox import CanvasRule
from data.source.dataset_spec import DataSource
from data.source.dataset_yaml import load_dataset_spec
from data.source.files import list_split
from data.source.open import open_data
from engine.checkpoint.data_location import describe_location, find_location
from tests.helpers.index_fingerprint import index_fingerprint
from tests.helpers.three_formats import voc_text, write_image, write_three_formats
from tests.helpers.tiny import write_dataset
from tools.check.checks.scan import scan_issues
from tools.check.scan_splits import scan_dataset
from tools.shard.write_shards import write_set
from utils.config.settings import Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError

NAMES = ("cat", "dog")
OBJECTS = {"a.png": [(0, 4, 6, 24, 30)], "sub/b.png": [(1, 10, 10, 30, 40), (0, 0, 0, 20, 20)]}


@pytest.fixture
def proj(tmp_path) -> Path:
    """The folder of the data set, named by way of a link; ``ext/images/train`` has its images and labels."""
    real = tmp_path / "store" / "users" / "u" / "proj"
    real.mkdir(parents=True)
    (tmp_path / "homes").mkdir()
    (tmp_path / "homes" / "u").symlink_to(real.parent)
    write_three_formats(tmp_path / "ext", NAMES, dict.fromkeys(OBJECTS, (48, 64)), OBJECTS)
    decoy = tmp_path / "store" / "ext"  # where the kernel would look for ../../../ext of homes/u/proj
    shutil.copytree(tmp_path / "ext", decoy)
    for image in decoy.rglob("*.png"):
        image.write_bytes(b"another image")
    return tmp_path / "homes" / "u" / "proj"


def by_folder(proj: Path) -> dict[str, object]:
    return {"train": str(ext(proj) / "images/train")}


def by_list(proj: Path) -> dict[str, object]:
    (proj / "list.txt").write_text("".join(f"{ext(proj)}/images/train/{name}\n" for name in OBJECTS))
    return {"train": "list.txt"}


def by_coco(proj: Path) -> dict[str, object]:
    return by_folder(proj) | {"annotations": str(ext(proj) / "instances.json")}


def by_voc(proj: Path) -> dict[str, object]:
    return by_folder(proj) | {"annotations": str(ext(proj) / "voc")}


def joined(proj: Path) -> dict[str, object]:
    part = ext(proj) / "part.yaml"
    part.write_text(yaml.safe_dump({"train": "images/train", "val": "images/train", "names": list(NAMES)}))
    return {"train": [str(part)]}


def ext(proj: Path) -> Path:
    return proj.parents[2] / "ext"


WAYS = pytest.mark.parametrize("way", [by_folder, by_list, by_coco, by_voc, joined], ids=lambda way: way.__name__)


def described(proj: Path, way: Callable[[Path], dict[str, object]], **more: object) -> Path:
    path = proj / "data.yaml"
    content = way(proj)
    path.write_text(yaml.safe_dump(content | {"val": content["train"], "names": list(NAMES)} | more))
    return path


def boxes_of(index: DatasetIndex) -> dict[str, list[list[float]]]:
    """Class, center and size of the boxes by the images' file names."""
    return {os.path.basename(path): index.labels(i).tolist() for i, path in enumerate(index.paths)}


def assert_right(index: DatasetIndex) -> None:
    corners = {"a.png": [[0, 14, 18, 20, 24]], "b.png": [[1, 20, 25, 20, 30], [0, 10, 10, 20, 20]]}
    found = {name: [[c, x * 64, y * 48, w * 64, h * 48] for c, x, y, w, h in b] for name, b in boxes_of(index).items()}
    assert found.keys() == corners.keys()
    for name, boxes in corners.items():
        np.testing.assert_allclose(found[name], boxes, atol=1e-4)


@WAYS
def test_images_outside_of_a_set_below_a_linked_folder(proj, way):
    spec = load_dataset_spec(described(proj, way))
    for _ in range(2):  # scanned, and from the cache
        index = load_index(spec, "train", IndexSettings(progress=False, max_bad=0.0))
        assert_right(index)
        assert all(Path(index.path(i)).is_relative_to(ext(proj)) for i in range(len(index)))
        assert not index.report.problems
    (split,) = scan_dataset(spec, ("train",), workers=1)
    assert not scan_issues(split)


@pytest.mark.parametrize("way", [by_folder, by_list, by_coco, by_voc], ids=lambda way: way.__name__)
def test_they_are_staged(proj, tmp_path, way):
    source = described(proj, way)
    original = index_fingerprint(load_dataset_spec(source))
    place = DataSource(str(source), ("train",), stage=str(tmp_path / "stage"))
    spec = open_data(place, DistributedContext.single())
    shutil.rmtree(ext(proj))
    assert index_fingerprint(spec) == original
    index = load_index(spec, "train", IndexSettings(progress=False, cache_dir=str(tmp_path / "other")))
    assert_right(index)


@WAYS
def test_they_are_written_as_shards(proj, tmp_path, way):
    write_set(load_dataset_spec(described(proj, way)), tmp_path / "out", 10**9, IndexSettings())
    shutil.rmtree(ext(proj))
    assert_right(load_index(load_dataset_spec(tmp_path / "out"), "train", IndexSettings(progress=False)))


def test_their_tiles_are_read(proj):
    spec = load_dataset_spec(described(proj, by_folder, tile=32))
    config = TrainConfig(data=str(proj / "data.yaml"), imgsz=64, batch_size=1, workers=0)
    loader = build_run_val_loader(DistributedContext.single(), config, Hyperparameters(), spec, CanvasRule(64, 32))
    assert sum(len(batch.indices) for batch in loader) > len(OBJECTS)


def test_the_stage_may_not_be_in_the_data_set_behind_a_link(proj, tmp_path):
    source = described(proj, by_folder)
    (tmp_path / "place").symlink_to(ext(proj) / "images" / "train")
    with pytest.raises(Exception, match="is inside the data set"):
        open_data(DataSource(str(source), ("train",), stage=str(tmp_path / "place")), DistributedContext.single())


@pytest.mark.parametrize("labels", ["beside the link", "beside its target"])
@pytest.mark.parametrize("entry", ["../images/train", "images/train", "../pics", "list.txt", "relocated.txt"])
def test_a_link_to_images_does_not_lose_their_labels(tmp_path, labels, entry):
    source = write_dataset(tmp_path / "store", train=4, val=2)
    expected = boxes_of(load_index(load_dataset_spec(source), "train", IndexSettings(progress=False)))
    root = tmp_path / "set" / "sub"
    root.mkdir(parents=True)
    base = root.parent if entry.startswith("..") else root
    (base / "images").symlink_to(tmp_path / "store" / "images")
    (base / "pics").symlink_to(tmp_path / "store" / "images" / "train")
    (root / "list.txt").write_text("".join(f"images/train/00{i}.png\n" for i in range(4)))
    (root / "relocated.txt").write_text("".join(f"/old/images/train/00{i}.png\n" for i in range(4)))
    if labels == "beside the link" and entry != "../pics":
        shutil.move(tmp_path / "store" / "labels", base / "labels")
    (root / "data.yaml").write_text(f"train: {entry}\nnames: [light, dark]\n")
    index = load_index(load_dataset_spec(root / "data.yaml"), "train", IndexSettings(progress=False))
    assert boxes_of(index) == expected
    assert not index.report.totals.get("missing label file")


def write_labeled_links(root: Path, *names: str) -> None:
    """Folders of images that are links to one, each with labels of its own: a box of another size."""
    write_three_formats(root, ("a",), {"x.png": (20, 40), "y.png": (20, 40)}, {})
    shutil.move(root / "images" / "train", root / "pics")
    shutil.rmtree(root / "images")
    for number, name in enumerate(names, 1):
        (root / name / "labels").mkdir(parents=True)
        (root / name / "images").symlink_to(root / "pics")
        for stem in "xy":
            (root / name / "labels" / f"{stem}.txt").write_text(f"0 0.5 0.5 0.{number} 0.{number}\n")
    (root / "data.yaml").write_text("train: .\nnames: [a]\n")


def test_an_image_with_labels_of_its_own_in_two_folders_is_read_twice(tmp_path):
    write_labeled_links(tmp_path / "set", "left", "right")
    index = load_index(load_dataset_spec(tmp_path / "set" / "data.yaml"), "train", IndexSettings(progress=False))
    assert list(index.paths) == ["left/images/x.png", "left/images/y.png", "right/images/x.png", "right/images/y.png"]
    assert [index.labels(i)[0, 3].round(3) for i in range(4)] == pytest.approx([0.1, 0.1, 0.2, 0.2])
    assert list(index.report.lines) == [
        f"right/labels/{stem}.txt: image with a label file for each of its names: left/images/{stem}.png, which has "
        f"left/labels/{stem}.txt, is used a second time with these labels"
        for stem in "xy"
    ]
    assert index.report.ledger.losses == ()


def test_a_name_whose_label_file_is_empty_or_cannot_be_read_does_not_list_the_image_again(tmp_path):
    root = tmp_path / "set"
    write_labeled_links(root, "left", "right")
    (root / "left/labels/x.txt").write_text("")
    no_file(root / "right/labels", "y.txt")
    index = load_index(load_dataset_spec(root / "data.yaml"), "train", IndexSettings(progress=False, max_bad=0.0))
    assert list(index.paths) == ["left/images/y.png", "right/images/x.png"]
    assert [len(index.labels(i)) for i in range(2)] == [1, 1]
    assert sorted(index.report.lines) == [
        "left/labels/x.txt: second label file of an image: has no objects; the labels in right/labels/x.txt are used",
        "right/labels/y.txt: second label file of an image: cannot be read; the labels in left/labels/y.txt are used",
    ]


def test_copies_of_one_label_file_list_the_image_once(tmp_path):
    root = tmp_path / "set"
    write_labeled_links(root, "left", "right")
    shutil.copy(root / "left/labels/x.txt", root / "right/labels/x.txt")
    index = load_index(load_dataset_spec(root / "data.yaml"), "train", IndexSettings(progress=False, max_bad=0.0))
    assert list(index.paths) == ["left/images/x.png", "left/images/y.png", "right/images/y.png"]
    assert not [line for line in index.report.lines if "x.png" in line]


def test_a_label_file_without_objects_does_not_list_the_image_again_whatever_its_size(tmp_path):
    write_three_formats(tmp_path, ("a",), {"left/x.png": (20, 40)}, {})
    (tmp_path / "images/train/right").symlink_to("left")
    for folder, rows in (("left", []), ("right", [(0, 2, 2, 10, 10)])):
        (tmp_path / "voc" / folder).mkdir(parents=True)
        (tmp_path / "voc" / folder / "x.xml").write_text(voc_text(rows, ("a",), 20, 40))
    (tmp_path / "data.yaml").write_text("train: images/train\nnames: [a]\nannotations: voc\n")
    index = load_index(load_dataset_spec(tmp_path / "data.yaml"), "train", IndexSettings(progress=False, max_bad=0.0))
    assert [len(index.labels(i)) for i in range(len(index))] == [1]
    (line,) = index.report.lines
    assert line.startswith("voc/left/x.xml: second label file of an image: has no objects; the labels in ")


def test_another_name_of_a_folder_adds_no_images(tmp_path):
    root = tmp_path / "set"
    write_labeled_links(root, "left")
    (root / "again").symlink_to("left")
    (root / "left" / "deep").mkdir()
    (root / "left" / "deep" / "loop").symlink_to("../..")
    index = load_index(load_dataset_spec(root / "data.yaml"), "train", IndexSettings(progress=False))
    assert list(index.paths) == ["again/images/x.png", "again/images/y.png"]
    (root / "left/labels/x.txt").unlink()
    (root / "left/labels/x.txt").symlink_to("nowhere")
    broken = load_index(load_dataset_spec(root / "data.yaml"), "train", IndexSettings(progress=False, max_bad=0.5))
    assert list(broken.paths) == ["again/images/y.png"]
    assert broken.report.ledger.lost_images == 1  # under both names
    (root / "data.yaml").write_text("train: .\nannotations: all.json\n")
    images = [{"id": i, "file_name": name} for i, name in enumerate(("x.png", "left/images/y.png"))]
    boxes = [{"id": i, "image_id": i, "category_id": 1, "bbox": [2, 2, 8, 8]} for i in range(2)]
    (root / "all.json").write_text(
        json.dumps({"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "a"}]})
    )
    index = load_index(load_dataset_spec(root / "data.yaml"), "train", IndexSettings(progress=False))
    assert len(index) == len(index.classes) == 2


def no_file(labels: Path, name: str = "x.txt") -> None:
    (labels / name).unlink()
    (labels / name).symlink_to("nowhere")


def of_no_image(labels: Path) -> None:
    (labels / "z.txt").write_text("0 0.5 0.5 0.1 0.1\n")


def called_similarly(labels: Path) -> None:
    (labels / "x.txt").rename(labels / "x-1.txt")


def in_another_format(labels: Path) -> None:
    (labels / "x.txt").unlink()
    (labels / "x.json").write_text('{"shapes": [{"label": "a", "points": [[1, 1], [9, 9]]}]}')


def no_image(labels: Path) -> None:
    (labels.parent / "images" / "z.png").symlink_to("nowhere")


@pytest.mark.parametrize("harm", [no_file, of_no_image, called_similarly, in_another_format, no_image])
@pytest.mark.parametrize("names", [("left",), ("left", "right")])
def test_another_name_of_a_folder_loses_nothing_twice(tmp_path, harm, names):
    root = tmp_path / "set"
    write_labeled_links(root, *names)
    harm(root / "left/labels")
    settings = IndexSettings(progress=False, max_bad=1.0)
    expected = load_index(load_dataset_spec(root / "data.yaml"), "train", settings)
    # Then the image is used, and nothing is lost.
    is_labeled_in_right = harm in (in_another_format, no_file) and len(names) > 1
    assert bool(expected.report.ledger.losses) != is_labeled_in_right
    (root / "again").symlink_to("left")
    index = load_index(load_dataset_spec(root / "data.yaml"), "train", settings)
    assert len(index) == len(expected)
    assert len(index.report.lines) == len(expected.report.lines)
    assert index.report.ledger.loss_summary() == expected.report.ledger.loss_summary()


def write_left_and_again(root: Path, *names: str) -> None:
    """Images with labels in ``left``, which ``again`` shows, too."""
    for name in names:
        for folder in ("images", "labels"):
            (root / "left" / folder / name).parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(root / f"left/images/{name}.png"), np.full((20, 40, 3), len(name), np.uint8))
        (root / f"left/labels/{name}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
    (root / "again").symlink_to("left")


def in_several_files(root: Path) -> None:
    (root / "labels/left/x.txt").rename(root / "labels/left/x.TXT")
    (root / "labels/left/x.Txt").write_text("0 0.5 0.5 0.1 0.1\n" * 2)


def misplaced(root: Path) -> None:
    (root / "labels/left/old").mkdir()
    (root / "labels/left/x.txt").rename(root / "labels/left/old/x.txt")


def also_in_another_format(root: Path) -> None:
    (root / "images/left/x.json").write_text('{"shapes": [{"label": "a", "points": [[1, 1], [9, 9]]}]}')


def also_of_no_image(root: Path) -> None:
    (root / "labels/left/spare.txt").write_text("0 0.5 0.5 0.1 0.1\n")


@pytest.mark.parametrize("harm", [in_several_files, misplaced, also_in_another_format, also_of_no_image])
@pytest.mark.parametrize("links", [("images",), ("images", "labels")], ids=len)
def test_a_link_inside_of_a_split_changes_nothing(tmp_path, harm, links):
    """Each image keeps its name without a link, and its loss counts once."""
    root = tmp_path / "set"
    names = ("left/u", "left/v", "left/x")
    for number, name in enumerate(names):
        for folder in ("images", "labels"):
            (root / folder / "left").mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(root / f"images/{name}.png"), np.full((20, 40, 3), number, np.uint8))
        (root / f"labels/{name}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
    harm(root)
    (root / "data.yaml").write_text("train: images\nnames: [a]\n")
    settings = IndexSettings(progress=False, max_bad=1.0)
    expected = load_index(load_dataset_spec(root / "data.yaml"), "train", settings)
    for folder in links:
        (root / folder / "again").symlink_to("left")
    index = load_index(load_dataset_spec(root / "data.yaml"), "train", settings)
    assert list(index.paths) == list(expected.paths)
    assert boxes_of(index) == boxes_of(expected)
    assert list(index.report.lines) == list(expected.report.lines)
    assert index.report.ledger == expected.report.ledger


def test_the_labels_of_several_folders_may_be_in_one(tmp_path):
    """A label file of an image in one folder is not left over in the others."""
    root = tmp_path / "set"
    (root / "flat").mkdir(parents=True)
    (root / "labels").mkdir()
    for folder, name in (("a", "x"), ("b", "y")):
        (root / "images" / folder).mkdir(parents=True)
        cv2.imwrite(str(root / f"images/{folder}/{name}.png"), np.zeros((20, 40, 3), np.uint8))
        (root / f"flat/{name}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
        (root / "labels" / folder).symlink_to(root / "flat")
    (root / "data.yaml").write_text("train: images\nnames: [a]\n")
    index = load_index(load_dataset_spec(root / "data.yaml"), "train", IndexSettings(progress=False, max_bad=0.0))
    assert (len(index), len(index.classes), index.report.problems) == (2, 2, 0)
    (root / "flat/z.txt").write_text("0 0.5 0.5 0.4 0.4\n")
    index = load_index(load_dataset_spec(root / "data.yaml"), "train", IndexSettings(progress=False, max_bad=1.0))
    assert (index.report.ledger.lost_images, index.report.problems) == (1, 1)


def test_a_list_and_a_walk_of_one_folder_show_different_images_of_a_link(tmp_path):
    root = tmp_path / "set"
    write_left_and_again(root, "a", "b", "c", "d")
    (root / "train.txt").write_text("again/images/a.png\n")
    (root / "data.yaml").write_text("train: [train.txt, again/images, left/images]\nnames: [a]\n")
    index = load_index(load_dataset_spec(root / "data.yaml"), "train", IndexSettings(progress=False))
    assert sorted(Path(path).name for path in index.paths) == ["a.png", "b.png", "c.png", "d.png"]
    assert index.report.ledger.losses == ()  # a.png is listed twice, and used once


def test_a_json_names_the_folder_itself_and_not_a_link_to_it(tmp_path):
    """Images of one name are in two folders, and a link shows one of them under a name that is sorted before it."""
    root = tmp_path / "set"
    objects = {f"{folder}/{name}.png": [(0, 2, 2, 10, 10)] for folder in ("one", "two") for name in "xy"}
    write_three_formats(root, ("a",), dict.fromkeys(objects, (20, 40)), objects)
    (root / "images/train/alias").symlink_to("two")
    (root / "data.yaml").write_text("train: images\nnames: [a]\nannotations: instances.json\n")
    index = load_index(load_dataset_spec(root / "data.yaml"), "train", IndexSettings(progress=False))
    assert list(index.paths) == [f"images/train/{name}" for name in objects]
    assert index.report.problems == 0


@pytest.mark.parametrize("broken", ["left", "right"])
def test_a_view_without_labels_is_no_background_if_those_of_another_cannot_be_read(tmp_path, broken):
    root = tmp_path / "set"
    write_labeled_links(root, "left", "right")
    other = {"left": "right", "right": "left"}[broken]
    (root / broken / "labels/x.txt").unlink()
    (root / broken / "labels/x.txt").symlink_to("nowhere")
    (root / other / "labels/x.txt").unlink()
    index = load_index(load_dataset_spec(root / "data.yaml"), "train", IndexSettings(progress=False, max_bad=0.5))
    assert list(index.paths) == ["left/images/y.png", "right/images/y.png"]
    assert index.report.ledger.lost_images == 1


@pytest.mark.parametrize("entry", ["pics", "list.txt", "relocated.txt"])
@pytest.mark.parametrize("labels", ["all.json", "voc"])
def test_annotations_name_images_by_the_links_in_their_split(tmp_path, entry, labels):
    """Also where the linked folders have YOLO txt beside them."""
    root = tmp_path / "set"
    names = [f"{folder}/{name}" for folder in "ab" for name in "xy"]
    write_three_formats(tmp_path / "store", ("a",), {f"{name}.png": (20, 40) for name in names}, {})
    (root / "pics").mkdir(parents=True)
    for folder in "ab":
        (root / "pics" / folder).symlink_to(tmp_path / "store/images/train" / folder)
        (root / "voc" / folder).mkdir(parents=True)
    for name in names:
        (root / f"voc/{name}.xml").write_text(voc_text([(0, 2, 2, 10, 10)], ("a",), 20, 40))
    in_coco(root, [f"pics/{name}.png" for name in names])
    for file, row in (("list.txt", "pics/{}.png\n"), ("relocated.txt", "/old/pics/{}.png\n")):
        (root / file).write_text("".join(map(row.format, names)))
    (root / "data.yaml").write_text(f"train: {entry}\nnames: [a]\nannotations: {labels}\n")
    index = load_index(load_dataset_spec(root / "data.yaml"), "train", IndexSettings(progress=False, max_bad=0.0))
    assert list(index.paths) == [f"pics/{name}.png" for name in names]
    assert len(index.classes) == len(names)


def write_linked_folders(root: Path) -> list[str]:
    """Images of the same names in two folders, of which links show one under a second name; returns their names, the
    first folder by the link."""
    write_three_formats(
        root, ("a",), dict.fromkeys(("left/x.png", "left/y.png", "other/x.png", "other/y.png"), (20, 40)), {}
    )
    (root / "images/train/again").symlink_to("left")
    (root / "data.yaml").write_text("train: images/train\nnames: [a]\nannotations: all\n")
    return ["again/x.png", "again/y.png", "other/x.png", "other/y.png"]


def in_voc(root: Path, names: Sequence[str]) -> None:
    (root / "all").mkdir()
    for number, name in enumerate(names):
        text = voc_text([(0, 2, 2, 10 + number, 10)], ("a",), 20, 40)
        text = text.replace("<annotation>", f"<annotation><filename>{name}</filename>")
        (root / f"all/{number}.xml").write_text(text)


def in_coco(root: Path, names: Sequence[str]) -> None:
    images = [{"id": i, "file_name": name} for i, name in enumerate(names)]
    boxes = [{"id": i, "image_id": i, "category_id": 1, "bbox": [2, 2, 8 + i, 8]} for i in range(len(names))]
    content = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "a"}]}
    (root / "all.json").write_text(json.dumps(content))
    (root / "data.yaml").write_text("train: images/train\nnames: [a]\nannotations: all.json\n")


@pytest.mark.parametrize("write", [in_voc, in_coco])
def test_labels_may_name_an_image_by_a_link(tmp_path, write):
    """Each image is found, also where the other folder has an image of the same name."""
    write(tmp_path, write_linked_folders(tmp_path))
    index = load_index(load_dataset_spec(tmp_path / "data.yaml"), "train", IndexSettings(progress=False, max_bad=0.0))
    assert list(index.paths) == [f"images/train/{name}.png" for name in ("left/x", "left/y", "other/x", "other/y")]
    assert [round(index.labels(i)[0, 3] * 40) for i in range(4)] == [8, 9, 10, 11]
    assert index.report.problems == 0


@pytest.mark.parametrize("is_equal", [True, False])
def test_two_voc_files_may_name_an_image_by_its_two_names(tmp_path, is_equal):
    """Copies are one label file; with different labels, the image is listed twice."""
    in_voc(tmp_path, [*write_linked_folders(tmp_path), "left/x.png"])
    if is_equal:
        text = (tmp_path / "all/0.xml").read_text()
        (tmp_path / "all/4.xml").write_text(text.replace("again/x.png", "left/x.png"))
    index = load_index(load_dataset_spec(tmp_path / "data.yaml"), "train", IndexSettings(progress=False, max_bad=0.0))
    images = [name.removeprefix("images/train/") for name in index.paths]
    assert images == [*([] if is_equal else ["again/x.png"]), "left/x.png", "left/y.png", "other/x.png", "other/y.png"]
    assert all(len(index.labels(i)) == 1 for i in range(len(index)))


def test_a_json_of_several_splits_names_the_images_of_another_by_a_link(tmp_path):
    in_coco(tmp_path, write_linked_folders(tmp_path))
    (tmp_path / "data.yaml").write_text(
        "train: images/train/other\nval: [images/train/left, images/train/again]\nnames: [a]\nannotations: all.json\n"
    )
    for split in ("train", "val"):
        spec = load_dataset_spec(tmp_path / "data.yaml")
        index = load_index(spec, split, IndexSettings(progress=False, max_bad=0.0))
        assert (len(index), index.report.problems) == (2, 0)


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_json_may_repeat_the_labels_of_an_image_under_another_name(tmp_path, is_equal):
    names = write_linked_folders(tmp_path)
    in_coco(tmp_path, [*names, "left/x.png"])
    content = json.loads((tmp_path / "all.json").read_text())
    if is_equal:
        content["annotations"][-1]["bbox"] = content["annotations"][0]["bbox"]
    (tmp_path / "all.json").write_text(json.dumps(content))
    index = load_index(load_dataset_spec(tmp_path / "data.yaml"), "train", IndexSettings(progress=False, max_bad=0.5))
    assert len(index) == 4
    assert index.report.ledger.lost_objects == (0 if is_equal else 1)


def test_links_that_all_lead_to_each_other_end(tmp_path):
    root = tmp_path / "set"
    write_labeled_links(root, "v")
    for i in range(12):
        (root / f"d{i}").mkdir()
        for j in range(12):
            (root / f"d{i}" / f"to{j}").symlink_to(root / f"d{j}")
        shutil.copy(root / "pics" / "x.png", root / f"d{i}")
        (root / f"d{i}" / "x.txt").write_text("0 0.5 0.5 0.1 0.1\n")
    index = load_index(load_dataset_spec(root / "data.yaml"), "train", IndexSettings(progress=False))
    assert len(index) == 2 + 12


@pytest.mark.parametrize("way", [by_folder, by_coco, by_voc], ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", ["b", "2024.05"])
def test_a_link_to_a_folder_that_does_not_exist_is_a_missing_image(proj, way, name):
    (ext(proj) / "images/train" / name).symlink_to("/mnt/gone/images")
    (ext(proj) / "images/train/notes.txt").symlink_to("/mnt/gone/notes.txt")  # no folder is called like that
    spec = load_dataset_spec(described(proj, way))
    index = load_index(spec, "train", IndexSettings(progress=False, max_bad=0.5))
    assert_right(index)
    (line,) = index.report.lines
    assert line.endswith(
        f"ext/images/train/{name}: missing image: a broken link; the link may lead to a folder of images"
    )
    assert index.report.ledger.lost_images == 1
    with pytest.raises(UserError, match="the link may lead to a folder of images"):
        load_index(spec, "train", IndexSettings(progress=False, max_bad=0.0))


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("set/images/train/up", "../.."),
        ("set/images/train/deep/up", "../../../images"),
        ("set/images/train/shared/up", ".."),  # shared is a link to store/train
    ],
)
def test_a_link_to_a_folder_above_a_split_does_not_lead_to_the_images_of_others(tmp_path, link, target):
    root = tmp_path / "set"
    for name in ("train/a", "train/deep/b", "val/c"):
        write_image(root / f"images/{name}.png", 20, 40)
    for name in ("train/d", "val/e"):
        write_image(tmp_path / f"store/{name}.png", 20, 40)
    (root / "images/train/shared").symlink_to(tmp_path / "store/train")
    (root / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [a]\n")
    expected = list_split(load_dataset_spec(root / "data.yaml"), "train")
    assert len(expected.images) == 3
    (tmp_path / link).symlink_to(target)
    assert list_split(load_dataset_spec(root / "data.yaml"), "train") == expected


def test_a_run_below_a_link_finds_its_moved_data(tmp_path):
    home = tmp_path / "home"
    (home / "set").mkdir(parents=True)
    (home / "set" / "data.yaml").write_text("names: [a]")
    (home / "runs").mkdir()
    (home / "elsewhere" / "deep").mkdir(parents=True)
    (home / "runs" / "exp").symlink_to(home / "elsewhere" / "deep")
    stored = describe_location(home / "set" / "data.yaml", str(home / "set"), home / "runs" / "exp")
    home.rename(tmp_path / "moved")
    (tmp_path / "moved" / "runs" / "exp").unlink()
    (tmp_path / "moved" / "runs" / "exp").symlink_to(tmp_path / "moved" / "elsewhere" / "deep")
    moved = tmp_path / "moved"
    assert find_location(stored, moved / "runs" / "exp" / "last.pt") == (
        str(moved / "set" / "data.yaml"),
        str(moved / "set"),
    )
