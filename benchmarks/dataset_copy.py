"""A data set of its own for a comparison: both sides read the same files, and what a peer writes beside them is lost
with the copy."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from data.dataset_yaml import load_dataset_spec
from data.listing import list_split


@contextmanager
def copied(data: str, *, times: int = 1, splits: tuple[str, ...] = ("train", "val")) -> Iterator[Path]:
    """The YAML of a copy, gone at the end. Files are hard links where the file system allows it.

    Args:
        data: a data set with YOLO labels.
        times: how often each image is there, in folders of their own.
    """
    spec = load_dataset_spec(data)
    with tempfile.TemporaryDirectory(prefix="lockstep-copy-") as temporary:
        folder = Path(temporary)
        for split in splits:
            listing = list_split(spec, split)
            for image, label in zip(listing.images, listing.labels, strict=True):
                for repeat in range(times):
                    place = Path(f"{repeat:04}" if times > 1 else "", image.key)
                    link(spec.root / image.name, folder / "images" / split / place)
                    if label.stamp is not None:
                        link(spec.root / label.name, folder / "labels" / split / place.with_suffix(".txt"))
        content = {"path": str(folder), **{s: f"images/{s}" for s in splits}, "names": dict(enumerate(spec.names))}
        path = folder / "data.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
        yield path


def link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
