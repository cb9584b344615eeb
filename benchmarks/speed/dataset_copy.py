"""A temporary copy of a data set for a comparison: both sides read the same files, and files that a peer writes next to
them are deleted with the copy.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from data.source.dataset_yaml import load_dataset_spec
from data.source.files import list_split


@contextmanager
def copied(data: str, *, times: int = 1) -> Iterator[Path]:
    """A context manager around `copy_dataset` that deletes the copy at the end."""
    with tempfile.TemporaryDirectory(prefix="lockstep-copy-") as folder:
        yield copy_dataset(data, Path(folder), times=times)


def copy_dataset(data: str, folder: Path, *, times: int = 1) -> Path:
    """Copies train and val, with hard links if the file system supports them. Returns the YAML of the copy.

    Args:
        data: a data set with YOLO labels.
        times: number of copies of each training image, each in its own folder.
    """
    spec = load_dataset_spec(data)
    for split, repeats in (("train", times), ("val", 1)):
        listing = list_split(spec, split)
        for image, label in zip(listing.images, listing.labels, strict=True):
            for repeat in range(repeats):
                place = Path(f"{repeat:04}" if repeats > 1 else "", image.name_in_split)
                link(spec.root / image.name, folder / "images" / split / place)
                if label.stamp is not None:
                    link(spec.root / label.name, folder / "labels" / split / place.with_suffix(".txt"))
    content = {"path": str(folder), "train": "images/train", "val": "images/val", "names": dict(enumerate(spec.names))}
    path = folder / "data.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return path


def link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system, or linked before
        if not (target.exists() and target.samefile(source)):
            shutil.copy2(source, target)
