"""Names of images in annotation files lead to the same images when COCO JSON is read and when exports are converted."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
import yaml

from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.labels.image_names import ImageNames, loose, readings_of
from data.source.dataset_yaml import load_dataset_spec
from tests.helpers.messages import refused
from tests.helpers.three_formats import write_image
from tools.convert.to_coco import convert
from utils.errors import UserError

NFC, NFD = (unicodedata.normalize(form, "Café été.png") for form in ("NFC", "NFD"))
# What an annotation file calls an image, and the file.
NAMES = [
    ("a.png", "a.png"),
    ("train/a.png", "a.png"),
    ("C:\\me\\train\\a.png", "a.png"),
    ("/data/local-files/?d=set%2Fa%5Cx.png", "a/x.png"),
    ("/data/local-files/?d=a%5Cx.png", "x.png"),
    ("/data/local-files/?d=my%20set/x%2By.png&t=1", "x+y.png"),
    ("http://localhost:8080/data/local-files/?d=x.png", "x.png"),
    ("/data/upload/1/x.png", "x.png"),
    ("x%20y.png", "x y.png"),
    ("file:///C:/me/x%20y.png", "x y.png"),
    ("https://host.org/a/x.png?X-Amz-Date=2026&X-Amz-Signature=3f%2Fb.png", "x.png"),
    ("https://host.org/a/x.png#main", "x.png"),
    ("s3://bucket/a/x%20y.png", "x y.png"),
    ("https://storage.example/o/a%2Fx.png?alt=media", "x.png"),
    ("X.PNG", "x.png"),
    ("x.png", "X.PNG"),
    (NFC, NFD),
    (NFD, NFC),
    (NFC.upper(), NFD),
    ("https://host/Caf%C3%A9%20%C3%A9t%C3%A9.png", NFD),
    ("000012", "000012.png"),
    ("IMG.0012", "img.0012.png"),
    ("100%.png", "100%.png"),
    ("what?.png", "what?.png"),
    ("x%20y.png", "x%20y.png"),
]


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "set"


def write_coco(root: Path, names: list[str]) -> Path:
    """A COCO JSON whose image ``i`` has a box at x = i."""
    images = [{"id": i, "file_name": name} for i, name in enumerate(names)]
    boxes = [{"id": i, "image_id": i, "category_id": 1, "bbox": [i, 0, 9, 9]} for i in range(len(names))]
    (root / "all.json").write_text(
        json.dumps({"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "a"}]})
    )
    (root / "data.yaml").write_text("train: images\nannotations: all.json\n")
    return root / "data.yaml"


def boxes_of(path: Path, **options: object) -> dict[str, list[int]]:
    """Returns the x coordinates of each image's boxes, by the image's path."""
    index = load_index(load_dataset_spec(path), "train", IndexSettings(progress=False, **options))
    starts = index.offsets.tolist()
    x = index.boxes_xywh_px[:, 0].astype(int).tolist()
    return {Path(path).name: x[a:b] for path, a, b in zip(index.paths, starts, starts[1:])}


@pytest.mark.parametrize(("name", "file"), NAMES)
def test_reading_and_converting_find_the_same_image(root, tmp_path, name, file):
    for other in (file, "other.png"):
        write_image(root / "images" / other, 20, 30)
    data = write_coco(root, ["other.png", name])
    assert boxes_of(data, max_bad=0.0) == {"other.png": [0], Path(file).name: [1]}
    data.unlink()
    (root / "all.json").unlink()
    row = {"label": "a", "points": [[1, 0], [10, 9]], "shape_type": "rectangle"}
    content = {"imagePath": name, "imageHeight": 20, "imageWidth": 30, "shapes": [row]}
    (root / "images" / "one.json").write_text(json.dumps(content))
    convert(root, tmp_path / "out.json")
    assert boxes_of(tmp_path / "out.yaml") == {Path(file).name: [1]}
    assert yaml.safe_load((tmp_path / "out.yaml").read_text())["names"] == ["a"]


def test_the_closest_name_wins_whatever_the_order(root):
    """Each of these fits x.png or X.png somehow, but only one as it is written."""
    for file in ("x.png", "X.png", "y z.png", "y%20z.png"):
        write_image(root / "images" / file, 20, 30)
    names = ["y%20z.png", "X.PNG", "y z.png", "X.png", "x.png"]
    found = boxes_of(write_coco(root, names), max_bad=0.5)
    assert found == {"x.png": [4], "X.png": [3], "y z.png": [2], "y%20z.png": [0]}


def test_folders_tell_images_of_one_name_apart(root):
    for file in ("a/1.png", "b/1.png", "c/2.png"):
        write_image(root / "images" / file, 20, 30)
    data = write_coco(root, ["https://host/set/B/1.png?x=1", "D:\\set\\a\\1.png", "2.png"])
    index = load_index(load_dataset_spec(data), "train", IndexSettings(progress=False, max_bad=0.0))
    assert index.boxes_xywh_px[:, 0].tolist() == [1, 0, 2]  # of a, b, c
    data = write_coco(root, ["1.png", "a/1.png", "2.png"])
    index = load_index(load_dataset_spec(data), "train", IndexSettings(progress=False, max_bad=0.5))
    assert list(index.paths) == ["images/a/1.png", "images/c/2.png"]
    line = "image 0: annotated image not in the split: 1.png matches 2 images, such as images/a/1.png and"
    assert any(line in each for each in index.report.lines)
    data = write_coco(root, ["1.png"])
    with pytest.raises(UserError, match=r"image 0: 1.png matches 2 images, .*; write file names with their"):
        load_index(load_dataset_spec(data), "train", IndexSettings(progress=False))


@pytest.mark.parametrize(
    ("file_names", "message"),
    [
        (
            ["JPEGImages/0.png"],
            "image 0: JPEGImages/0.png is not among the split's images, but val/0.png is; check 'annotations' against "
            "the split's folder, or write file names with their folders in the data set",
        ),
        (
            ["JPEGImages/0.png", "0.png"],
            "image 1: 0.png matches 2 images, such as val/0.png and train/0.png; write file names with their folders "
            "in the data set",
        ),
    ],
)
def test_a_folder_that_is_not_in_the_data_set_does_not_tell_images_apart(root, file_names, message):
    """Both splits of the set once were in one folder, or the file is of another split. An entry that matches several
    images is the clearest example."""
    for file in ("train/0.png", "val/0.png"):
        write_image(root / file, 20, 30)
    write_coco(root, file_names)
    (root / "data.yaml").write_text("train: train\nval: val\nannotations: all.json\n")
    with refused(f"all.json: {message}"):
        load_index(load_dataset_spec(root / "data.yaml"), "val", IndexSettings(progress=False))


def test_a_message_shows_a_name_of_each_side(root, tmp_path):
    for file in ("p.png", "q.png"):
        write_image(root / "images" / file, 20, 30)
    data = write_coco(root, ["https://host/p.jpg", "gone.jpg"])
    with pytest.raises(
        UserError,
        match=r"names 2 images \(first: https://host/p.jpg\), none of which is among the "
        r"split's 2 \(first: p.png\)",
    ):
        boxes_of(data)
    index = load_index(
        load_dataset_spec(write_coco(root, ["p.jpg", "q.png"])), "train", IndexSettings(progress=False, max_bad=0.9)
    )
    assert any("p.jpg is not among the split's images, but images/p.png is" in line for line in index.report.lines)
    data.unlink()
    (root / "all.json").unlink()
    content = {
        "imagePath": "gone.jpg",
        "shapes": [{"label": "a", "points": [[1, 0], [10, 9]], "shape_type": "rectangle"}],
    }
    (root / "images" / "one.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"'gone.jpg': not found below .*, where images have names such as images/p"):
        convert(root, tmp_path / "out.json")


def test_readings_begin_with_the_literal_one():
    assert readings_of("a/./b%20c.png")[0] == ("a", "b%20c.png")
    assert readings_of("?d=") == (("?d=",),)
    assert readings_of("/..") == ()
    assert loose("ÄÖ.PNG") == loose(unicodedata.normalize("NFD", "äö.png"))


def test_an_empty_name_finds_nothing():
    assert ImageNames.of_single_names(["a.png"]).find("") == ()
    assert ImageNames.of_single_names([]).find("a.png") == ()
    assert ImageNames.of_single_names(["a.png"]).same_stem("") == ""
