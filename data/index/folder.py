"""Reads a folder without a YAML as a data set, as annotation tools export them: ``--data FOLDER``."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from data.image_io.decode import IMAGE_SUFFIXES
from data.labels.label_format import MAX_BYTES
from data.labels.voc import object_names
from utils.errors import UserError
from utils.files.safe_io import read_regular, read_text
from utils.program import COMMANDS
from utils.strings import counted

SPLIT_NAMES = {
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test",
    "testing": "test",
}  # fmt: skip
_NAME_LISTS = ("_darknet.labels", "classes.txt", "obj.names", "labels.txt", "*.names")


class FolderContent(NamedTuple):
    """What a folder means as a data set."""

    values: dict[str, Any]  # as a YAML would say it
    yaml: Path | None  # a YAML of its own, which counts alone
    summary: str  # for the log


def split_of(name: str) -> str:
    """The split that a folder or file is called after, such as "val" for "Valid" or "val2017"; "" for any other."""
    return SPLIT_NAMES.get(re.sub(r"[-_ ]?\d+$", "", name.lower()), "")


def read_folder(folder: Path) -> FolderContent:
    """Finds the splits of ``folder``, and their labels: YOLO txt with a list of names, COCO JSON or Pascal VOC XML.

    Raises UserError that says what is there, if it is nothing that trains as it is.
    """
    yamls = sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml"))
    if len(yamls) > 1:
        yamls = [path for path in yamls if path.stem in ("data", "dataset", folder.name)]
    if yamls:
        return FolderContent({}, yamls[0], f"{folder}: its YAML is {yamls[0].name}")
    splits = _splits(folder)
    values: dict[str, Any] = {split: str(path) for split, path in splits.items()}
    annotations = {split: found for split, path in splits.items() if (found := _annotations(folder, split, path))}
    kinds = {"COCO JSON" if path.suffix == ".json" else "Pascal VOC" for path in annotations.values()}
    if annotations:
        values["annotations"] = {split: str(path) for split, path in annotations.items()}
        if "Pascal VOC" in kinds:
            values["names"] = _voc_names(path for path in annotations.values() if path.is_dir())
    elif (names := _listed_names([folder, *splits.values()])) and any(_label_files(path) for path in splits.values()):
        kinds, values["names"] = {"YOLO txt"}, names
    else:
        raise UserError(f"--data {folder}: {_what_is_there(folder, splits)}")
    where = ", ".join(f"{split} {path.relative_to(folder)}" for split, path in splits.items())
    return FolderContent(values, None, f"{folder}: {' and '.join(sorted(kinds))}; {where}")


def _splits(folder: Path) -> dict[str, Path]:
    """The folders of the images by split; the folder itself is the training split if there is no other."""
    found: dict[str, Path] = {}
    for base in (folder, folder / "images"):
        for path in sorted(base.iterdir()) if base.is_dir() else ():
            if path.is_dir() and (split := split_of(path.name)):
                found.setdefault(split, path / "images" if (path / "images").is_dir() else path)
    return {split: found[split] for split in ("train", "val", "test") if split in found} or {"train": folder}


def _annotations(folder: Path, split: str, images: Path) -> Path | None:
    """A COCO JSON of the split, or the folder of its VOC files; None if there is none."""
    beside = sorted(images.glob("*.json")) or sorted(images.parent.glob("*.json")) * (images.name == "images")
    named = [path for path in sorted((folder / "annotations").glob("*.json"))
             if split in {split_of(part) for part in re.split(r"[_.]", path.stem)}]  # fmt: skip
    for path in (*beside, *named):
        if '"categories"' in read_text(path, most=1 << 32):
            return path
    places = (images, images.parent / "annotations", folder / "annotations" / images.name, folder / "Annotations")
    return next((place for place in places if place.is_dir() and any(place.glob("*.xml"))), None)


def _voc_names(folders: Iterable[Path]) -> list[str]:
    files = [path for folder in dict.fromkeys(folders) for path in sorted(folder.glob("*.xml"))]
    names: set[str] = set()
    for path in files:
        with contextlib.suppress(OSError):  # the scan names a file that cannot be read
            names |= object_names(read_regular(path, MAX_BYTES))
    return sorted(names)


def _listed_names(folders: Iterable[Path]) -> list[str]:
    for folder in folders:
        for pattern in _NAME_LISTS:
            for path in sorted(folder.glob(pattern)):
                return [line.strip() for line in read_text(path).splitlines() if line.strip()]
    return []


def _label_files(images: Path) -> bool:
    """Whether there are YOLO txt files beside the images, or in the folder ``labels`` that mirrors theirs."""
    parts = list(images.parts)
    if "images" in parts:
        parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    return any(path.name not in _NAME_LISTS for path in Path(*parts).glob("*.txt"))


def _what_is_there(folder: Path, splits: dict[str, Path]) -> str:
    images = sum(path.suffix.lower() in IMAGE_SUFFIXES for each in splits.values() for path in each.iterdir())
    files = [path for each in (folder, *splits.values()) for path in each.iterdir() if path.is_file()]
    others = sorted({path.suffix.lower() for path in files if path.suffix} - IMAGE_SUFFIXES)
    there = f"{counted(images, 'image')}, {'files of ' + ', '.join(others) if others else 'no other files'}"
    if any(_label_files(path) for path in splits.values()):
        return f"{there}; YOLO txt needs the names of the classes: add classes.txt with one name a line, or a YAML"
    convert = f"{COMMANDS['convert']} {folder} {folder.name}.json"
    return f"{there}; neither a YAML, COCO JSON, Pascal VOC nor YOLO txt; for the export of another tool: {convert}"
