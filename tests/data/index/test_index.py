"""The index of a split: the label formats agree, images and classes are selected as asked, and problems are named."""

import itertools
import json
import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from data.index import read_images
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.source.dataset_yaml import load_dataset_spec
from engine.evaluation.metrics import score_detections
from tests.data.index.small_set import (
    LABELS,
    NAMES,
    OBJECTS,
    SIZES,
    assert_same,
    load,
    take_messages,
    tree_state,
    write_yaml,
)
from tests.helpers.messages import refused
from tests.helpers.scoring import coco_evaluate, make_table
from tests.helpers.synthetic_index import index_of
from tests.helpers.three_formats import voc_text, write_image
from utils.boxes import xywh_to_xyxy


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
    assert take_messages(lines, unlabeled=True) == [summary, missing]
    assert list(index.report.lines) == [
        "labels/train/ü.txt: missing label file: images/train/ü.jpg is taken as background"
    ]
    again = load(root, tmp_path / "cache")
    assert take_messages(lines, unlabeled=True) == [f"{summary} (cached)", missing]
    for other in (again, pickle.loads(pickle.dumps(again))):  # as it is sent to other processes
        assert_same(index, other)
        assert other.path(4) == index.path(4)
        assert list(other.report.lines) == list(index.report.lines)
    assert not again.boxes_xywh_px.flags.writeable
    assert tree_state(root) == before


def test_an_unreadable_image_without_a_label_file_is_no_background(root, tmp_path, lines):
    (root / "images/train/e.png").write_bytes(b"not an image")
    assert len(load(root, tmp_path / "cache", max_bad=0.5)) == 5
    (missing,) = [line for line in take_messages(lines, unlabeled=True) if "have no label file" in line]
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
    take_messages(lines)
    parts = {split: load(root, cache, split, lambda spec: spec.hold_out(names)) for split in ("train", "val")}
    messages = [line for line in take_messages(lines) if not line.startswith("image without")]
    assert messages[0].startswith("train: 3 images, ")
    assert messages[1].startswith("train: 1 file left out, first images/train/x.gif: .gif files are not supported; ")
    assert messages[2].endswith(
        "d.yaml: 1 of 3 images held out for validation when the run began are not among its usable images now, first "
        "images/train/gone.jpg; renamed images are trained on"
    )
    assert messages[3] == "val: 2 images, 0 backgrounds, 2 boxes, 0 problems (cached)"
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
    take_messages(lines)
    some = load(root, cache, change=lambda spec: spec.use_classes(["cow", 0]), single_cls=single_cls)
    assert sorted(cache.iterdir()) == files
    unlabeled = " (1 without a label file)" if label in ("", "annotations: voc\n") else ""
    assert take_messages(lines)[0].startswith(f"train: 5 images, 3 backgrounds{unlabeled}, 3 boxes, ")
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


@pytest.mark.parametrize(
    ("offsets", "classes", "ignored"), [([0, 4, 5, 6], [0, 0, 0, 1, 1, 1], []), ([0, 2, 4, 6], [0, 1] * 3, ["cat"])]
)
def test_a_class_is_ignored_everywhere_if_each_image_has_a_region_of_it(offsets, classes, ignored):
    """Three images have a dog each. All three regions of cats are in the first image, or one in each."""
    index = index_of(
        names=["cat", "dog"],
        paths=["a", "b", "c"],
        image_hw=np.full((3, 2), 100),
        offsets=np.array(offsets),
        boxes_xywh_px=np.full((6, 4), 9),
        classes=np.array(classes),
    )
    assert replace(index, crowd=index.classes == 0).names_ignored_everywhere() == ignored


def test_a_fraction_of_the_images_is_chosen_by_the_seed(root, tmp_path, lines):
    whole = load(root, tmp_path / "cache")
    labels = {path: whole.labels(i).tolist() for i, path in enumerate(whole.paths)}
    take_messages(lines)
    parts = {n: load(root, tmp_path / "cache", fraction=n / 5) for n in (1, 3, 5)}
    assert "--fraction 0.6: 3 of 5 training images" in take_messages(lines)
    assert [len(parts[n]) for n in (1, 3, 5)] == [1, 3, 5]
    assert set(parts[1].paths) < set(parts[3].paths) < set(whole.paths)
    assert list(parts[3].paths) == sorted(parts[3].paths)
    for part in parts.values():
        assert {path: part.labels(i).tolist() for i, path in enumerate(part.paths)}.items() <= labels.items()
        assert part.report.totals["boxes"] == len(part.classes)
    assert list(load(root, tmp_path / "cache", fraction=0.6).paths) == list(parts[3].paths)
    seeds = [load(root, tmp_path / "cache", fraction=0.4, seed=seed) for seed in range(8)]
    assert len({tuple(part.paths) for part in seeds}) > 3
    assert len({part.cache_key for part in seeds}) == 8  # else each would remove the cached images of the others
    assert len({load(root, tmp_path / "cache", seed=seed).cache_key for seed in (0, 1)}) == 1
    assert len(load(root, tmp_path / "cache", fraction=1e-6)) == 1


@pytest.mark.parametrize("fast_images", [0, 1, 2])
def test_the_number_of_threads_does_not_change_the_index(root, tmp_path, monkeypatch, fast_images):
    """Whether all images are read by several threads, or the first ones by one thread."""
    ticks = itertools.count()
    monkeypatch.setattr(read_images, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    monkeypatch.setattr(read_images, "_GRACE_S", fast_images + 0.5)
    monkeypatch.setattr(read_images, "_CHUNK", 2)
    (root / "labels/train/b.txt").write_text("9 0.5 0.5 0.1 0.1\n0 2 2 0.1 0.1\n0 0.5 0.5 0.1 0.1\n")
    indexes = [load(root, tmp_path / f"c{workers}", workers=workers, max_bad=0.5) for workers in (0, 1, 3)]
    files = {next((tmp_path / f"c{workers}").glob("*.index")).read_bytes() for workers in (0, 1, 3)}
    assert len(files) == len({tuple(index.report.lines) for index in indexes}) == 1
    assert next(ticks) == 3 * (fast_images + 2)  # per index: the start, each fast image, and the first that is not fast


def test_images_that_are_not_read_are_named_in_one_line(root, tmp_path, lines):
    """The others are used, whatever the suffix that their format has."""
    (root / "images/train/a.jpg").rename(root / "images/train/a.JFIF")
    (root / "images/train/f.heic").write_bytes(bytes(20))
    line = (
        "train: 1 file left out, first images/train/f.heic: .heic files are not supported; convert them to JPEG or PNG"
    )
    for _ in range(2):  # also from the cache
        index = load(root, tmp_path / "cache")
        assert index.paths[0] == "images/train/a.JFIF"
        assert len(index.labels(0)) == 2
        assert line in take_messages(lines)


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
    table = make_table(image=image, boxes=xywh_to_xyxy(gt.boxes_xywh_px[:-1]), scores=scores, classes=gt.classes[:-1])
    stats, _ = coco_evaluate(gt, table)
    assert 0 < stats[0] < 1
    assert score_detections(gt, table, len(NAMES)).ap == pytest.approx(stats[0], abs=1e-12)
    once = load(root, tmp_path / "cache", repeats=False)
    assert once.report.totals["boxes"] == len(once.classes) == count
    np.testing.assert_array_equal(once.boxes_xywh_px, index.boxes_xywh_px[~index.repeated])


def test_boxes_without_area_or_outside_are_not_scored_but_reported(root, tmp_path):
    """pycocotools would count them as objects that are never found (docs/evaluation.md)."""
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
        (True, False),
        (True, False),
        (True, False),
        (False, True),
    ]


def test_missing_label_files_are_distinguished_from_empty_ones(root, tmp_path, lines):
    (root / "labels/train/ü.txt").write_text("")
    load(root, tmp_path / "cache")
    assert take_messages(lines) == ["train: 5 images, 2 backgrounds, 4 boxes, 0 problems"]
    for name in ("a", "b", "sub/c"):
        (root / f"labels/train/{name}.txt").unlink()
    with refused(
        "set/d.yaml: 'train' has 5 images and no object (first label file: .../set/labels/train/d.txt); "
        "there is nothing to train on"
    ):
        load(root, tmp_path / "cache")
    messages = take_messages(lines)
    assert "5 backgrounds (3 without a label file)" in messages[0]
    assert "3 of 5 images have no label file" in messages[1]
    assert f"(expected {root}/labels/train/a.txt, {root}/labels/train/b.txt, " in messages[1]
    load(root, tmp_path / "cache", split="val")
    assert take_messages(lines)[-1].endswith("; nothing can be scored, and training writes no best.pt")


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


def test_labels_are_found_beside_images_without_an_images_folder(tmp_path):
    if "images" in tmp_path.parts:
        pytest.skip("the temporary folder has an 'images' in its path")
    write_image(tmp_path / "set/t/x.jpg", 10, 10)
    (tmp_path / "set/t/x.txt").write_text("0 0.5 0.5 1 1\n")
    (tmp_path / "set/d.yaml").write_text("train: t\nnames: [a]\n")
    assert len(load(tmp_path / "set", tmp_path / "cache").classes) == 1


def test_each_linked_folder_is_read_once(root, tmp_path):
    expected = load(root, tmp_path / "cache")
    (root / "images/train/loop").symlink_to(root / "images/train")
    (root / "images/train/self").symlink_to("self")
    (root / "images/train/dangling.jpg").symlink_to("nowhere.jpg")
    index = load(root, tmp_path / "cache", max_bad=0.5)
    assert_same(expected, index)
    assert "images/train/dangling.jpg: missing image: a broken link" in list(index.report.lines)
