"""``classes:`` and ``ignore:`` in a YAML: merged and renamed classes, and regions to ignore."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from data.index.index import DatasetIndex
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.loading.worker import collate, new_pixels
from data.samples.dataset import AugmentedImages
from data.samples.readers import ImageReader
from data.source.dataset_yaml import load_dataset_spec
from engine.evaluation.metrics import score_detections
from tests.helpers.messages import refused
from tests.helpers.synthetic_index import render_samples
from tests.helpers.three_formats import write_three_formats
from tests.helpers.tiny import write_dataset
from tools.shard.write_shards import write_set
from utils.batches import SampleKey
from utils.boxes import xywh_to_xyxy
from utils.config.settings import Hyperparameters
from utils.detections import DetectionTable

NAMES = ["car", "truck", "van", "person"]


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """Four images, each with a box of every class."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_dataset(tmp_path / "set", train=4, val=2)
    rows = "".join(f"{c} {0.2 + 0.2 * c} {0.3 + 0.1 * c} 0.2 {0.2 + 0.1 * c}\n" for c in range(4))
    for path in (tmp_path / "set" / "labels").rglob("*.txt"):
        path.write_text(rows)
    return tmp_path / "set"


def index_of(root: Path, split: str = "train", **options) -> DatasetIndex:
    content = {"train": "images/train", "val": "images/val", "names": NAMES, **options.pop("content", {})}
    path = root / "mapped.yaml"
    path.write_text(yaml.safe_dump(content))
    spec = load_dataset_spec(path).use_classes(options.pop("classes", ()))
    return load_index(spec, split, IndexSettings(progress=False, **options))


MAP = {"classes": {"car": "vehicle", "truck": "vehicle"}, "ignore": ["van"]}


def test_classes_are_merged_and_renamed(root):
    plain = index_of(root)
    mapped = index_of(root, content=MAP)
    assert mapped.names == ("vehicle", "person")
    np.testing.assert_array_equal(mapped.classes.reshape(4, 4), [[0, 0, -1, 1]] * 4)
    np.testing.assert_array_equal(mapped.crowd, plain.classes == 2)
    np.testing.assert_array_equal(mapped.boxes_xywh_px, plain.boxes_xywh_px)
    truth = mapped.ground_truth()
    np.testing.assert_array_equal(truth.classes.reshape(4, 5), [[0, 0, 0, 1, 1]] * 4)
    np.testing.assert_array_equal(truth.crowd.reshape(4, 5), [[False, False, True, True, False]] * 4)
    np.testing.assert_array_equal(truth.offsets, np.arange(5) * 5)
    assert mapped.report.totals["boxes"] == 12
    assert mapped.report.totals["crowd"] == 4


def test_a_map_and_chosen_classes(root):
    """Other classes may be merged into an existing one."""
    chosen = index_of(root, content=MAP, classes=["person"])
    assert (chosen.names, chosen.classes.tolist()) == (("person",), [-1, 0] * 4)
    single = index_of(root, content=MAP, single_cls=True)
    assert (single.names, single.classes.tolist()) == (("object",), [0, 0, -1, 0] * 4)
    mapped = index_of(root, content={"classes": {"truck": "car", "van": "car"}})
    assert (mapped.names, mapped.classes.tolist()) == (("car", "person"), [0, 0, 0, 1] * 4)


@pytest.mark.parametrize("in_shards", [False, True])
@pytest.mark.parametrize(
    ("categories", "used", "merged", "single"),
    [
        ({"car": 3, "truck": 8, "person": 9}, "truck", (8, 9), 8),  # nothing is labeled as a car
        ({"truck": 8, "person": 9}, "truck", (8, 9), 8),  # the file has no cars
        ({"car": -5, "truck": 8, "person": 9}, "truck", (8, 9), 8),
        ({"truck": 8, "car": 3, "person": 1}, "person", (3, 1), 1),
        ({"person": 9}, "person", (10, 9), 9),  # neither: an id that no category has
    ],
)
def test_a_merged_class_has_the_category_id_that_its_annotations_have(
    tmp_path, in_shards, categories, used, merged, single
):
    write_three_formats(tmp_path, NAMES, {"x.png": (20, 40)}, {"x.png": [(0, 2, 2, 10, 10)]})
    content = json.loads((tmp_path / "instances.json").read_text())
    content["categories"] = [{"id": number, "name": name} for name, number in categories.items()]
    content["annotations"][0]["category_id"] = categories[used]
    (tmp_path / "instances.json").write_text(json.dumps(content))
    source = {"train": "images/train", "names": ["car", "truck", "person"], "annotations": "instances.json"}
    (tmp_path / "d.yaml").write_text(yaml.safe_dump(source | {"classes": {"car": "vehicle", "truck": "vehicle"}}))
    spec = load_dataset_spec(tmp_path / "d.yaml")
    if in_shards:
        write_set(spec, tmp_path / "out", 10**9, IndexSettings(), splits=("train",))
        spec = load_dataset_spec(tmp_path / "out")
    assert load_index(spec, "train", IndexSettings(progress=False)).category_ids == merged
    assert load_index(spec, "train", IndexSettings(progress=False, single_cls=True)).category_ids == (single,)


@pytest.mark.parametrize("chosen", [MAP, {"classes": {"car": "vehicle"}}, {"ignore": ["ignore"]}, {"ignore": ["van"]}])
def test_the_content_of_a_data_set_is_read_as_the_same_classes(tmp_path, chosen):
    """Copies and folds store the content. One class has the name of the value that leaves out a class."""
    splits = {"train": "images/train", "val": "images/val"}
    path = tmp_path / "mapped.yaml"
    path.write_text(yaml.safe_dump({**splits, "names": [*NAMES, "ignore"], **chosen}))
    spec = load_dataset_spec(path)
    path.write_text(yaml.safe_dump({**splits, **spec.content()}))
    assert load_dataset_spec(path) == spec
    assert ("ignore" in spec.names) == (chosen != {"ignore": ["ignore"]})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"classes": {"vam": "car"}}, "classes: 'vam' is not one of the names (did you mean 'van'?)"),
        ({"classes": ["car"]}, "classes: must be 'key: value' lines, got ['car']"),
        ({"classes": {"car": None}}, "classes: car: expected the name of a class, got None"),
        ({"classes": {"car": "a\nb"}}, "classes: car: expected the name of a class, got 'a\\nb'"),
        ({"classes": {"car": ""}}, "classes: car: expected the name of a class, got ''"),
        ({"classes": {"car": "x"}, "ignore": ["car"]}, "'car' is in 'classes' and in 'ignore'; remove one of the two"),
        ({"ignore": "van"}, "ignore: must be a list, got 'van'"),
        ({"ignore": 0}, "ignore: must be a list, got 0"),
        ({"ignore": False}, "ignore: must be a list, got False"),
        ({"classes": 0, "ignore": ["van"]}, "classes: must be 'key: value' lines, got 0"),
        (
            {"names": [*NAMES, "bus"], "ignore": NAMES},
            "'train' has 4 images and no object of the class bus (first label file: "
            ".../set/labels/train/000.txt); there is nothing to train on",
        ),
        ({"ignore": NAMES}, "classes: all classes are ignored; there is nothing to learn"),
    ],
)
def test_mistakes_are_one_line(root, content, message):
    with refused(f"set/mapped.yaml: {message}"):
        index_of(root, content=content)


def test_regions_move_with_their_image(root):
    """They move like the boxes that they would be without the map, through mosaic, perspective and flips. Any visible
    part of a region counts, even one that would be too small for an object."""
    hyp = Hyperparameters(degrees=10, flipud=0.5, scale=0.6)
    indexes = index_of(root), index_of(root, content=MAP)
    plain, mapped = (AugmentedImages(ImageReader(i, imgsz=64), hyp=hyp) for i in indexes)
    keys = [SampleKey(n % 4, 0, n, (64, 64)) for n in range(16)]
    plain_batch, mapped_batch = (
        collate(render_samples(each, keys), new_pixels(16, (64, 64))) for each in (plain, mapped)
    )
    rows = plain_batch.targets.rows.numpy()
    targets = mapped_batch.targets
    is_van = rows[:, 1] == 2
    assert is_van.sum() > 10
    kept = {tuple(row) for row in rows[is_van][:, [0, 2, 3, 4, 5]].tolist()}
    regions = {tuple(row) for row in targets.ignore[:, [0, 2, 3, 4, 5]].tolist()}
    assert kept < regions
    assert (targets.ignore[:, 1] == -1).all()
    assert (targets.ignore[:, 4:] > 0).all()
    np.testing.assert_array_equal(targets.rows.numpy()[:, 2:], rows[~is_van][:, 2:])
    assert targets.counts == tuple(np.bincount(rows[~is_van][:, 0].astype(int), minlength=16))
    assert plain_batch.targets.ignore is None
    part = mapped_batch.shard(5, 9).targets
    alone = collate(render_samples(mapped, keys[5:9]), new_pixels(4, (64, 64))).targets
    np.testing.assert_array_equal(part.ignore, alone.ignore)
    np.testing.assert_array_equal(part.rows, alone.rows)


def test_detections_in_regions_are_neither_true_nor_false(root):
    truth = index_of(root, content=MAP).ground_truth()
    image = np.repeat(np.arange(4), np.diff(truth.offsets))
    boxes = xywh_to_xyxy(truth.boxes_xywh_px)
    scores = np.where(truth.crowd, 0.9, 0.8)  # in regions, of both classes, with the highest scores
    found = DetectionTable(image, boxes, scores, truth.classes)
    assert score_detections(truth, found, 2).metrics["AP"] == 1
    known = replace(
        truth,
        crowd=np.zeros_like(truth.crowd),
        boxes_xywh_px=np.where(truth.crowd[:, None], 0.001, truth.boxes_xywh_px),
    )
    assert score_detections(known, found, 2).metrics["AP"] < 0.6


def test_a_class_map_is_part_of_the_digest_with_which_a_run_resumes(tmp_path):
    path = write_dataset(tmp_path / "set", train=4, val=2)
    content = yaml.safe_load(path.read_text())
    found = []
    for more in ({}, {}, {"ignore": ["dark"]}, {"classes": {"light": "x", "dark": "x"}}, {"ignore": ["light"]}):
        path.write_text(yaml.safe_dump(content | more))
        index = load_index(
            load_dataset_spec(path), "train", IndexSettings(cache_dir=str(tmp_path / "cache"), progress=False)
        )
        found.append((index.image_digest(), index.label_digest()))
    assert len({images for images, _ in found}) == 1
    assert found[0] == found[1]
    assert len({used for _, used in found}) == 4
