"""A data set of five small images, of which one has no labels, in all label formats."""

import numpy as np
import pytest

from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.source.dataset_yaml import load_dataset_spec

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


def take_messages(lines, *, unlabeled=False):
    """The logged messages. The one about ü's missing label file, which nearly every test gets, is only included if
    ``unlabeled``."""
    messages = [m for m in lines.messages if not m.startswith("scanning ")]
    messages = [m for m in messages if unlabeled or "1 of 5 images have no label file" not in m]
    lines.clear()
    return messages


def write_yaml(root, text="", names=NAMES):
    path = root / "d.yaml"
    names_line = f"names: [{', '.join(names)}]\n" if names else ""
    path.write_text(f"train: images/train\nval: images/train\n{names_line}{text}", encoding="utf-8")
    return path


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
    """Returns everything about the files that a scan could change."""
    return {p: (p.stat().st_mtime_ns, p.stat().st_mode, p.is_file() and p.read_bytes()) for p in root.rglob("*")}
