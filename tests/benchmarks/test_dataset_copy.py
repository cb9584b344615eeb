"""Copies of data sets: every image, of sets in any place that the commands accept, with YOLO labels."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmarks.dataset_copy import copied
from data.index import IndexSettings
from data.load import load_index
from data.read_spec import load_dataset_spec
from tests.helpers.tiny import write_dataset

pytestmark = pytest.mark.benchmarks


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("is_list", [False, True])
def test_images_with_equal_names_are_all_copied_and_scored_apart(tmp_path: Path, is_list: bool):
    original = write_dataset(tmp_path / "set", train=2, val=2)  # images/train/000.png is not images/val/000.png
    folders = ["images/train", "images/val"]
    images = [f"{folder}/{number:03}.png" for folder in folders for number in range(2)]
    (original.parent / "all.txt").write_text("".join(f"./{image}\n" for image in images))
    source = "all.txt" if is_list else folders
    original.write_text(yaml.safe_dump({"train": source, "val": source, "names": ["light", "dark"]}))
    before = contents(original.parent)
    with copied(str(original)) as data:
        settings = IndexSettings(cache_dir=str(tmp_path / "index"), progress=False)
        for split in ("train", "val"):
            expected = load_index(load_dataset_spec(original), split, settings).ground_truth()
            found = load_index(load_dataset_spec(data), split, settings).ground_truth()
            assert len(set(found.image_ids)) == 4
            assert found.boxes_xywh_px.tolist() == expected.boxes_xywh_px.tolist()
            copies = [path.read_bytes() for path in sorted((data.parent / "images" / split).iterdir())]
            assert copies == [before[name] for name in images]
    after = contents(original.parent)
    assert {name: after[name] for name in before} == before


def test_a_program_that_writes_into_the_copy_leaves_the_original(tmp_path: Path):
    """Ultralytics rewrites JPEG files without an end marker where they are."""
    original = write_dataset(tmp_path / "set", train=2, val=1)
    before = contents(original.parent)
    with copied(str(original)) as data:
        for path in data.parent.rglob("*"):
            if path.is_file():
                path.open("r+b").write(b"peer")
    assert contents(original.parent) == before
