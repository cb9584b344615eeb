"""Data sets that join others, each of which labels some of the classes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.index.shared_images import warn_of_shared_images
from data.loading.loader import InfiniteDataLoader
from data.loading.sampler import EpochOrder, KeyedDistributedSampler, TrainCanvases
from data.samples.dataset import AugmentedImages
from data.samples.readers import ImageReader
from data.samples.weights import inverse_frequency_weights
from data.source.dataset_spec import IGNORED
from data.source.dataset_yaml import load_dataset_spec
from data.source.files import list_split
from engine.evaluation.tables import write_predictions
from tests.helpers.messages import refused
from tests.helpers.three_formats import write_three_formats
from tests.helpers.tiny import write_dataset
from utils.boxes import xywh_to_xyxy
from utils.detections import DetectionTable
from utils.errors import UserError


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """Set a labels light and dark; set b labels dark, as number 0, and glow."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in "ab":
        write_dataset(tmp_path / name, train=4, val=3)
    (tmp_path / "b" / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [dark, glow]\n")
    return tmp_path


def spec_of(root: Path, **more):
    parts = ["a/data.yaml", "b/data.yaml"]
    (root / "both.yaml").write_text(yaml.safe_dump({"train": parts, "val": parts, **more}))
    return load_dataset_spec(root / "both.yaml")


def load(spec, split: str = "train", **options):
    return load_index(spec, split, IndexSettings(progress=False, **options))


def test_classes_are_merged_by_name_and_others_ignored(root):
    spec = spec_of(root)
    assert spec.names == ("light", "dark", "glow")
    a, b, both = (
        load(s)
        for s in (load_dataset_spec(root / "a" / "data.yaml"), load_dataset_spec(root / "b" / "data.yaml"), spec)
    )
    assert [both.path(i) for i in range(8)] == [a.path(i) for i in range(4)] + [b.path(i) for i in range(4)]
    truth = both.ground_truth()
    image = np.repeat(np.arange(8), np.diff(truth.offsets))
    np.testing.assert_array_equal(image[truth.crowd], np.arange(8))  # each image has one class that it does not label
    np.testing.assert_array_equal(truth.classes[truth.crowd], [2] * 4 + [0] * 4)
    np.testing.assert_array_equal(truth.boxes_xywh_px[truth.crowd], [[0, 0, 64, 64]] * 8)
    objects = ~truth.crowd
    np.testing.assert_array_equal(truth.classes[objects], np.r_[a.classes, b.classes + 1])
    np.testing.assert_array_equal(truth.boxes_xywh_px[objects], np.r_[a.boxes_xywh_px, b.boxes_xywh_px])
    assert both.report.totals["images"] == 8
    assert both.report.totals["boxes"] == len(a.classes) + len(b.classes)


def test_classes_that_a_set_does_not_label_are_counted_as_no_regions(root):
    (root / "a/labels/train/001.txt").write_text("")
    index = load(spec_of(root))
    assert index.crowd.sum() == 8
    assert (index.report.totals["backgrounds"], index.report.totals["crowd"]) == (1, 0)
    assert index.report.summary().startswith("8 images, 1 background, ")
    assert "crowd" not in index.report.summary()
    # Regions that are labeled count, and their images are no backgrounds.
    (root / "a" / "data.yaml").write_text("train: images/train\nnames: [light, dark]\nignore: [dark]\n")
    (root / "a/labels/train/001.txt").write_text("1 0.5 0.5 0.2 0.2\n")
    for i in (0, 2, 3):
        (root / f"a/labels/train/00{i}.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    (root / "one.yaml").write_text("train: [a/data.yaml, b/data.yaml]\n")
    index = load(load_dataset_spec(root / "one.yaml"))
    assert (index.report.totals["backgrounds"], index.report.totals["crowd"]) == (0, 1)


def test_the_names_may_be_in_another_order_and_classes_chosen(root):
    spec = spec_of(root, names=["glow", "light", "dark", "other"])
    index = load(spec.use_classes(["light", "glow"]), "val")
    assert index.names == ("glow", "light")
    truth = index.ground_truth()
    np.testing.assert_array_equal(truth.classes[truth.crowd].reshape(6, 1)[:, 0], [0] * 3 + [1] * 3)
    with refused("both.yaml: 'train' has 8 images and no object of the class other; there is nothing to train on"):
        load(spec.use_classes(["other"]))


def test_a_class_of_which_each_set_leaves_a_part_out_is_an_error(root):
    """Otherwise every image would be a region to ignore, and nothing would be background."""
    merged = spec_of(root, classes={"light": "x", "glow": "x"})
    with refused(
        "both.yaml: 'train' has no image in which all objects of 'x' are labeled: each data set lacks one of the "
        "classes that are merged into it; label them, or do not merge them ('classes:' or --single-cls)"
    ):
        load(merged)
    with refused(
        "both.yaml: 'train' has no image in which all objects of 'object' are labeled: each data set lacks one of the "
        "classes that are merged into it; label them, or do not merge them ('classes:' or --single-cls)"
    ):
        load(spec_of(root), single_cls=True)
    load(spec_of(root, classes={"light": "x", "dark": "x"}))  # a labels both
    load(spec_of(root).use_classes(["dark"]), single_cls=True)


def test_a_part_may_have_backgrounds_only(root, caplog):
    """The joined set as a whole must have something to train on."""
    for label in (root / "b" / "labels").rglob("*.txt"):
        label.write_text("")
    for split, images in (("train", 4), ("val", 3)):
        index = load(spec_of(root), split)
        assert len(index) == 2 * images
        assert (index.classes[~index.crowd] >= 0).sum() == index.report.totals["boxes"] > 0
    assert "no object" not in caplog.text
    for label in (root / "a" / "labels").rglob("*.txt"):
        label.write_text("")
    with pytest.raises(UserError, match=r"both.yaml: 'train' has 8 images and no object; there is nothing to train on"):
        load(spec_of(root))


def test_messages_and_the_report_name_the_part(root, caplog):
    texts = {label: label.read_text() for label in (root / "b" / "labels/train").iterdir()}
    for label, text in texts.items():
        label.write_text("".join(f"{int(row[0]) + 1}{row[1:]}\n" for row in text.splitlines() if row[0] == "0"))
    (root / "b" / "labels/train/000.txt").write_text("2 0.5 0.5 0.2 0.2\n" + "1 0.5 0.5 0.2 0.2\n" * 20)
    index = load(spec_of(root), max_bad=0.5)
    part = root / "b" / "data.yaml"
    (advice,) = [line for line in index.report.lines if "probably misread" in line]
    assert advice.startswith("b/data.yaml: probably misread: the class ids seem to start at 1")
    warnings = [line for line in caplog.messages if "the class ids seem to start at 1" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"train of {part}: ")
    lost = [line for line in caplog.messages if "can't be used" in line]
    assert len(lost) == 1
    assert lost[0].startswith(f"train of {part}: ")


def test_the_same_classes_need_no_regions(root):
    with refused("both.yaml: 'train' joins other data sets, which are not copied; name one, or leave out --stage"):
        list_split(spec_of(root), "train")
    (root / "b" / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [dark, light]\n")
    assert not load(spec_of(root)).crowd.any()


def test_fractions_and_held_out_images_are_those_of_the_whole(root):
    spec = spec_of(root)
    half, whole = (load(spec, fraction=f) for f in (0.5, 1.0))
    assert len(half) == 4
    again = load(spec_of(root, names=["light", "dark", "glow", "more"]))
    chosen = {whole.paths[i] for i in (1, 5, 6)}
    parts = {split: load(spec.hold_out(chosen), split) for split in ("train", "val")}
    assert set(parts["val"].paths) == chosen
    assert set(parts["train"].paths) == {*whole.paths} - chosen
    assert len({index.label_digest() for index in (whole, half, again, *parts.values())}) == 5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"train": ["a/data.yaml", "images"]},
            "both.yaml: train: .../images: not a YAML of a data set; name only YAMLs, or only folders and lists",
        ),
        ({"train": ["a/data.yaml", "c/data.yaml"]}, "both.yaml: train: .../c/data.yaml: no such file"),
        (
            {"train": ["a/data.yaml", "b/date.yaml"]},
            "both.yaml: train: .../b/date.yaml: no such file; '.../b/data.yaml' exists",
        ),
        (
            {"train": ["both.yaml"]},
            "both.yaml: train: data sets join each other in a cycle: .../both.yaml -> .../both.yaml; remove one of "
            "these entries",
        ),
        ({"test": ["a/data.yaml"]}, "a/data.yaml: has no 'test' split, only train, val; add 'test: <folder>'"),
        ({"train": ["a/data.yaml", "a/../a/data.yaml"]}, "both.yaml: train: joins .../a/data.yaml twice; name it once"),
        ({"annotations": "c.json"}, "both.yaml: train: joins other data sets; 'annotations' belong in their YAMLs"),
        ({"names": ["light", "dark"]}, "both.yaml: names: lacks 'glow', a class of a data set that it joins; add it"),
    ],
)
def test_mistakes_are_one_line(root, content, message):
    with refused(message):
        spec_of(root, **content)


@pytest.mark.parametrize(
    ("of", "cycle"),
    [
        ({"x": {"train": ["x.yaml"]}}, "x x"),
        ({"x": {"train": ["y.yaml"]}, "y": {"train": ["x.yaml"]}}, "x y x"),
        ({"x": {"train": ["y.yaml"]}, "y": {"train": "a/images/train", "val": ["x.yaml"]}}, "x y x"),
        (
            {"x": {"val": ["y.yaml"]}, "y": {"val": "a/images/val", "test": ["z.yaml"]}, "z": {"test": ["y.yaml"]}},
            "y z y",
        ),
    ],
)
def test_a_cycle_of_data_sets_is_named(root, of, cycle):
    for name, splits in of.items():
        (root / f"{name}.yaml").write_text(yaml.safe_dump({"names": ["light", "dark"], **splits}))
    chain = " -> ".join(f"{root / name}.yaml" for name in cycle.split())
    with pytest.raises(UserError, match=re.escape(f"join each other in a cycle: {chain}; remove one")):
        load_dataset_spec(root / "x.yaml")


def test_a_data_set_is_extended_by_the_classes_of_a_model(root):
    """The classes of the model come first and are ignored; a class of both has labels, and the model's spelling."""
    data = root / "a" / "data.yaml"
    spec = load_dataset_spec(data)
    for names, expected in (
        (("glow", "Dark "), ("glow", "Dark ", "light")),
        (("dark", "light"), ("dark", "light")),
        (("cat",), ("cat", "light", "dark")),
    ):
        extended = spec.extended(names, "old.pt")
        assert extended.names == expected
        index, plain = (load(s) for s in (extended, spec))
        truth = index.ground_truth()
        ours = {"light": "light", "dark": next(n for n in expected if n.strip().lower() == "dark")}
        objects = [expected.index(ours[plain.names[c]]) for c in plain.classes]
        np.testing.assert_array_equal(truth.classes[~truth.crowd], objects)
        missing = [i for i, name in enumerate(expected) if name not in ours.values()]
        assert set(truth.classes[truth.crowd]) == set(missing)
        assert truth.crowd.sum() == len(index) * len(missing)
        assert [index.path(i) for i in range(4)] == [plain.path(i) for i in range(4)]
    some = spec.use_classes(["dark"]).extended(("light",), "old.pt")
    index = load(some, "val")
    assert index.names == ("light", "dark")
    assert not (index.classes[~index.crowd] == 0).any()  # it has labels of light objects, which are not used
    whole = load(spec.extended(("light",), "old.pt"), "val")
    assert whole.image_files == index.image_files == load(spec, "val").image_files  # they share decoded images
    assert whole.selection != index.selection  # and the caches of one do not replace those of the other
    data.write_text("train: images/train\nval: images/val\nnames: [x, X]\n")
    twice = load_dataset_spec(data)
    with refused("a/data.yaml: two of its classes map to 'x' of old.pt; merge them with 'classes:'"):
        twice.extended(("x",), "old.pt")


def test_ids_of_a_coco_json_are_those_of_a_data_set_that_is_extended(tmp_path, caplog):
    """With a model of --keep-old, pycocotools scores the predictions.json of val.py."""
    coco = pytest.importorskip("pycocotools.coco")
    cocoeval = pytest.importorskip("pycocotools.cocoeval")
    names = ["light", "dark"]
    objects = {f"x{i}.png": [(i % 2, 2, 3, 20 + i, 30)] for i in range(4)}
    write_three_formats(tmp_path, names, dict.fromkeys(objects, (48, 64)), objects)
    (tmp_path / "d.yaml").write_text(
        f"train: images/train\nval: images/train\nnames: {names}\nannotations: instances.json\n"
    )
    labels = json.loads((tmp_path / "instances.json").read_text())
    for annotation in labels["annotations"]:
        annotation["id"] += 1  # pycocotools takes an object with the id 0 for a missed one
    labels["categories"].append({"id": 55, "name": "bird"})  # not in the names of the YAML
    (tmp_path / "instances.json").write_text(json.dumps(labels))
    index = load(load_dataset_spec(tmp_path / "d.yaml").extended(("cat", "dark"), "old.pt"), "val")
    assert index.names == ("cat", "dark", "light")
    assert index.category_ids == (56, 20, 10)
    some = load_dataset_spec(tmp_path / "d.yaml").use_classes(["light"])
    assert load(some.extended(("Dark", "cat", "Bird"), "old.pt"), "val").category_ids == (20, 56, 55, 10)
    merged = load_dataset_spec(tmp_path / "d.yaml").extended(("dark",), "old.pt")
    assert load(merged, "val", single_cls=True).category_ids == (10,)  # the smallest that annotations have
    truth = index.ground_truth()
    found = np.flatnonzero(~truth.crowd)
    table = DetectionTable(
        image_index=truth.image_of_box[found],
        boxes_xyxy_px=xywh_to_xyxy(truth.boxes_xywh_px[found]),
        scores=np.ones(len(found)),
        classes=truth.classes[found],
    )
    write_predictions(tmp_path / "predictions.json", table, truth)
    labeled = coco.COCO(str(tmp_path / "instances.json"))
    scored = cocoeval.COCOeval(labeled, labeled.loadRes(str(tmp_path / "predictions.json")), "bbox")
    scored.evaluate()
    scored.accumulate()
    scored.summarize()
    assert scored.stats[0] == 1

    (tmp_path / "other.yaml").write_text((tmp_path / "d.yaml").read_text())
    (tmp_path / "both.yaml").write_text(f"val: [d.yaml, other.yaml]\nnames: {names}\n")
    with caplog.at_level("INFO", "lockstep"):
        both = load(load_dataset_spec(tmp_path / "both.yaml"), "val")
    assert (both.image_ids, both.category_ids) == (None, ())
    assert "val: ids of joined COCO JSONs are not kept" in caplog.text


def test_a_held_out_part_does_not_repeat_what_the_log_says_of_training(root, caplog):
    """One of the joined sets joins others itself, as it does with --keep-old."""
    (root / "b" / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [dark, background]\n")
    spec = spec_of(root)
    for whole in (spec, spec.extended(("cat",), "old.pt")):
        chosen = [load(whole).paths[0]]
        caplog.clear()
        with caplog.at_level("INFO", "lockstep"):
            load(whole.hold_out(chosen))
            num_of_training = len(caplog.messages)
            load(whole.hold_out(chosen), "val")
        assert any("does not label" in message for message in caplog.messages[:num_of_training])
        assert any("'background' is one of the classes" in message for message in caplog.messages[:num_of_training])
        (message,) = caplog.messages[num_of_training:]
        assert message.startswith("val: 1 image")


def test_images_of_two_sets_or_splits_are_named(root, caplog):
    """The joined set looks as if two YAMLs each labeled some classes of the same images."""
    spec = spec_of(root)
    train, val = (load(spec, split) for split in ("train", "val"))
    warn_of_shared_images(spec, train, val)
    assert "also training images" not in caplog.text
    assert "share" not in caplog.text
    warn_of_shared_images(spec, train, train)
    assert "all of the 8 validation images are also training images" in caplog.text
    text = f"path: {root / 'a'}\ntrain: images/train\nval: images/val\nnames: [dark, x]\n"
    (root / "b" / "data.yaml").write_text(text)
    assert len(load(spec_of(root))) == 8
    assert "train: data sets that" in caplog.text
    assert "both.yaml joins share 4 images, which count more than once" in caplog.text


def test_classes_that_are_ignored_everywhere_have_no_weight_in_draws(root):
    """The draws are those of --image-weights. A region that ignores all classes has no class."""
    (root / "a" / "data.yaml").write_text(
        "train: images/train\nval: images/val\nnames: [light, dark]\nignore: [dark]\n"
    )
    index = load(spec_of(root))
    assert (index.classes == -1).any()
    counts = index.boxes_per_class(3)
    assert counts.tolist() == [((index.classes == c) & ~index.crowd).sum() for c in range(3)]
    loader = InfiniteDataLoader(
        AugmentedImages(ImageReader(index, imgsz=64)),
        KeyedDistributedSampler(
            EpochOrder(np.ones(len(index)), seed=0, batch_size=4, canvases=TrainCanvases(64, 32)),
            rank=0,
            world_size=1,
            run_epochs=20,
        ),
        weighted=True,
    )
    np.testing.assert_allclose(loader.class_weights, inverse_frequency_weights(counts))


def test_regions_to_ignore_stay_when_classes_are_chosen(root):
    ignoring = "train: images/train\nval: images/val\nnames: [light, dark]\nignore: [dark]\n"
    (root / "a" / "data.yaml").write_text(ignoring)
    alone = load(load_dataset_spec(root / "a" / "data.yaml"))
    joined = load(spec_of(root).use_classes(["light"]))
    assert np.count_nonzero(alone.classes == IGNORED) > 0
    assert np.count_nonzero(joined.classes == IGNORED) == np.count_nonzero(alone.classes == IGNORED)
