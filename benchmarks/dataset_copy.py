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

from data.dataset.spec import DatasetSpec, FilesSplit
from data.dataset.yaml_file import load_dataset_spec
from data.labels.formats import YOLO
from data.listing.listing import list_split
from data.open import find_data
from utils.errors import UserError
from utils.files.safe_io import write_whole

SUBSET_SEED = 20261121


@contextmanager
def copied(data: str, *, times: int = 1) -> Iterator[Path]:
    """Yields the YAML of a temporary copy (`copy_dataset`)."""
    with tempfile.TemporaryDirectory(prefix="lockstep-copy-") as folder:
        yield copy_dataset(data, Path(folder), times=times)


def copy_dataset(data: str, folder: Path, *, with_test: bool = False, times: int = 1, subset: int = 0) -> Path:
    """Copies train and val into ``folder``, unless it already contains the copy. Returns the YAML of the copy.

    The images of a split are named by number, in the order of the original, because both sides name an image by its
    file's name alone, and folders of one split may have equal names. Bytes are copied, not linked: the peer repairs
    broken JPEG files in place.

    Raises UserError if the data set has labels other than a YOLO text file per image, or too few images, or if
    ``folder`` contains anything but a copy of this data set.

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
    path = folder / "data.yaml"  # written last
    _claim(folder, str(Path(found).resolve()))
    if path.exists():
        return path
    for name in ("images", "labels"):  # of a copy that was interrupted
        if (folder / name).exists():
            shutil.rmtree(folder / name)
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


def _claim(folder: Path, source: str) -> None:
    """Makes ``folder`` the folder of copies of ``source``. Raises UserError if it contains anything else."""
    folder.mkdir(parents=True, exist_ok=True)
    origin = folder / "source.txt"
    if not origin.exists():
        if any(folder.iterdir()):
            raise UserError(f"{folder}: contains other files than a copy of {source}; choose another folder")
        write_whole(origin, source)
    copied_source = origin.read_text(encoding="utf-8")
    if copied_source != source:
        raise UserError(f"{folder}: made from {copied_source}, not {source}; delete it")


def _copy_split(spec: DatasetSpec, split: str, folder: Path, *, times: int = 1, subset: int = 0) -> None:
    listing = list_split(spec, split)
    has_label = (listing.label_stamps[:, 0] >= 0).tolist()
    files = list(zip(listing.images, listing.labels, has_label, strict=True))
    if subset > len(files):
        raise UserError(f"{spec.source}: has {len(files)} training images, fewer than a variant's subset of {subset}")
    if subset:
        random.Random(SUBSET_SEED).shuffle(files)
        files = sorted(files[:subset])
    places = [Path(f"{repeat:04}") for repeat in range(times)] if times > 1 else [Path()]
    for number, (image, label, is_labeled) in enumerate(files):
        stem = f"{number:08}"
        images = [folder / "images" / split / place / f"{stem}{Path(image).suffix}" for place in places]
        _copy(spec.root / image, images)
        if is_labeled:
            labels = [folder / "labels" / split / place / f"{stem}.txt" for place in places]
            _copy(spec.root / label, labels)


def _copy(source: Path, targets: Sequence[Path]) -> None:
    """Copies a file. The targets share its bytes if the file system has hard links."""
    first, *others = targets
    first.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, first)
    for target in others:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(first, target)
        except OSError:
            shutil.copyfile(first, target)
