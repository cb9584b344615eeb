from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

import data.source.demo as demo
from data.source.demo import CLASS_NAMES, demo_image, ensure_demo
from tests.helpers.messages import refused

SMALL = {"train_images": 6, "val_images": 3, "size": 128}


def _digest(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def small_set(tmp_path_factory) -> Path:
    return ensure_demo(tmp_path_factory.mktemp("demo") / "set", **SMALL)


def test_the_demo_set_has_the_yolo_layout_and_the_same_bytes_again(small_set, tmp_path):
    spec = yaml.safe_load(small_set.read_text())
    root = small_set.parent
    assert spec["names"] == dict(enumerate(CLASS_NAMES))
    for split, count in (("train", 6), ("val", 3)):
        images = sorted((root / spec[split]).iterdir())
        assert len(images) == count
        for image in images:
            assert cv2.imread(str(image)).shape == (128, 128, 3)
            assert (root / "labels" / split / f"{image.stem}.txt").is_file()
    assert [p.name for p in root.parent.iterdir()] == [root.name]  # no scratch folder stays
    assert _digest(ensure_demo(tmp_path / "again", **SMALL).parent) == _digest(root)


def test_an_image_depends_only_on_its_number():
    late = demo_image("val", 7, size=96)[0]
    demo_image("val", 3, size=96)
    assert np.array_equal(late, demo_image("val", 7, size=96)[0])
    assert not np.array_equal(late, demo_image("train", 7, size=96)[0])
    assert not np.array_equal(late, demo_image("val", 7, size=96, seed=1)[0])


def test_a_complete_set_is_reused_and_an_older_one_rendered_again(tmp_path, monkeypatch):
    root = tmp_path / "set"
    ensure_demo(root, **SMALL)
    stamp = (root / "images" / "train" / "00000.jpg").stat().st_mtime_ns
    ensure_demo(root, **SMALL)
    assert (root / "images" / "train" / "00000.jpg").stat().st_mtime_ns == stamp
    monkeypatch.setattr(demo, "VERSION", demo.VERSION + 1)
    ensure_demo(root, train_images=2, val_images=1, size=96)
    assert len(list((root / "images" / "train").iterdir())) == 2


def test_a_folder_of_the_user_is_not_overwritten_and_interrupted_rendering_leaves_nothing(tmp_path, monkeypatch):
    def full_disk(*args):
        raise OSError(28, "No space left on device")

    (tmp_path / "thesis.txt").write_text("mine")
    with refused("...: exists and is not a demo data set; choose an empty or new folder"):
        ensure_demo(tmp_path, **SMALL)
    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with refused("set: cannot write the demo data set (No space left on device)"):
        ensure_demo(tmp_path / "new" / "set", **SMALL)
    with refused(f"{tmp_path}/thesis.txt: is not a folder; choose another folder"):  # not "File exists"
        ensure_demo(tmp_path / "thesis.txt" / "set", **SMALL)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_boxes_are_the_extent_of_what_is_visible():
    """Brute force: the pixels that the owner map gives to an object must have exactly this extent."""
    owners = {}
    visible_boxes = demo.visible_boxes

    def remember(owner, classes, areas):
        owners["map"] = owner.copy()
        return visible_boxes(owner, classes, areas)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "visible_boxes", remember)
        _, labels = demo_image("train", 1, size=128)
    owner = owners["map"]
    extents = set()
    for number in range(owner.max() + 1):
        points = np.argwhere(owner == number)
        if len(points):
            (y0, x0), (y1, x1) = points.min(0), points.max(0) + 1
            extents.add((x0, y0, x1, y1))
    for _, cx, cy, w, h in labels:
        box = tuple(np.round(np.array([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2]) * len(owner)).astype(int))
        assert box in extents
