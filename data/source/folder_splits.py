"""Finds the splits of a folder without a YAML: folders or lists of images that are named after them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from data.images.kinds import IMAGE_SUFFIXES
from utils.errors import UserError

IMAGE_FOLDERS = ("images", "JPEGImages", "data", "Images")  # the third is FiftyOne's
_SPLIT_NAME = re.compile(r"(train|val|test)(ing|val|id|idation)?([-_ ]?\d+)?", re.IGNORECASE)


def split_of(name: str) -> str:
    """Returns the split that a folder or file is named after, such as "val" for "Valid" or "val2017", or ""."""
    match = _SPLIT_NAME.fullmatch(name)
    return match[1].lower() if match else ""


def find_splits(folder: Path) -> dict[str, Path]:
    """Returns the image folders by split, else the image lists by split, else all images as the training split."""
    splits = _split_folders(folder) or _split_lists(folder) or {"train": images_in(folder)}
    return {split: splits[split] for split in ("train", "val", "test") if split in splits}


def split_parents(folder: Path) -> list[Path]:
    """Returns the folders in which folders may be named after splits: ``folder`` and its ``images`` or, if there is no
    such folder, ``Images``."""
    images = next((folder / name for name in ("images", "Images") if (folder / name).is_dir()), None)
    return [folder] if images is None else [folder, images]


def _split_folders(folder: Path) -> dict[str, Path]:
    """Returns the image folders that are named after splits. Raises UserError if two belong to the same split."""
    splits: dict[str, Path] = {}
    for parent in split_parents(folder):
        for path in sorted(parent.iterdir()):
            split = split_of(path.name)
            if not split or not path.is_dir():
                continue
            images = images_in(path)
            if split in splits and not images.samefile(splits[split]):
                both = f"{splits[split]} and {images} are both '{split}'"
                raise UserError(f"data set {folder}: {both}; rename one, or write a YAML with 'train:' and 'val:'")
            splits.setdefault(split, images)
    return splits


def _split_lists(folder: Path) -> dict[str, Path]:
    """Returns the image lists, as in Darknet and Pascal VOC, that are named after splits. Raises UserError if two
    belong to the same split, except for Pascal VOC's ``train`` and ``trainval``, where ``trainval`` is not used."""
    splits: dict[str, Path] = {}
    for path in _files_named_after_splits(folder):
        if not path.exists():
            raise UserError(f"{path}: a broken link; restore the list of images, or remove the link")
        if not path.stat().st_size:
            continue
        split = split_of(path.stem)
        first = splits.setdefault(split, path)
        if not path.samefile(first) and not _is_voc_pair(first, path):
            raise UserError(
                f"data set {folder}: {first} and {path} both list images of '{split}'; join them, or write a YAML with "
                "'train:' and 'val:', which may name several lists"
            )
    return splits


def _files_named_after_splits(folder: Path) -> list[Path]:
    """Returns the .txt files that are named after splits, except label files: those next to an image of their name."""
    files = sorted((*folder.glob("*.txt"), *folder.glob("ImageSets/Main/*.txt")))
    named = [path for path in files if split_of(path.stem)]
    stems = {path.stem for path in named}
    images = {
        parent / stem
        for parent in {path.parent for path in named}
        for stem, suffix in map(os.path.splitext, os.listdir(parent))  # strings: there may be millions of images
        if stem in stems and suffix.lower() in IMAGE_SUFFIXES and (parent / f"{stem}{suffix}").exists()
    }
    return [path for path in named if path.with_suffix("") not in images]


def _is_voc_pair(first: Path, second: Path) -> bool:
    """Returns whether two lists are Pascal VOC's ``train`` and ``trainval``: training images without and with the
    validation images."""
    names = (first.stem.lower(), second.stem.lower())
    return first.parent == second.parent and names == ("train", "trainval")


def images_in(folder: Path) -> Path:
    """Returns the image folder within the folder of a split or data set, or that folder itself."""
    return next((folder / name for name in IMAGE_FOLDERS if (folder / name).is_dir()), folder)
