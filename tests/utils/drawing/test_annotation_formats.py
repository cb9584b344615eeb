"""Annotation files are read back by the readers of data sets, by pycocotools, and as the tools' documentation says."""

import json
from urllib.parse import unquote
from xml.etree import ElementTree

import cv2
import numpy as np
import pytest

from data.index.load import load_index
from data.spec.dataset_yaml import load_dataset_spec
from tests.helpers.messages import refused
from utils.boxes import xywh_to_xyxy
from utils.config.settings import DetectConfig
from utils.drawing.annotation_formats import FORMATS, Annotated, AnnotatedImage, write_annotations
from utils.drawing.detection_writer import DetectionFiles
from utils.structures import DetectionTable

NAMES = ("disc", 'box & "größe" <3>', "猫")
SIZES = {"b 1.png": (480, 640), "a.jpg": (3000, 4000), "ü.bmp": (37, 90)}


def make_table(count: int, image_hw: tuple[int, int], seed: int) -> DetectionTable:
    rng = np.random.default_rng(seed)
    corners = rng.uniform(0, 1, (count, 2, 2)).astype(np.float32).astype(np.float64) * image_hw[::-1]
    boxes = np.concatenate([corners.min(1), corners.max(1) + 0.5], 1).clip(0, [*image_hw[::-1]] * 2)
    return DetectionTable(np.zeros(count, int), boxes, np.sort(rng.random(count))[::-1], rng.integers(0, 3, count))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with all formats, and the tables that were written, by image."""
    sources, folder = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("run")
    config = DetectConfig(weights="runs/my model.pt", source="", save_format=list(FORMATS))
    files = DetectionFiles(folder, NAMES, config)
    tables = {}
    for seed, (name, (height, width)) in enumerate(SIZES.items()):
        image = np.zeros((height, width, 3), np.uint8)
        (sources / name).write_bytes(cv2.imencode(name[-4:], image)[1].tobytes())
        tables[name] = make_table(0 if name == "ü.bmp" else 9, (height, width), seed)
        files.write(str(sources / name), name[:-4], None, image, tables[name])
        assert (folder / "images" / name).read_bytes() == (sources / name).read_bytes()
    write_annotations(config, files)
    return folder, tables


def read_index(folder, tmp_path, annotations):
    path = folder / f"read_{annotations or 'yolo'}.yaml".replace(".json", "")
    names = json.dumps(list(NAMES))
    path.write_text(f"val: images\nnames: {names}\n" + (f"annotations: {annotations}\n" if annotations else ""))
    return load_index(load_dataset_spec(path), "val", cache_dir=str(tmp_path), progress=False)


@pytest.mark.parametrize("annotations", ["", "annotations.json", "Annotations"])
def test_our_readers_give_the_same_boxes(written, tmp_path, annotations):
    folder, tables = written
    index = read_index(folder, tmp_path, annotations)
    assert [path.removeprefix("images/") for path in index.paths] == sorted(SIZES)
    assert not index.report.problems
    for number, name in enumerate(sorted(SIZES)):
        rows = slice(*index.offsets[number : number + 2])
        np.testing.assert_allclose(
            xywh_to_xyxy(index.boxes_xywh_px[rows]), tables[name].boxes_xyxy_px, rtol=0, atol=1e-4
        )
        np.testing.assert_array_equal(index.classes[rows], tables[name].classes)
        assert not index.crowd[rows].any()
        assert tuple(index.image_hw[number]) == SIZES[name]


def test_the_yolo_folder_is_a_data_set(written, tmp_path):
    folder, tables = written
    spec = load_dataset_spec(folder / "data.yaml")
    assert spec.names == NAMES
    assert (folder / "classes.txt").read_text(encoding="utf-8").splitlines() == list(NAMES)
    index = load_index(spec, "train", cache_dir=str(tmp_path), progress=False)
    assert len(index.classes) == sum(len(table.classes) for table in tables.values())


def test_coco_annotations_are_those_of_pycocotools(written):
    coco = pytest.importorskip("pycocotools.coco").COCO(str(written[0] / "annotations.json"))
    assert [c["name"] for c in coco.loadCats([1, 2, 3])] == list(NAMES)
    for image in coco.loadImgs(coco.getImgIds()):
        table = written[1][image["file_name"]]
        assert (image["height"], image["width"]) == SIZES[image["file_name"]]
        found = coco.loadAnns(coco.getAnnIds(image["id"]))
        np.testing.assert_allclose([a["score"] for a in found], table.scores, atol=1e-8)
        assert [a["area"] for a in found] == [a["bbox"][2] * a["bbox"][3] for a in found]
        assert {a["iscrowd"] for a in found} <= {0}


def test_coco_ids_are_the_numbers_of_numeric_stems(tmp_path):
    for stems, ids in ((("000139", "7"), [139, 7]), (("b", "7"), [1, 2])):
        images = [AnnotatedImage(f"{stem}.jpg", (10, 20), make_table(1, (10, 20), 0)) for stem in stems]
        FORMATS["coco"](Annotated(tmp_path, NAMES, "model", images))
        content = json.loads((tmp_path / "annotations.json").read_text())
        assert [image["id"] for image in content["images"]] == [a["image_id"] for a in content["annotations"]] == ids


def test_label_studio_tasks(written):
    """https://labelstud.io/guide/predictions: percentages of the image, names of the labeling interface's tags."""
    folder, tables = written
    text = (folder / "labelstudio.xml").read_text(encoding="utf-8")
    assert text.startswith("<View>")  # Label Studio parses text, in which lxml refuses a declaration of its encoding
    interface = ElementTree.fromstring(text)
    image_tag, control = interface.find("Image"), interface.find("RectangleLabels")
    assert [label.get("value") for label in control] == list(NAMES)
    tasks = json.loads((folder / "labelstudio.json").read_text(encoding="utf-8"))
    assert len(tasks) == len(SIZES)
    for task in tasks:
        key = image_tag.get("value").removeprefix("$")
        name = unquote(task["data"][key].removeprefix("/data/local-files/?d=images/"))
        table, (height, width) = tables[name], SIZES[name]
        (prediction,) = task["predictions"]
        assert prediction["model_version"] == "my model"
        regions = prediction["result"]
        assert len({region["id"] for region in regions}) == len(regions) == len(table.classes)
        for region, box, c, score in zip(regions, table.boxes_xyxy_px, table.classes, table.scores):
            assert (region["from_name"], region["to_name"]) == (control.get("name"), image_tag.get("name"))
            assert (region["type"], region["score"]) == ("rectanglelabels", pytest.approx(score, abs=1e-8))
            assert (region["original_width"], region["original_height"]) == (width, height)
            value = region["value"]
            assert value["rectanglelabels"] == [NAMES[c]]
            x, y = value["x"] * width / 100, value["y"] * height / 100
            corners = [x, y, x + value["width"] * width / 100, y + value["height"] * height / 100]
            np.testing.assert_allclose(corners, box, rtol=0, atol=1e-4)


def test_cvat_for_images(written):
    """https://docs.cvat.ai/docs/other/xml_format: labels in the task, boxes in their images."""
    folder, tables = written
    root = ElementTree.parse(folder / "annotations.xml").getroot()
    assert (root.tag, root.findtext("version"), root.findtext("meta/task/size")) == ("annotations", "1.1", "3")
    assert [label.text for label in root.findall("meta/task/labels/label/name")] == list(NAMES)
    images = root.findall("image")
    assert [image.get("id") for image in images] == ["0", "1", "2"]
    for image in images:
        table, (height, width) = tables[image.get("name")], SIZES[image.get("name")]
        assert (image.get("height"), image.get("width")) == (str(height), str(width))
        boxes = [[float(box.get(side)) for side in ("xtl", "ytl", "xbr", "ybr")] for box in image]
        np.testing.assert_allclose(np.reshape(boxes, (-1, 4)), table.boxes_xyxy_px, rtol=0, atol=1e-4)
        assert [box.get("label") for box in image] == [NAMES[c] for c in table.classes]
        assert {(box.tag, box.get("occluded"), box.get("source")) for box in image} <= {("box", "0", "auto")}


def test_odd_names_leave_files_that_can_be_read(tmp_path):
    """Control characters and bytes that are not UTF-8 have no place in XML."""
    names = ("a\x01b", "two\nlines", "c")
    image = AnnotatedImage("x\udcff.jpg", (10, 20), make_table(3, (10, 20), 0))
    for name, write in FORMATS.items():
        (tmp_path / name).mkdir()
        write(Annotated(tmp_path / name, names, "model", [image]))
    assert len((tmp_path / "yolo/classes.txt").read_text().splitlines()) == 3
    for path in [*tmp_path.rglob("*.xml")]:
        ElementTree.parse(path)
    for path in tmp_path.rglob("*.json"):
        json.loads(path.read_text())
    assert "%FF.jpg" in (tmp_path / "labelstudio/labelstudio.json").read_text()


def test_frames_of_a_video_are_images(tmp_path):
    config = DetectConfig(weights="w.pt", source="", save_format=["voc", "voc"])
    files = DetectionFiles(tmp_path, NAMES, config)
    for number in (0, 25):
        files.write("clip.mp4", "clip", number, np.full((32, 48, 3), 200, np.uint8), make_table(2, (32, 48), number))
    write_annotations(config, files)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("[!.]*.*"))
    stems = ("clip_000000", "clip_000025")
    assert found == [f"Annotations/{stem}.xml" for stem in stems] + [f"images/{stem}.jpg" for stem in stems]
    assert cv2.imread(str(tmp_path / "images/clip_000025.jpg")).shape == (32, 48, 3)


def test_a_source_in_the_folder_of_the_results_is_refused(tmp_path):
    (tmp_path / "images").mkdir()
    cv2.imwrite(str(tmp_path / "images/a.png"), np.zeros((8, 8, 3), np.uint8))
    files = DetectionFiles(tmp_path, NAMES, DetectConfig(weights="w.pt", source="", save_format=["coco"]))
    with refused():
        files.write(str(tmp_path / "images/a.png"), "a", None, np.zeros((8, 8, 3), np.uint8), make_table(1, (8, 8), 0))


def test_the_flag_offers_every_format():
    (field,) = (f for f in DetectConfig.__dataclass_fields__.values() if f.name == "save_format")
    assert field.metadata["choices"] == tuple(FORMATS)
