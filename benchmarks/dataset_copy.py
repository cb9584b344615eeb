"""Copies of data sets for comparisons: both sides read the same files, and files that a peer writes next to them are
deleted with the copy.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from data.labels.yolo import YOLO
from data.source.dataset_spec import DatasetSpec, FilesSplit
from data.source.dataset_yaml import load_dataset_spec
from data.source.files import list_split
from data.source.open import find_data
from utils.errors import UserError
from utils.files.safe_io import write_whole

SUBSET_SEED = 20261121


@contextmanager
def copied(data: str, *, times: int = 1) -> Iterator[Path]:
    """A context manager around `copy_dataset` that deletes the copy at the end."""
    with tempfile.TemporaryDirectory(prefix="lockstep-copy-") as folder:
        yield copy_dataset(data, Path(folder), times=times)


def copy_dataset(data: str, folder: Path, *, with_test: bool = False, times: int = 1, subset: int = 0) -> Path:
    """Copies train and val, with hard links if the file system supports them, unless ``folder`` already contains the
    copy. Returns the YAML of the copy.

    Raises UserError if the data set has labels other than a YOLO text file per image, or too few images, or if
    ``folder`` contains a copy of another one.

    Args:
        data: YAML or folder of a data set, or the name of one in configs/data.
        with_test: whether to copy the test split, if there is one.
        times: number of copies of each training image, each in its own folder.
        subset: number of training images, the first ones of a fixed shuffle; 0: all.
    """
    found = find_data(data)
    spec = load_dataset_spec(found)
    splits = ["train", "val"]
    if with_test and "test" in spec.splits:
        splits.append("test")
    _check_labels(spec, splits)
    source = str(Path(found).resolve())
    origin = folder / "source.txt"
    if origin.exists() and origin.read_text(encoding="utf-8") != source:
        raise UserError(f"{folder}: made from {origin.read_text(encoding='utf-8')}, not {data}; delete it")
    path = folder / "data.yaml"  # written last
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(origin, source)
    _copy_split(spec, "train", folder, times=times, subset=subset)
    for name in splits[1:]:
        _copy_split(spec, name, folder)
    content = {"path": str(folder), **{name: f"images/{name}" for name in splits}, "names": dict(enumerate(spec.names))}
    write_whole(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    return path


def _check_labels(spec: DatasetSpec, splits: Sequence[str]) -> None:
    for name in splits:
        split = spec.split(name)
        if not isinstance(split, FilesSplit) or split.label_format is not YOLO:
            raise UserError(f"{spec.source}: labels must be YOLO text files, one per image; convert them")


def _copy_split(spec: DatasetSpec, split: str, folder: Path, *, times: int = 1, subset: int = 0) -> None:
    listing = list_split(spec, split)
    pairs = list(zip(listing.images, listing.labels, strict=True))
    if subset > len(pairs):
        raise UserError(f"{spec.source}: has {len(pairs)} training images, fewer than a variant's subset of {subset}")
    if subset:
        random.Random(SUBSET_SEED).shuffle(pairs)
        pairs = pairs[:subset]
    for repeat in range(times):
        place = Path(f"{repeat:04}") if times > 1 else Path()
        for image, label in pairs:
            name = place / image.name_in_split
            _link(spec.root / image.name, folder / "images" / split / name)
            if label.stamp is not None:
                _link(spec.root / label.name, folder / "labels" / split / name.with_suffix(".txt"))


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system, or linked before
        if not (target.exists() and target.samefile(source)):
            shutil.copy2(source, target)
