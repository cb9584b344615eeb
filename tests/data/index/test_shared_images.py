"""Images that are in both splits, by the layout of the data set."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.index.shared_images import warn_of_shared_images
from data.source.dataset_yaml import load_dataset_spec
from tests.helpers.tiny import write_dataset


def write_coco(path: Path, names: list[str]) -> None:
    """Writes a JSON with one box on each of the images ``names``."""
    images = [{"id": i, "file_name": name, "height": 64, "width": 64} for i, name in enumerate(names)]
    boxes = [{"id": i, "image_id": i, "category_id": 1, "bbox": [1, 1, 9, 9]} for i in range(len(names))]
    content = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "light"}]}
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("val_folder", ["images/train", "link"])
@pytest.mark.parametrize(
    ("val_images", "message"),
    [
        ([5, 6, 7], ""),
        ([4, 5], "1 of the 2 validation images are also training images"),
        ([0, 1], "all of the 2 validation images are also training images"),
    ],
)
def test_splits_of_one_folder_share_the_images_that_both_label_files_name(
    tmp_path, monkeypatch, caplog, val_folder, val_images, message
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_dataset(tmp_path, train=8, val=0)
    os.symlink("images/train", tmp_path / "link")
    for split, numbers in (("train", [0, 1, 2, 3, 4]), ("val", val_images)):
        write_coco(tmp_path / f"{split}.json", [f"{number:03}.png" for number in numbers])
    (tmp_path / "data.yaml").write_text(
        f"train: images/train\nval: {val_folder}\nannotations: {{train: train.json, val: val.json}}\n"
    )
    spec = load_dataset_spec(tmp_path / "data.yaml")
    train, val = (load_index(spec, split, IndexSettings(progress=False)) for split in ("train", "val"))
    warn_of_shared_images(spec, train, val)
    assert message in caplog.text
    assert ("also training images" in caplog.text) == bool(message)
