"""Scanning: the formats agree, every defect is reported, the data set is not changed, and caches are never stale."""

import errno
import json
import os
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.cache.named_files import CacheName
from data.image_io import file_kinds
from data.index import read_images
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.source.dataset_yaml import load_dataset_spec
from data.source.files import list_split
from engine.evaluation.metrics import score_detections
from tests.helpers.hostile_files import TAKEN, take_name
from tests.helpers.index_fingerprint import index_fingerprint
from tests.helpers.messages import refused
from tests.helpers.scoring import coco_evaluate, make_table
from tests.helpers.three_formats import voc_text, write_image, write_three_formats
from tests.helpers.tiny import write_dataset
from utils.boxes import xywh_to_xyxy
from utils.errors import UserError

NAMES = ("cat", "dog", "cow")
SIZES = {"a.jpg": (60, 80), "b.png": (50, 40), "sub/c.jpg": (64, 64), "d.png": (32, 32), "ü.jpg": (40, 60)}  # h, w
# Objects by image: class, x1, y1, x2, y2 in whole pixels. d has an empty label file, ü none at all.
OBJECTS = {
    "a.jpg": [(0, 8, 6, 40, 30), (2, 0, 0, 80, 60)],
    "b.png": [(1, 10, 10, 20, 35)],
    "sub/c.jpg": [(2, 16, 16, 32, 48)],
    "d.png": [],
}


LABELS = pytest.mark.parametrize("label", ["", "annotations: voc\n", "annotations: instances.json\n"])
JSON_NUMBERS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity", "1e999": "1e999"}


def told(lines, *, unlabeled=False):
    """The logged messages. The one about ü's missing label file, which nearly every test gets, is only included if
    ``unlabeled``."""
    messages = [m for m in lines.messages if not m.startswith("scanning ")]
    messages = [m for m in messages if unlabeled or "1 of 5 images have no label file" not in m]
    lines.clear()
    return messages


def write_yaml(root, text="", names=NAMES):
    path = root / "d.yaml"
    named = f"names: [{', '.join(names)}]\n" if names else ""
    path.write_text(f"train: images/train\nval: images/train\n{named}{text}", encoding="utf-8")
    return path


@pytest.fixture
def root(tmp_path):
    """A small data set with labels in all three formats."""
    root = tmp_path / "set"
    write_three_formats(root, NAMES, SIZES, OBJECTS)
    write_yaml(root)
    return root


def load(root, cache, split="train", change=lambda spec: spec, **options):
    spec = change(load_dataset_spec(root / "d.yaml"))
    return load_index(spec, split, IndexSettings(cache_dir=str(cache), progress=False, **options))


def assert_same(a, b, atol=0.0, but=()):
    assert list(a.paths) == list(b.paths)
    for name in ("image_hw", "offsets", "classes", "crowd"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    for name in {"boxes_xywh_px", "area_px"} - set(but):
        np.testing.assert_allclose(getattr(a, name), getattr(b, name), atol=atol, rtol=1e-9, err_msg=name)


def tree_state(root):
    """Everything about the files that a scan could change."""
    return {p: (p.stat().st_mtime_ns, p.stat().st_mode, p.is_file() and p.read_bytes()) for p in root.rglob("*")}


def test_the_index_of_a_small_data_set_has_the_expected_arrays(root, tmp_path, lines):
    before = tree_state(root)
    index = load(root, tmp_path / "cache")
    assert list(index.paths) == [f"images/train/{n}" for n in sorted(SIZES)]
    np.testing.assert_array_equal(index.image_hw, [SIZES[n] for n in sorted(SIZES)])
    np.testing.assert_array_equal(index.offsets, [0, 2, 3, 3, 4, 4])
    np.testing.assert_allclose(index.boxes_xywh_px[0], [8, 6, 32, 24])
    np.testing.assert_allclose(index.labels(0), [[0, 0.3, 0.3, 0.4, 0.4], [2, 0.5, 0.5, 1, 1]], atol=1e-7)
    assert index.labels(0).dtype == np.float32
    assert index.labels(2).shape == (0, 5)
    assert index.path(1) == str(root / "images/train/b.png")
    missing = (
        "train: 1 of 5 images have no label file and are treated as backgrounds (expected "
        f"{root}/labels/train/ü.txt); add empty label files to avoid this warning"
    )
    summary = "train: 5 images, 2 backgrounds (1 without a label file), 4 boxes, 0 problems"
    assert told(lines, unlabeled=True) == [summary, missing]
    assert list(index.report.lines) == [
        "labels/train/ü.txt: missing label file: images/train/ü.jpg is taken as background"
    ]
    again = load(root, tmp_path / "cache")
    assert told(lines, unlabeled=True) == [f"{summary} (cached)", missing]
    for other in (again, pickle.loads(pickle.dumps(again))):  # as it is sent to other processes
        assert_same(index, other)
        assert other.path(4) == index.path(4)
        assert list(other.report.lines) == list(index.report.lines)
    assert not again.boxes_xywh_px.flags.writeable
    assert tree_state(root) == before


def test_an_unreadable_image_without_a_label_file_is_no_background(root, tmp_path, lines):
    (root / "images/train/e.png").write_bytes(b"not an image")
    assert len(load(root, tmp_path / "cache", max_bad=0.5)) == 5
    (missing,) = [line for line in told(lines, unlabeled=True) if "have no label file" in line]
    expected = f"{root}/labels/train/ü.txt"
    assert "train: 1 of 5 images have no label file" in missing
    assert f"(expected {expected});" in missing


def test_three_formats_load_identically(root, tmp_path):
    cache = tmp_path / "cache"
    yolo = load(root, cache)
    write_yaml(root, "annotations: voc\n")
    voc = load(root, cache)
    write_yaml(root, "annotations: instances.json\n", names=())
    coco = load(root, cache)
    assert yolo.names == voc.names == coco.names == NAMES
    assert_same(yolo, voc, atol=1e-9)
    assert_same(yolo, coco, atol=1e-9)
    truth = coco.ground_truth()
    assert truth.image_ids == (100 - 4, 100 - 3, 100 - 2, 100 - 1, 100)
    assert truth.category_ids == (10, 20, 30)
    assert truth.classes.dtype == np.int64
    assert yolo.ground_truth().image_ids == ("a", "b", "d", "c", "ü")
    assert yolo.ground_truth().category_ids == (0, 1, 2)
    (root / "voc/b.xml").write_text(voc_text(OBJECTS["b.png"], NAMES, 500, 400))
    write_yaml(root, "annotations: voc\n")
    line = "voc/b.xml: labels for another size: labels are for 400x500, the image is 40x50 upright; "
    line += "boxes are scaled by 0.1"
    scaled = load(root, cache)
    assert line in scaled.report.lines
    np.testing.assert_allclose(scaled.boxes_xywh_px[2], [1, 1, 1, 2.5])


def test_numeric_stems_are_numbers_and_a_coco_json_keeps_its_ids(tmp_path):
    for stem in ("000000000139", "42", "7"):
        write_image(tmp_path / f"images/{stem}.jpg", 8, 8)
    entries = [{"id": f"00{stem}", "file_name": f"{stem}.jpg"} for stem in (7, 42)]
    entries.append({"id": "139", "file_name": "000000000139.jpg"})
    annotation = {"id": 1, "image_id": "139", "category_id": 1, "bbox": [0, 0, 4, 4]}
    coco = {"images": entries, "annotations": [annotation], "categories": [{"id": 1, "name": "a"}]}
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels/7.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    (tmp_path / "coco.json").write_text(json.dumps(coco))

    def ids(more):
        (tmp_path / "data.yaml").write_text(f"train: images\nnames: [a]\n{more}")
        spec = load_dataset_spec(tmp_path / "data.yaml")
        return (
            load_index(spec, "train", IndexSettings(cache_dir=str(tmp_path / "cache"), progress=False))
            .ground_truth()
            .image_ids
        )

    assert ids("") == (139, 42, 7)
    assert ids("annotations: coco.json\n") == ("139", "0042", "007")
    write_image(tmp_path / "images/007.jpg", 8, 8)  # the number of 7.jpg
    assert ids("") == ("000000000139", "007", "42", "7")


@LABELS
def test_images_that_are_held_out_are_the_validation_split(root, tmp_path, lines, label):
    (root / "images/train/x.gif").write_bytes(b"GIF89a")
    write_yaml(root, label)
    (root / "d.yaml").write_text((root / "d.yaml").read_text().replace("val: images/train\n", ""))
    whole = load(root, tmp_path / "cache")
    cache = tmp_path / "cache"
    names = ["images/train/b.png", "images/train/sub/c.jpg", "images/train/gone.jpg"]
    told(lines)
    parts = {split: load(root, cache, split, lambda spec: spec.hold_out(names)) for split in ("train", "val")}
    said = [line for line in told(lines) if not line.startswith("image without")]
    assert said[0].startswith("train: 3 images, ")
    assert said[1].startswith("train: 1 file left out, first images/train/x.gif: .gif files are not supported; ")
    assert said[2].endswith(
        "d.yaml: 1 of 3 images held out for validation when the run began are not among its usable images now, first "
        "images/train/gone.jpg; renamed images are trained on"
    )
    assert said[3] == "val: 2 images, 0 backgrounds, 2 boxes, 0 problems (cached)"
    assert list(parts["val"].paths) == names[:2]
    assert sorted([*parts["train"].paths, *parts["val"].paths]) == list(whole.paths)
    assert list(parts["train"].report.lines) == list(whole.report.lines)
    truth = whole.ground_truth()
    for part in parts.values():
        assert part.report.totals["images"] == len(part)
        assert part.report.totals["boxes"] == len(part.classes)
        for i, path in enumerate(part.paths):
            j = list(whole.paths).index(path)
            np.testing.assert_array_equal(part.labels(i), whole.labels(j))
            assert part.ground_truth().image_ids[i] == truth.image_ids[j]
            assert part.image_hw[i].tolist() == whole.image_hw[j].tolist()
    with refused(
        "set/d.yaml: 'train' has none of the 1 image held out for validation when the run began; name its "
        "data set with --data"
    ):
        load(root, cache, "val", lambda spec: spec.hold_out(names[2:]))


@LABELS
def test_single_cls_merges_all_classes(root, tmp_path, label):
    write_yaml(root, label)
    index = load(root, tmp_path / "cache", single_cls=True)
    assert index.names == ("object",)
    np.testing.assert_array_equal(index.classes, np.zeros(4))
    assert len(index.ground_truth().category_ids) == 1
    assert len(set(load(root, tmp_path / "cache").classes.tolist())) == 3  # is not that of the merged classes
    write_yaml(root, label, names=("thing",))  # for any names and numbers of the labels' classes
    assert len(load(root, tmp_path / "cache", single_cls=True).classes) == 4


@LABELS
@pytest.mark.parametrize("single_cls", [False, True])
def test_some_classes_are_those_among_all_and_share_their_cache(root, tmp_path, lines, label, single_cls):
    write_yaml(root, label)
    cache = tmp_path / "cache"
    whole = load(root, tmp_path / "cache")
    files = sorted(cache.iterdir())
    told(lines)
    some = load(root, cache, change=lambda spec: spec.use_classes(["cow", 0]), single_cls=single_cls)
    assert sorted(cache.iterdir()) == files
    unlabeled = " (1 without a label file)" if label in ("", "annotations: voc\n") else ""
    assert told(lines)[0].startswith(f"train: 5 images, 3 backgrounds{unlabeled}, 3 boxes, ")
    assert some.names == (("object",) if single_cls else ("cat", "cow"))
    ids = (10, 30) if "json" in label else (0, 2)
    assert some.ground_truth().category_ids == (ids[:1] if single_cls else ids)
    one_class = load(root, tmp_path / "other", single_cls=True)
    assert not single_cls or some.ground_truth().category_ids == one_class.ground_truth().category_ids
    new = {0: 0, 2: 0 if single_cls else 1}
    for i, path in enumerate(whole.paths):
        expected = [[new[c], *box] for c, *box in whole.labels(i).tolist() if c in new]
        assert some.paths[i] == path
        assert some.labels(i).tolist() == expected
    assert some.image_digest() == whole.image_digest()
    assert_same(load(root, cache), whole)
    write_yaml(root, label, names=(*NAMES, "fly"))
    with refused(
        "set/d.yaml: 'train' has 5 images and no object of the class fly (first label file: .../set/...); there is "
        "nothing to train on"
    ):
        load(root, cache, change=lambda spec: spec.use_classes(["fly"]))


def test_a_fraction_of_the_images_is_chosen_by_the_seed(root, tmp_path, lines):
    whole = load(root, tmp_path / "cache")
    labels = {path: whole.labels(i).tolist() for i, path in enumerate(whole.paths)}
    told(lines)
    parts = {n: load(root, tmp_path / "cache", fraction=n / 5) for n in (1, 3, 5)}
    assert "--fraction 0.6: 3 of 5 training images" in told(lines)
    assert [len(parts[n]) for n in (1, 3, 5)] == [1, 3, 5]
    assert set(parts[1].paths) < set(parts[3].paths) < set(whole.paths)
    assert list(parts[3].paths) == sorted(parts[3].paths)
    for part in parts.values():
        assert {path: part.labels(i).tolist() for i, path in enumerate(part.paths)}.items() <= labels.items()
        assert part.report.totals["boxes"] == len(part.classes)
    assert list(load(root, tmp_path / "cache", fraction=0.6).paths) == list(parts[3].paths)
    seeds = [load(root, tmp_path / "cache", fraction=0.4, seed=seed) for seed in range(8)]
    assert len({tuple(part.paths) for part in seeds}) > 3
    assert len({part.source for part in seeds}) == 8  # else each would remove the cached images of the others
    assert len({load(root, tmp_path / "cache", seed=seed).source for seed in (0, 1)}) == 1
    assert len(load(root, tmp_path / "cache", fraction=1e-6)) == 1


def test_the_number_of_threads_does_not_change_the_index(root, tmp_path, monkeypatch):
    monkeypatch.setattr(read_images, "_CHUNK", 2)
    (root / "labels/train/b.txt").write_text("9 0.5 0.5 0.1 0.1\n0 2 2 0.1 0.1\n0 0.5 0.5 0.1 0.1\n")
    indexes = [load(root, tmp_path / f"c{workers}", workers=workers, max_bad=0.5) for workers in (0, 1, 3)]
    files = {next((tmp_path / f"c{workers}").glob("*.index")).read_bytes() for workers in (0, 1, 3)}
    assert len(files) == len({tuple(index.report.lines) for index in indexes}) == 1


@pytest.mark.parametrize("image", ["x.img", "101x.bin"])
def test_of_many_files_with_an_unknown_suffix_a_few_are_opened(root, tmp_path, monkeypatch, image):
    """All, each once, if one of the few is an image, such as the largest."""
    opened = []
    open_file = file_kinds.open_regular
    monkeypatch.setattr(file_kinds, "open_regular", lambda path: opened.append(path) or open_file(path))
    for number in range(200):
        (root / f"images/train/{number}.bin").write_bytes(b"no image")
    (root / "images/train" / image).write_bytes((root / "images/train/a.jpg").read_bytes())
    index = load(root, tmp_path / "cache")
    assert index.report.lines[0].startswith(f"images/train/{image}: file of an unsupported kind: it contains a")
    opened = [path for path in opened if path.endswith(".bin")]
    assert len(opened) == len(set(opened))
    assert len(opened) <= 20 or image.endswith(".bin")


def test_images_that_are_not_read_are_named_in_one_line(root, tmp_path, lines):
    """The others are used, whatever the suffix that their format has."""
    (root / "images/train/a.jpg").rename(root / "images/train/a.JFIF")
    (root / "images/train/f.heic").write_bytes(bytes(20))
    (root / "images/train/sub/g").write_bytes((root / "images/train/sub/c.jpg").read_bytes())
    line = (
        "train: 2 files left out, first images/train/f.heic: .heic files are not supported; convert them to JPEG or PNG"
    )
    for _ in range(2):  # also from the cache
        index = load(root, tmp_path / "cache")
        assert index.paths[0] == "images/train/a.JFIF"
        assert len(index.labels(0)) == 2
        assert line in told(lines)
    assert "images/train/sub/g: file of an unsupported kind: it contains a .jpg image" in index.report.lines[1]


def test_repeated_boxes_are_scored_as_by_pycocotools_and_trained_on_once(root, tmp_path):
    path = root / "instances.json"
    content = json.loads(path.read_text())
    count = len(content["annotations"])
    content["annotations"] += [content["annotations"][i] | {"id": 50 + i} for i in (0, 2)]
    path.write_text(json.dumps(content))
    write_yaml(root, "annotations: instances.json\n", names=None)
    index = load(root, tmp_path / "cache")
    gt = index.ground_truth()
    assert len(gt.classes) == count + 2
    image = index.image_of_box[:-1]  # the last object is missed
    scores = np.linspace(0.9, 0.5, len(image))
    table = make_table(image, xywh_to_xyxy(gt.boxes_xywh_px[:-1]), scores, gt.classes[:-1])
    stats, _ = coco_evaluate(gt, table)
    assert 0 < stats[0] < 1
    assert score_detections(gt, table, len(NAMES)).ap == pytest.approx(stats[0], abs=1e-12)
    once = load(root, tmp_path / "cache", repeats=False)
    assert once.report.totals["boxes"] == len(once.classes) == count
    np.testing.assert_array_equal(once.boxes_xywh_px, index.boxes_xywh_px[~index.repeated])


def test_boxes_without_area_or_outside_are_not_scored_but_reported(root, tmp_path):
    """docs/evaluation.md: pycocotools would count them as objects that are never found."""
    path = root / "instances.json"
    content = json.loads(path.read_text())
    write_yaml(root, "annotations: instances.json\n", names=None)
    before = load(root, tmp_path / "cache").ground_truth()
    first = content["annotations"][0]
    for number, box in enumerate([[10, 10, 0, 10], [10, 10, 10, 0], [10, 10, 0, 0], [9000, 9000, 10, 10]]):
        content["annotations"].append(first | {"id": 90 + number, "bbox": box})
    path.write_text(json.dumps(content))
    index = load(root, tmp_path / "cache", max_bad=0.5)
    after = index.ground_truth()
    for name in ("boxes_xywh_px", "classes", "offsets"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
    reported = [line for line in index.report.lines if "annotation 9" in line]
    assert [("no area" in line or "without area" in line, "outside" in line) for line in reported] == [
        (True, False), (True, False), (True, False), (False, True)
    ]  # fmt: skip


@pytest.fixture
def damaged(root):
    """The small data set with defects of most kinds, in images and in YOLO labels."""
    images = root / "images/train"
    labels = root / "labels/train"
    rows = [
        "0 0.5 0.5 0.2 0.2",
        "0 0.5 0.5",
        "7 0.5 0.5 0.2 0.2",
        "0 0.5 0.5 0.2 0.2",
        "1 0.9 0.5 0.4 0.2",
        "1 0.5 0.5 0 0.2",
        "1 0.5 0.5 -0.1 0.2",
        "1 0.5 0.5 0.2 0",
        "a b c d e",
        "1 3 3 0.1 0.1",
    ]
    (labels / "a.txt").write_text("\n".join(rows))
    (labels / "b.txt").write_bytes(b"\xff\xfe\x30")
    (images / "d.png").write_bytes((images / "d.png").read_bytes()[:-30])
    (labels / "sub/c.txt").write_text("5 0.5 0.5 0.1 0.1\n0 320 240 20 20\n")
    write_image(images / "e.jpg", 20, 20)
    (labels / "e.txt").write_text("0 0.5 0.5 0 0.1\n")
    (images / "f.gif").write_bytes(b"GIF89a")
    (images / "._a.jpg").write_bytes(b"left by macOS")
    return root


def load_damaged(root, tmp_path):
    return load(root, tmp_path / "cache", max_bad=0.9, repeats=False)


def test_each_defect_is_reported_on_a_line_of_its_own(damaged, tmp_path):
    starts = (
        "images/train/f.gif: file of an unsupported kind: .gif",
        "labels/train/a.txt:2: bad row: 3 fields",
        "labels/train/a.txt:3: unknown class: class 7 is not among the classes (0 to 2)",
        "labels/train/a.txt:4: duplicate box",
        "labels/train/a.txt:5: box clipped",
        "labels/train/a.txt:6: box without area",
        "labels/train/a.txt:7: corners in the wrong order: corners 44, 24, 36, 36 px",
        "labels/train/a.txt:8: box without area: corners",
        "labels/train/a.txt:9: bad row: not numbers",
        "labels/train/a.txt:10: box outside the image",
        "labels/train/b.txt: unusable label file: not UTF-8 but apparently UTF-16; save it as UTF-8",
        "images/train/d.png: unreadable image: damaged image",
        "labels/train/sub/c.txt:1: unknown class: class 5",
        "labels/train/sub/c.txt:2: box outside the image",
        "labels/train/sub/c.txt:1: unusable label file: no row can be used: class 5 is not among the classes (0 to 2)",
        "labels/train/e.txt:1: box without area",
        "labels/train/e.txt:1: unusable label file: no row can be used: the boxes have no area",
        "labels/train/ü.txt: missing label file",
    )
    report = list(load_damaged(damaged, tmp_path).report.lines)
    for start in starts:
        assert sum(line.startswith(start) for line in report) == 1, start
    assert len(report) == len(starts)


def test_a_scan_does_not_change_a_damaged_data_set(damaged, tmp_path):
    before = tree_state(damaged)
    load_damaged(damaged, tmp_path)
    assert tree_state(damaged) == before


def test_what_can_be_used_of_a_damaged_data_set_is_in_the_index(damaged, tmp_path):
    index = load_damaged(damaged, tmp_path)
    assert list(index.paths) == ["images/train/a.jpg", "images/train/ü.jpg"]
    assert index.incomplete.tolist() == [True, False]
    usable_rows = [[0, 0.5, 0.5, 0.2, 0.2], [1, 0.85, 0.5, 0.3, 0.2], [1, 0.5, 0.5, 0.1, 0.2]]
    np.testing.assert_allclose(index.labels(0), usable_rows, atol=1e-7)


def test_the_report_counts_defects_and_what_they_cost(damaged, tmp_path):
    report = load_damaged(damaged, tmp_path).report
    totals = report.totals
    assert (totals["images"], totals["backgrounds"], totals["boxes"]) == (2, 1, 3)
    assert (totals["bad row"], totals["unknown class"], totals["box without area"]) == (2, 2, 3)
    assert report.problems == 17
    ledger = report.ledger
    assert (ledger.used_images, ledger.lost_images) == (2, 4)  # b, d, c, e
    assert (ledger.used_objects, ledger.lost_objects) == (4, 9)  # six of a, two of c, one of e; those of b are unknown


def test_the_log_sums_up_the_defects_and_names_the_report(damaged, tmp_path, lines):
    index = load_damaged(damaged, tmp_path)
    message, *_ = told(lines)
    start = "train: 2 images, 1 background (1 without a label file), 3 boxes, 17 problems (3 box without area, "
    assert message.startswith(start)
    written = Path(message.split("report: ")[1])
    assert written.read_text(encoding="utf-8").splitlines()[1:] == list(index.report.lines)


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_data_set_with_too_many_defects_is_refused_with_their_reasons(damaged, tmp_path, is_cached):
    if is_cached:
        load_damaged(damaged, tmp_path)
    with refused(
        "set/d.yaml: 'train': 4 of 6 images and 9 of 13 labeled objects can't be used (--max-bad is 0.4): "
        "unusable label file: labels/train/b.txt: not UTF-8 but apparently UTF-16; save it as UTF-8, "
        "such as with iconv -f UTF-16 -t UTF-8; unreadable image: images/train/d.png: damaged image "
        "(truncated in chunk 'IDAT'); unusable label file: labels/train/e.txt:1: no row can be used: the "
        "boxes have no area; and 5 other reasons; report: ..."
    ):
        load(damaged, tmp_path / "cache", max_bad=0.4)


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e999"])
@LABELS
def test_files_with_non_finite_labels_are_bad(root, tmp_path, label, number):
    """Other rows of the file may be valid: without the object, its pixels would be trained as background."""
    text = (root / "instances.json").read_text().replace('"bbox": [8, ', f'"bbox": [{JSON_NUMBERS[number]}, ')
    (root / "instances.json").write_text(text)
    (root / "voc/a.xml").write_text((root / "voc/a.xml").read_text().replace("<xmin>8<", f"<xmin>{number}<"))
    (root / "labels/train/a.txt").write_text(f"1 0.5 0.5 0.1 0.1\n0 0.5 {number} 0.5 0.5\n")
    write_yaml(root, label)
    with refused(
        "set/d.yaml: 'train': 1 of 5 images and 2 of 4 labeled objects can't be used (--max-bad is 0.1): unusable "
        "label file: ...2: a number is not finite; report: ..."
    ):
        load(root, tmp_path / "cache")
    index = load(root, tmp_path / "cache", max_bad=0.5)
    assert "images/train/a.jpg" not in list(index.paths)
    assert index.report.totals["number not finite"] == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0 0.5 0.5 0.1 0.1 0.9", "6 fields, expected 5 (class cx cy w h); a confidence column?;"),
        ("0,0.5,0.5,0.1,0.1", "fields are separated by commas, expected spaces;"),
        ("cat 0.5 0.5 0.1 0.1", "the class is not a number; expected its position in the names, from 0;"),
        ("0 320 240 20 20", "the boxes are outside the image; coordinates in pixels?;"),
    ],
)
def test_the_commonest_cause_of_unusable_labels_is_said_once(root, tmp_path, row, message):
    for number, name in enumerate(("a", "b", "sub/c")):
        (root / f"labels/train/{name}.txt").write_text(f"\n{row}{number}\n{row}\n")
    (root / "labels/train/d.txt").write_text("7 0.5 0.5 0.1 0.1\n")
    with refused(
        "set/d.yaml: 'train': 4 of 5 images and 7 of 7 labeled objects can't be used (--max-bad is 0.1): unusable "
        f"label file: 3 images with 6 objects, first labels/train/a.txt:2: no row can be used: {message} unusable "
        "label file: labels/train/d.txt:1: no row can be used: class 7 is not among the classes (0 to 2); report: ..."
    ):
        load(root, tmp_path / "cache")


def test_missing_label_files_are_distinguished_from_empty_ones(root, tmp_path, lines):
    (root / "labels/train/ü.txt").write_text("")
    load(root, tmp_path / "cache")
    assert told(lines) == ["train: 5 images, 2 backgrounds, 4 boxes, 0 problems"]
    for name in ("a", "b", "sub/c"):
        (root / f"labels/train/{name}.txt").unlink()
    with refused(
        "set/d.yaml: 'train' has 5 images and no object (first label file: .../set/labels/train/d.txt); "
        "there is nothing to train on"
    ):
        load(root, tmp_path / "cache")
    said = told(lines)
    assert "5 backgrounds (3 without a label file)" in said[0]
    assert "3 of 5 images have no label file" in said[1]
    assert f"(expected {root}/labels/train/a.txt, {root}/labels/train/b.txt, " in said[1]
    load(root, tmp_path / "cache", split="val")
    assert told(lines)[-1].endswith("; nothing can be scored, and training writes no best.pt")


def test_differences_between_coco_json_and_folder_are_reported(root, tmp_path):
    data = json.loads((root / "instances.json").read_text())
    data["images"] = [i | {"file_name": f"train/{i['file_name']}"} for i in data["images"] if i["file_name"] != "d.png"]
    data["images"] += [{"id": 7, "file_name": "gone.jpg"}, {"id": 8, "file_name": "lost.jpg"}]
    data["annotations"].append(data["annotations"][0] | {"id": 57, "image_id": 8})
    data["annotations"][0]["category_id"] = 99
    data["annotations"].append({"id": 55, "image_id": 1000, "category_id": 10, "bbox": [0, 0, 1, 1]})
    data["annotations"].append(data["annotations"][1] | {"id": 56, "iscrowd": 1})
    (root / "instances.json").write_text(json.dumps(data))
    write_yaml(root, "annotations: instances.json\n")
    index = load(root, tmp_path / "cache", max_bad=0.5)
    assert len(index) == 3  # file names without the split's folder match by bare name; one class is unknown
    assert index.crowd.sum() == 1
    assert sum((index.labels(i)[:, 0] < 0).sum() for i in range(3)) == 1
    assert sum(len(index.labels(i)) for i in range(3)) == len(index.classes)
    report = "\n".join(index.report.lines)
    for part in (
        "instances.json: image 8: annotated image not in the split: lost.jpg",
        "images/train/d.png: image without annotations entry",
        "instances.json: annotation 55: annotation without an image: image_id 1000 is not among the images' ids",
        "unknown class: category_id 99 is not among the categories' ids",
    ):
        assert part in report
    data["images"] = [{"id": 7, "file_name": "gone.jpg"}]
    (root / "instances.json").write_text(json.dumps(data))
    with refused(
        "instances.json: names 1 image (first: gone.jpg), none of which is among the split's 5 (first: "
        "a.jpg); check 'annotations' against the split's folder"
    ):
        load(root, tmp_path / "cache")


@LABELS
def test_names_that_do_not_match_the_labels_are_reported(root, tmp_path, label):
    write_yaml(root, label, names=("cat",))
    with refused(
        "set/d.yaml: the names don't match the labels: 3 of 4 objects in 'train' have a class that is not in 'names' "
        "(first: ...)"
    ):
        load(root, tmp_path / "cache")


def test_txt_lists_of_images_are_read(root, tmp_path, lines):
    expected = load(root, tmp_path / "cache")
    absolute = root / "images/train/a.jpg"
    rows = [str(absolute), "./images/train/b.png", "images/train/sub/c.jpg", "", "./images/train/d.png"]
    rows.append("images/train/ü.jpg")
    (root / "list.txt").write_text("\n".join(rows), encoding="utf-8")
    (root / "d.yaml").write_text("train: list.txt\nval: [images/train/sub, list.txt]\nnames: [cat, dog, cow]\n")
    assert_same(expected, load(root, tmp_path / "cache"))
    both = load(root, tmp_path / "cache", "val")
    assert_same(expected, both)
    assert both.report.lines[0] == "list.txt:3: image listed twice: images/train/sub/c.jpg is listed twice; used once"
    (root / "list.txt").write_text("images/train/a.jpg\nimages/train/no\0where.jpg\nnotes.md\n")
    (root / "lists").mkdir()
    index = load(root, tmp_path / "cache", max_bad=0.7)
    first, second = index.report.lines
    assert first.startswith("list.txt:2: missing image: ")
    assert second.startswith("list.txt:3: bad row of a list: 'notes.md' is not the path of an image")
    with refused(
        "set/d.yaml: 'train': 2 of 3 images can't be used (--max-bad is 0.1): missing image: list.txt:2: "
        "images/train/no...where.jpg not found; bad row of a list: list.txt:3: 'notes.md' is not the path "
        "of an image; report: ..."
    ):
        load(root, tmp_path / "cache", max_bad=0.1)


@pytest.mark.parametrize(
    "folder", ["images/train", "data/images/train", "/home/me/set/images/train", "C:/set/images/train"]
)
@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("suffixes", [False, True])
def test_lists_that_were_written_for_another_folder(root, tmp_path, lines, folder, windows, suffixes):
    """If no row names an image as it is written, the first that fits one image decides how all are read."""
    expected = load(root, tmp_path / "cache")
    names = ["gone.jpg", *SIZES] if suffixes else ["gone", *(os.path.splitext(name)[0] for name in SIZES)]
    text = "".join(f"{folder}/{name}\n" for name in names)
    (root / "list.txt").write_text(text.replace("/", "\\") if windows else text, encoding="utf-8")
    (root / "d.yaml").write_text("train: list.txt\nnames: [cat, dog, cow]\n")
    told(lines)
    index = load(root, tmp_path / "cache", max_bad=0.2)
    if (folder, windows, suffixes) == ("images/train", False, True):
        assert told(lines)[0].startswith("train: 5 images")
    else:
        assert "rows are read like line 2: " in (line := told(lines)[0])
        assert line.endswith(" is images/train/a.jpg")
    assert_same(expected, index)
    assert index.report.lines[0].startswith("list.txt:1: missing image: ")


def test_a_row_with_fewer_folders_than_the_others_is_a_missing_image(root, tmp_path):
    """The rows are for another folder, whose parts are left out: nothing would be left of this one but the folder."""
    (root / "list.txt").write_text("far/away/images/train/a.jpg\nfar/away/images/train/b.png\nd.png\n")
    (root / "d.yaml").write_text("train: list.txt\nnames: [cat, dog, cow]\n")
    index = load(root, tmp_path, max_bad=0.5)
    assert list(index.paths) == ["images/train/a.jpg", "images/train/b.png"]
    assert "list.txt:3: missing image: d.png not found" in list(index.report.lines)


def listed_row(root: Path, row: str) -> None:
    """Makes a data set of the images in ``row``, the second one of a list."""
    write_image(root / "images/val/b.jpg", 9, 9)
    (root / "list.txt").write_text(f"\n{row}\n{row}x\n", encoding="utf-8")
    (root / "d.yaml").write_text("train: list.txt\nnames: [cat, dog, cow]\n")


@pytest.mark.parametrize("row", ["train/a.jpg", "a", "c:\\images\\train\\a.jpg"])
def test_a_row_of_a_list_that_is_the_end_of_the_path_of_one_image(root, row):
    listed_row(root, row)
    (image,) = list_split(load_dataset_spec(root / "d.yaml"), "train").images
    assert image.name == "images/train/a.jpg"


RELATIVE = "give paths of images relative to .../set"


@pytest.mark.parametrize(
    ("train", "val", "row"),
    [
        ("lists/train.txt", "images/val", "images/train/0.png"),
        ("lists/train.txt", "val/images", "train/images/0.png"),
        ("lists/train.txt", "val/images", "/home/me/train/images/0.png"),
        ("lists/train.txt", "images/val", "0.png"),
        ("train/train.txt", "val/val.txt", "images/0.png"),
    ],
)
def test_a_list_without_images_does_not_take_those_of_another_split(tmp_path, train, val, row):
    """They would get the labels of the split's own annotations."""
    root = tmp_path / "set"
    folder = "val/images" if val == "val/val.txt" else val
    write_image(root / folder / "0.png", 9, 9)
    for name, text in ((train, row), (val, "images/0.png")):
        if name.endswith(".txt"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    (root / "d.yaml").write_text(f"train: {train}\nval: {val}\nnames: [cat]\n")
    with refused(
        f"set/{train}:1: '{row}' is not an image, and neither is any other row; {folder}/0.png has the "
        f"same name, but is an image of 'val'; {RELATIVE}"
    ):
        list_split(load_dataset_spec(root / "d.yaml"), "train")


def split_names(root: Path, split: str) -> list[str]:
    return sorted(image.name for image in list_split(load_dataset_spec(root / "d.yaml"), split).images)


def write_lists(root: Path, images: list[str], splits: dict[str, str], lists: dict[str, list[str]]) -> None:
    for name in images:
        write_image(root / name, 9, 9)
    for name, rows in lists.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("\n".join(rows))
    (root / "d.yaml").write_text("".join(f"{key}: {name}\n" for key, name in splits.items()) + "names: [cat]\n")


@pytest.mark.parametrize(
    ("folder", "train", "train_rows", "val", "val_row"),
    [
        ("images", "images", [], "val.txt", "val/images/0.png"),
        ("images", "train.txt", ["images/0.png"], "val.txt", "val/images/0.png"),
        (".", "train.txt", ["0.png"], "val.txt", "val/0.png"),
        ("images/train", "lists/train.txt", ["images/train/0.png"], "lists/val.txt", "0.png"),
        ("images/train", "lists/train.txt", ["images\\train\\0.png"], "lists/val.txt", "0.png"),
    ],
)
def test_a_relocated_list_is_refused_if_another_split_has_its_images(tmp_path, folder, train, train_rows, val, val_row):
    root = tmp_path / "set"
    image = "0.png" if folder == "." else f"{folder}/0.png"
    lists = {val: [val_row]} | ({train: train_rows} if train_rows else {})
    write_lists(root, [image], {"train": train, "val": val}, lists)
    message = f"; {image} has the same name, but is an image of 'train'; give paths of images relative to "
    with pytest.raises(UserError, match=re.escape(message)):
        split_names(root, "val")


@pytest.mark.parametrize("row", ["old/images/{}.png", "/home/me/set/images/{}.png", "{}"])
def test_relocated_lists_that_are_read_alike_may_share_images(tmp_path, row):
    images = [f"images/{number}.png" for number in range(3)]
    rows = [row.format(number) for number in range(3)]
    write_lists(
        tmp_path / "set", images, {"train": "all.txt", "val": "part.txt"}, {"all.txt": rows, "part.txt": rows[1:]}
    )
    assert split_names(tmp_path / "set", "train") == images
    assert split_names(tmp_path / "set", "val") == images[1:]


@pytest.mark.parametrize("train", ["JPEGImages", "ImageSets/Main/trainval.txt"])
def test_lists_of_voc_may_share_images_with_other_splits(tmp_path, train):
    images = [f"JPEGImages/{number}.png" for number in range(3)]
    lists = {"ImageSets/Main/val.txt": ["2"]}
    if train.endswith(".txt"):
        lists[train] = ["0", "1", "2"]
    write_lists(tmp_path / "set", images, {"train": train, "val": "ImageSets/Main/val.txt"}, lists)
    assert split_names(tmp_path / "set", "train") == images
    assert split_names(tmp_path / "set", "val") == images[2:]


def test_a_relocated_list_is_refused_if_only_a_later_row_names_an_image_of_another_split(tmp_path):
    root = tmp_path / "set"
    rows = [f"/home/me/{number}.png" for number in range(12)]
    images = [f"{number}.png" for number in range(12)]
    write_lists(root, images, {"train": "train.txt", "val": "val.txt"}, {"train.txt": ["11.png"], "val.txt": rows})
    assert split_names(root, "train") == ["11.png"]
    reason = "11.png has the same name, but is an image of 'train'"
    with refused(f"set/val.txt:12: '/home/me/11.png' is not an image; {reason}; {RELATIVE}"):
        split_names(root, "val")


@pytest.mark.parametrize(
    ("image", "file", "row"),
    [
        ("data/0.png", "val.txt", "0"),  # the list of another split is beside the image
        ("foo/images/0.png", "foo/lists/val.txt", "/old/bar/images/0.png"),
        ("darknet/data/obj/0.png", "darknet/cfg/val.txt", "C:\\me\\data\\obj\\0.png"),
        ("images/val/2.png", "val.txt", "/home/me/set/images/val/2.png"),  # a copy ends in more of the row
        ("data/0.png", "val.txt", "data\\0.png"),
        ("data/1.png", "val.txt", "data\\1.png"),  # complete, and an image of both splits
    ],
)
def test_a_relocated_list_takes_the_image_that_no_other_split_names(tmp_path, image, file, row):
    root = tmp_path / "set"
    images = [image, "data/1.png", "backup/set/images/val/2.png"]
    write_lists(root, images, {"train": "data/train.txt", "val": file}, {"data/train.txt": ["1.png"], file: [row]})
    assert split_names(root, "val") == [image]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("x.jpg", "'x.jpg' is not an image, and neither is any other row; give paths of images relative to .../set"),
        (
            "train/sub",
            "'train/sub' is not an image, and neither is any other row; give paths of images relative to .../set",
        ),
        (
            "data/other/a.jpg",
            f"'data/other/a.jpg' is not an image, and neither is any other row; images/train/a.jpg has "
            f"the same name, but is in another folder; {RELATIVE}",
        ),
        (
            "b",
            "2 images fit 'b': .../images/train/b.png, .../images/val/b.jpg; name images by their paths relative to "
            ".../set",
        ),
    ],
)
def test_rows_of_a_list_that_match_no_image_or_several(root, tmp_path, row, message):
    listed_row(root, row)
    with refused(f"set/list.txt:2: {message}"):
        load(root, tmp_path / "cache")


def test_labels_are_found_beside_images_without_an_images_folder(tmp_path):
    if "images" in tmp_path.parts:
        pytest.skip("the temporary folder has an 'images' in its path")
    write_image(tmp_path / "set/t/x.jpg", 10, 10)
    (tmp_path / "set/t/x.txt").write_text("0 0.5 0.5 1 1\n")
    (tmp_path / "set/d.yaml").write_text("train: t\nnames: [a]\n")
    assert len(load(tmp_path / "set", tmp_path / "cache").classes) == 1


def keep(root: Path) -> None:
    """Leaves the data set as it is."""


def remove_labels(root: Path) -> None:
    shutil.rmtree(root / "labels")


def remove_images(root: Path) -> None:
    remove_labels(root)
    shutil.rmtree(root / "images/train")


def misname_the_only_image(root: Path) -> None:
    remove_images(root)
    (root / "images/train").mkdir()
    (root / "images/train/a").write_bytes(b"\xff\xd8\xff")


def name_absent_annotations(root: Path) -> None:
    remove_labels(root)
    write_yaml(root, "download: https://example.org/set.zip\nannotations: nowhere\n")


def name_the_whole_disk(root: Path) -> None:
    (root / "d.yaml").write_text("train: /\nnames: [cat, dog, cow]\n")


def name_a_yaml_as_annotations(root: Path) -> None:
    write_yaml(root, "annotations: d.yaml\n")


@pytest.mark.parametrize(
    ("change", "split", "message"),
    [
        (keep, "test", "set/d.yaml: has no 'test' split, only train, val; add 'test: <folder>'"),
        (
            remove_labels,
            "train",
            "set/d.yaml: 'train' has 5 images and no label file; the first was expected at .../set/labels/train/a.txt; "
            ".../set/instances.json: if it is COCO's, add 'annotations: {train: instances.json}' to the YAML",
        ),
        (
            remove_images,
            "train",
            "set/images/train: not found (named by .../set/d.yaml); .../set has 5 label files (first: instances.json) "
            "but no images; export the images as well, or copy them there",
        ),
        (
            misname_the_only_image,
            "train",
            "set/images/train: no images found for 'train' (looked for .apng .bmp .dib .j2k .jfif .jif .jp2 .jpe .jpeg "
            ".jpg .mpo .pbm .pgm .pjp .pjpeg .png .pnm .ppm .tif .tiff .webp); 1 file left out, first images/train/a: "
            "it contains a .jpg image, but has another suffix; rename it to end in .jpg",
        ),
        (
            name_absent_annotations,
            "train",
            "set/nowhere: not found (named by .../set/d.yaml); .../set has images, voc; its 'download' is never run: "
            "download and unpack the data yourself",
        ),
        (name_the_whole_disk, "train", "set/d.yaml: 'train' is /, the whole disk; name the folder of its images"),
        (
            name_a_yaml_as_annotations,
            "train",
            "set/d.yaml: neither a COCO .json nor a folder of VOC .xml (named by .../set/d.yaml)",
        ),
    ],
)
def test_missing_and_empty_data_is_one_line(root, tmp_path, change, split, message):
    change(root)
    with refused(message):
        load(root, tmp_path / "cache", split)


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (
            "images/train/_annotations.csv",
            ".../set/labels/train/a.txt; .../set/images/train/_annotations.csv: CSV is not supported; export "
            "the data set as YOLO txt, COCO JSON or Pascal VOC",
        ),
        (
            "images/train/_annotations.coco.json",
            ".../set/labels/train/a.txt; .../set/images/train/_annotations.coco.json: if it is COCO's, add "
            "'annotations: {train: images/train/_annotations.coco.json}' to the YAML",
        ),
        (
            "annotations/instances_train.json",
            ".../set/labels/train/a.txt; .../set/annotations/instances_train.json: if it is COCO's, add "
            "'annotations: {train: annotations/instances_train.json}' to the YAML",
        ),
        (
            "images/train/a.json images/train/b.json",
            ".../set/labels/train/a.txt; .../set/images/train has 2 .json files: one JSON per image is not "
            "supported; convert them to YOLO txt or to one COCO JSON",
        ),
        (
            "Annotations/a.xml Annotations/c.xml",
            ".../set/labels/train/a.txt; .../set/Annotations has 2 .xml files: if they are Pascal VOC's, add "
            "'annotations: {train: Annotations}' to the YAML",
        ),
        (
            "labels/train/a.xml labels/train/z.txt",
            ".../set/labels/train/a.txt; .../set/labels/train has 1 .xml file: if they are Pascal VOC's, add "
            "'annotations: {train: labels/train}' to the YAML",
        ),
        (
            "images/train/a.txt images/train/notes.txt",
            ".../set/labels/train/a.txt; .../set/images/train has 1 .txt file: they have no row of YOLO txt "
            "(first: a.txt)",
        ),
        (
            "labels/a.txt",
            ".../set/labels/train/a.txt; .../set/labels has 1 .txt file: move them to .../set/labels/train",
        ),
        (
            "Labels/train/a.txt",
            ".../set/labels/train/a.txt; .../set/Labels/train has 1 .txt file: they have no row of YOLO txt "
            "(first: a.txt)",
        ),
        (
            "labels /train/a.txt",
            ".../set/labels/train/a.txt; .../set/labels /train has 1 .txt file: move them to .../set/labels/train",
        ),
        ("labels/train/1.txt", ".../set/labels/train/a.txt; .../set/labels/train has 1.txt"),
        ("README.txt classes.txt", ".../set/labels/train/a.txt"),
    ],
)
def test_a_split_without_labels_says_what_is_there(root, tmp_path, there, message):
    for name in ("labels", "voc"):
        shutil.rmtree(root / name)
    (root / "instances.json").unlink()
    for name in re.split(r" (?!/)", there):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    with refused(f"set/d.yaml: 'train' has 5 images and no label file; the first was expected at {message}") as caught:
        load(root, tmp_path / "cache")
    assert there.startswith("README") == str(caught.value).endswith("a.txt")


def test_a_split_whose_only_label_files_are_doubtful_names_these(root, tmp_path):
    for name in ("a", "b", "sub/c", "d"):
        (root / f"labels/train/{name}.txt").unlink()
    (root / "labels/train/a.TXT").write_text("0 0.5 0.5 0.2 0.2\n")
    (root / "labels/train/a.Txt").write_text("1 0.5 0.5 0.2 0.2\n")
    with refused(
        "set/d.yaml: 'train' has 4 images without a label file, and 1 image whose labels can't be used, first "
        "images/train/a.jpg: its labels may be in labels/train/a.TXT or labels/train/a.Txt; keep one of them"
    ):
        load(root, tmp_path / "cache")


def edit(path, start=b""):
    """Writes a file and moves its modification time, which a coarse clock could leave unchanged."""
    data = path.read_bytes()
    after = path.stat().st_mtime_ns + 1
    path.write_bytes(start + data[len(start) :])
    os.utime(path, ns=(after, after))


def give_one_time(folder):
    """Sets the time of all files to that of the files of some archives."""
    for path in folder.rglob("*.txt"):
        os.utime(path, (315_532_800, 315_532_800))


def test_labels_of_an_archive_with_constant_times_are_told_apart_by_their_contents(root, tmp_path, lines):
    give_one_time(root / "labels")
    before = load(root, tmp_path / "cache")
    told(lines)
    assert_same(load(root, tmp_path / "cache"), before)
    assert "(cached)" in told(lines)[0]

    label = root / "labels/train/a.txt"
    content = label.read_bytes()
    label.write_bytes(b"1" + content[1:])  # of the same size
    give_one_time(root / "labels")
    after = load(root, tmp_path / "cache")
    assert "(cached)" not in told(lines)[0]
    assert content[:1] != b"1"
    assert before.classes.tolist() != after.classes.tolist()


CHANGES = {
    "label edited, same size": lambda root: edit(root / "labels/train/a.txt", b"1"),
    "image touched": lambda root: edit(root / "images/train/a.jpg"),
    "label added": lambda root: (root / "labels/train/ü.txt").touch(),
    "label removed": lambda root: (root / "labels/train/a.txt").unlink(),
    "image removed": lambda root: (root / "images/train/a.jpg").unlink(),
    "image added": lambda root: write_image(root / "images/train/z.jpg", 8, 8),
    "image renamed": lambda root: (root / "images/train/b.png").rename(root / "images/train/b2.png"),
    "class renamed": lambda root: write_yaml(root, names=("cat", "dog", "ox")),
    "class added": lambda root: write_yaml(root, names=(*NAMES, "ox")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_the_files_causes_a_new_scan(root, tmp_path, lines, change):
    load(root, tmp_path / "cache")
    told(lines)
    CHANGES[change](root)
    after = load(root, tmp_path / "cache", max_bad=0.5)  # a label file may be left without its image
    assert "(cached)" not in told(lines)[0]
    assert len(list((tmp_path / "cache").glob("*.index"))) == 1
    if change.startswith("label edited"):
        np.testing.assert_array_equal(after.classes[:2], [1, 2])


def test_a_data_set_that_has_been_moved_is_not_scanned_again(root, tmp_path, lines):
    before = load(root, tmp_path / "cache")
    told(lines)
    moved = root.rename(tmp_path / "moved")
    after = load(moved, tmp_path / "cache")
    assert "(cached)" in told(lines)[0]
    assert_same(before, after)
    assert after.path(0) == str(moved / before.paths[0])


def test_version_split_and_annotation_file_are_part_of_the_fingerprint(root, monkeypatch):
    def fingerprint(split="train"):
        return index_fingerprint(load_dataset_spec(root / "d.yaml"), split)

    prints = {fingerprint(), fingerprint("val")}
    monkeypatch.setattr("data.index.cache_file.CACHE_VERSION", 99)
    prints.add(fingerprint())
    write_yaml(root, "annotations: instances.json\n")
    prints.add(fingerprint())
    edit(root / "instances.json")
    prints.add(fingerprint())
    assert len(prints) == 5


@pytest.mark.parametrize("kind", ["index", "txt"])
@pytest.mark.parametrize("taken", TAKEN[:-1])
def test_what_is_not_our_file_but_has_its_name_is_neither_read_nor_waited_for(root, tmp_path, kind, taken):
    index = load(root, tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob("*.index")
    path.unlink()
    take_name(path.with_suffix(f".{kind}"), taken, 500)
    assert_same(index, load(root, tmp_path / "cache"))
    assert taken == "folder" or (path.is_file() and not path.is_symlink())
    assert taken != "link" or (path.parent / "target").stat().st_size == 500


def test_damaged_caches_are_rebuilt_and_reported(root, tmp_path, lines):
    expected = load(root, tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob("*.index")
    whole = path.read_bytes()
    told(lines)
    flipped = bytearray(whole)
    in_header = bytearray(whole)
    flipped[-100] ^= 1
    in_header[40] ^= 1
    for damaged in (b"", whole[:10], whole[:-64], b"x" * len(whole), flipped, in_header, whole + b"more"):
        path.write_bytes(damaged)
        path.with_name(".train.0123456789abcdef.tmp").write_bytes(whole[:10])  # as a killed process leaves it
        assert_same(expected, load(root, tmp_path / "cache"))
        warning, total = told(lines)
        assert "can't be used" in warning
        assert "scanning again" in warning
        assert "(cached)" not in total
        assert path.read_bytes() == whole
    assert [p.suffix for p in sorted((tmp_path / "cache").iterdir())] == [".index", ".txt"]  # no temporary files


def test_an_old_file_that_cannot_be_removed_does_not_keep_the_others(root, tmp_path):
    load(root, tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob("*.index")
    source = path.name.rpartition("-")[0]
    kept = path.with_name(f"{source}-folder")
    kept.mkdir()
    for number in range(9):
        path.with_name(f"{source}-{number}.index").touch()
    path.with_name(".train.0123456789abcdef.tmp").touch()  # as a killed process leaves it
    edit(root / "labels/train/a.txt")
    load(root, tmp_path / "cache")
    new, report = sorted({*(tmp_path / "cache").iterdir()} - {kept})
    assert (new.suffix, report) == (".index", new.with_suffix(".txt"))
    assert new != path


@pytest.mark.parametrize("is_full", [False, True])
def test_a_cache_that_cannot_be_written_causes_a_warning_only(root, tmp_path, lines, monkeypatch, is_full):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "file").write_text("in the way")
    if is_full:
        monkeypatch.setattr(os, "fsync", full)
    assert len(load(root, tmp_path / ("cache" if is_full else "file/cache"))) == 5
    assert ("No space left" if is_full else "can't be cached") in told(lines)[0]
    assert not list((tmp_path / "cache").glob("*"))


@pytest.mark.parametrize("failing", ["images/train/b.png", "labels/train/b.txt", "labels/train"])
def test_a_failing_disk_does_not_change_the_data_set(root, tmp_path, monkeypatch, failing):
    """An image that was left out or treated as background would stay so: names and times of its files do not change."""

    def fails_there(call):
        def called(path, *rest, **options):
            if str(path).endswith(failing):
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            return call(path, *rest, **options)

        return called

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fails_there(os.open))
        patch.setattr(os, "stat", fails_there(os.stat))
        with pytest.raises(OSError, match=f"Input/output error.*{failing}"):
            load(root, tmp_path / "cache", max_bad=1.0)
    index = load(root, tmp_path / "cache")
    assert len(index) == 5
    assert len(index.classes) == 4


def test_each_linked_folder_is_read_once(root, tmp_path):
    expected = load(root, tmp_path / "cache")
    (root / "images/train/loop").symlink_to(root / "images/train")
    (root / "images/train/self").symlink_to("self")
    (root / "images/train/dangling.jpg").symlink_to("nowhere.jpg")
    index = load(root, tmp_path / "cache", max_bad=0.5)
    assert_same(expected, index)
    assert "images/train/dangling.jpg: missing image: a broken link" in list(index.report.lines)


def test_images_that_other_classes_leave_out_have_another_cache(tmp_path):
    """Caches of decoded images number them."""
    data = write_dataset(tmp_path, train=4)
    for number, rows in enumerate(["0 .5 .5 .2 .2\nbad\n", "1 .5 .5 .2 .2\nbad\n", "0 .5 .5 .2 .2\n1 .5 .5 .2 .2\n"]):
        (tmp_path / "labels" / "train" / f"{number:03}.txt").write_text(rows)
    spec = load_dataset_spec(data)
    views = []
    for name in spec.names:
        chosen = replace(spec, classes=(spec.names.index(name),))
        views.append(load_index(chosen, "train", IndexSettings(progress=False, max_bad=1.0)))
    assert list(views[0].paths) != list(views[1].paths)
    assert CacheName.of(views[0]) != CacheName.of(views[1])
