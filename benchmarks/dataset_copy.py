"""Copies of data sets for comparisons: both sides read the same files, and files that a peer writes next to them are
deleted with the copy.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from data.formats.table import YOLO
from data.open import find_data
from data.pairing import list_split
from data.read_spec import load_dataset_spec
from data.spec import DatasetSpec, FilesSplit
from utils.errors import UserError
from utils.files.safe_io import write_whole

SUBSET_SEED = 20261121


@contextmanager
def copied(data: str) -> Iterator[Path]:
    """Yields the YAML of a temporary copy (`copy_dataset`)."""
    with tempfile.TemporaryDirectory(prefix="lockstep-copy-") as folder:
        yield copy_dataset(data, Path(folder))


def copy_dataset(data: str, folder: Path, *, times: int = 1, subset: int = 0) -> Path:
    """Copies all splits into ``folder``, unless it already contains the copy. Returns the YAML of the copy.

    The images of a split are named by number, in the order of the original, because both sides name an image by its
    file's name alone, and folders of one split may have equal names. Bytes are copied, not linked: the peer repairs
    broken JPEG files in place.

    Raises UserError if the data set has labels other than a YOLO text file per image, or too few images, or if
    ``folder`` contains a copy of another data set.

    Args:
        data: YAML or folder of a data set, or the name of one in configs/data.
        times: number of copies of each training image, each in its own folder.
        subset: number of training images, the first ones of a fixed shuffle; 0: all.
    """
    found = find_data(data)
    spec = load_dataset_spec(found)
    for name in spec.splits:
        split = spec.split(name)
        if not isinstance(split, FilesSplit) or split.label_format is not YOLO:
            raise UserError(f"{spec.source}: labels must be YOLO text files, one per image; convert them")
    path = folder / "data.yaml"  # written last
    origin = folder / "source.txt"
    source = str(Path(found).resolve())
    if path.exists():
        copied_source = origin.read_text(encoding="utf-8")
        if copied_source != source:
            raise UserError(f"{folder}: made from {copied_source}, not {source}; delete it")
        return path
    for name in ("images", "labels"):  # of a copy that was interrupted
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in spec.splits:
        is_train = name == "train"
        _copy_split(spec, name, folder, times=times if is_train else 1, subset=subset if is_train else 0)
    splits = {name: f"images/{name}" for name in spec.splits}
    content = {"path": str(folder), **splits, "names": dict(enumerate(spec.names))}
    write_whole(origin, source)
    write_whole(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    return path


def _copy_split(spec: DatasetSpec, split: str, folder: Path, *, times: int, subset: int) -> None:
    listing = list_split(spec, split)
    has_label = (listing.label_stamps[:, 0] >= 0).tolist()
    files = list(zip(listing.images, listing.labels, has_label, strict=True))
    if subset > len(files):
        raise UserError(f"{spec.source}: has {len(files)} training images, fewer than a variant's subset of {subset}")
    if subset:
        random.Random(SUBSET_SEED).shuffle(files)
        files = sorted(files[:subset])
    for number, (image, label, is_labeled) in enumerate(files):
        sources = {"images": image, "labels": label} if is_labeled else {"images": image}
        for kind, source in sources.items():
            first = None
            for repeat in range(times):
                place = folder / kind / split / (f"{repeat:04}" if times > 1 else "")
                place.mkdir(parents=True, exist_ok=True)
                target = place / f"{number:08}{Path(source).suffix}"
                if first is None:
                    first = shutil.copyfile(spec.root / source, target)
                else:
                    os.link(first, target)  # the copies of an image share its bytes
