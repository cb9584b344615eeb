"""Finds the labels of a folder without a YAML: COCO JSON or Pascal VOC XML, else YOLO txt with a list of names."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data.labels.label_format import MAX_BYTES, first_bytes
from data.labels.voc import is_voc, object_names
from data.labels.yolo import has_row, label_folders
from data.source.folder_splits import IMAGE_FOLDERS, split_of
from utils.errors import UserError
from utils.files.once_per_file import once_per_file
from utils.files.safe_io import read_regular, read_text

_NAME_LISTS = ("_darknet.labels", "classes.txt", "obj.names", "labels.txt", "*.names")
_CATEGORIES = re.compile(r'"categories"\s*:\s*\[')
_IMAGES = re.compile(r'"images"\s*:\s*\[\s*\{')  # absent from Label Studio's notes.json
_ANY_XML = "*.[xX][mM][lL]"
_FILE_NAME = re.compile(r'"file_name"\s*:\s*"(?:[^"]*[/\\])?([^"/\\]+)"')
_MAX_JSON_BYTES = 1 << 32
_MAX_NOTES_BYTES = 1 << 26


class FolderLabels(NamedTuple):
    """Locations and formats of a folder's labels."""

    formats: list[str]  # names, for the log
    values: dict[str, Any]  # names and annotations, see `FolderContent`


def find_folder_labels(folder: Path, splits: dict[str, Path], names: Any) -> FolderLabels | None:
    """Finds the labels of a folder's splits. Returns None if there are no usable labels.

    Args:
        splits: the folder or list of images of each split.
        names: value of the key ``names`` in the folder's YAML; None without one.
    """
    json_folder = folder / "annotations"
    labels = _find_annotations(folder, json_folder, splits, names) or _find_yolo(folder, splits, names)
    if labels is None and not json_folder.is_dir():
        labels = _find_annotations(folder, folder / "Annotations", splits, names)
    return labels


def _find_annotations(folder: Path, json_folder: Path, splits: dict[str, Path], names: Any) -> FolderLabels | None:
    """Finds COCO JSON or Pascal VOC for each split. Returns None if no split has either. Without ``names``, the classes
    of Pascal VOC are the names of all its objects."""
    annotations: dict[str, Path] = {}
    for split, images in splits.items():
        path = _find_coco((json_folder, folder), split, images) or _voc_folder(folder, images)
        if path is not None:
            annotations[split] = path
    if not annotations:
        return None
    voc_folders = [path for path in annotations.values() if path.is_dir()]
    formats = []
    if len(voc_folders) < len(annotations):
        formats.append("COCO JSON")
    if voc_folders:
        formats.append("Pascal VOC")
    for split, images in splits.items():  # the class indices of YOLO txt would have no names
        if split not in annotations and images.is_dir() and has_yolo_rows(images):
            reason = f"{images} has YOLO txt, other splits have {formats[0]}; write a YAML with the names by number"
            raise UserError(f"data set {folder}: {reason}")
    values: dict[str, Any] = {"annotations": annotations}
    if voc_folders and not names:
        values["names"] = _voc_names(voc_folders)
        if not values["names"]:
            raise UserError(f"data set {folder}: {', '.join(map(str, annotations.values()))}: no object in any XML")
    return FolderLabels(formats, values)


# COCO JSON


class _Json(NamedTuple):
    """Summary of a JSON file. It does not keep the text, which may be large."""

    is_coco: bool
    has_boxes: bool


def _find_coco(folders: Sequence[Path], split: str, images: Path) -> Path | None:
    """Returns a COCO JSON of the split whose images are in the folder ``images``, preferably one with boxes, or None if
    there is none. ``folders``: searched besides the folder of the images."""
    without_boxes: Path | None = None  # such as image_info_test2017.json
    for paths in _json_candidates(folders, split, images):
        coco = [path for path in paths if _summary_of(path).is_coco]
        with_boxes = [path for path in coco if _summary_of(path).has_boxes]
        if with_boxes:
            _check_one_has_all(with_boxes, split)
            return with_boxes[0]
        if without_boxes is None and coco:
            without_boxes = coco[0]
    return without_boxes


def _json_candidates(folders: Sequence[Path], split: str, images: Path) -> list[list[Path]]:
    """Returns the JSON files that may belong to a split: those next to its images, those in ``folders`` that are named
    after the split, and those named after no split."""
    nearby = sorted(images.glob("*.json"))
    if not nearby and images.name in IMAGE_FOLDERS:
        nearby = sorted(images.parent.glob("*.json"))
    nearby = [path for path in nearby if _split_in(path) in (split, "")]
    nearby.sort(key=lambda path: _split_in(path) != split)  # files that name the split first
    in_folder = [path for searched in folders for path in sorted(searched.glob("*.json"))]
    of_split = [path for path in in_folder if _split_in(path) == split]
    of_no_split = [path for path in in_folder if _split_in(path) == ""]
    return [nearby, of_split, of_no_split]


@once_per_file
def _summary_of(path: Path) -> _Json:
    """Reads a JSON file and summarizes it. Raises UserError if it cannot be read."""
    text = _json_text(path)
    is_coco = _CATEGORIES.search(text) is not None and _IMAGES.search(text) is not None
    return _Json(is_coco, has_boxes='"bbox"' in text)


def _split_in(path: Path) -> str:
    """Returns the split that a file's name contains, as in instances_val2017.json, or ""."""
    return next(filter(None, map(split_of, re.split(r"[_.]", path.stem))), "")


def _check_one_has_all(paths: list[Path], split: str) -> None:
    """Raises UserError if any COCO JSON of a split names images that the first one does not name."""
    first = paths[0]
    others = [path for path in paths[1:] if _split_in(path) == _split_in(first)]
    names = set(_FILE_NAME.findall(_json_text(first))) if others else set()
    for path in others:
        if not names.issuperset(_FILE_NAME.findall(_json_text(path))):
            reason = f"names images that {first} does not, and both seem to belong to '{split}'"
            raise UserError(f"{path}: {reason}; merge them, or write a YAML")


def _json_text(path: Path) -> str:
    return read_text(path, max_bytes=_MAX_JSON_BYTES)


# Pascal VOC


def _voc_folder(folder: Path, images: Path) -> Path | None:
    """Returns the folder with a split's Pascal VOC XML files, or None if there is none."""
    candidates = (
        images,
        images.parent / "annotations",
        images.parent / "Annotations",
        folder / "annotations" / images.name,
        folder / "annotations",
        folder / "Annotations" / images.name,
        folder / "Annotations",
        images.parent / "labels",  # FiftyOne's
        folder / "labels" / images.name,
    )
    return next((path for path in candidates if any(is_voc(first_bytes(file)) for file in path.glob(_ANY_XML))), None)


def _voc_names(folders: Iterable[Path]) -> list[str]:
    files = [path for folder in dict.fromkeys(folders) for path in sorted(folder.glob(_ANY_XML))]
    names: set[str] = set()
    for path in files:
        with contextlib.suppress(OSError):  # the scan reports files that cannot be read
            names |= object_names(read_regular(path, MAX_BYTES))
    return sorted(names)


# YOLO txt


def _find_yolo(folder: Path, splits: dict[str, Path], names: Any) -> FolderLabels | None:
    """Finds YOLO txt, with the classes ``names`` or those listed in a file; None without label files or names."""
    names = names or _listed_names([folder, *splits.values()])
    if not names or not any(has_yolo_rows(images) for images in splits.values()):
        return None
    return FolderLabels(["YOLO txt"], {"names": names})


def has_yolo_rows(images: Path) -> bool:
    """Returns whether any folder that may contain the YOLO txt of ``images`` does. Returns True for a list of images,
    whose label files are looked up by the scan."""
    if images.is_file():
        return True
    for folder in map(Path, label_folders(str(images))):
        if any(map(_has_yolo_row, (*folder.glob("*.[tT][xX][tT]"), *folder.glob("*/*.[tT][xX][tT]")))):
            return True
    return False


def _has_yolo_row(file: Path) -> bool:
    """Returns whether a file contains a row of YOLO txt. False if it cannot be read."""
    try:
        return has_row(read_regular(file, MAX_BYTES))
    except OSError:
        return False


def _listed_names(folders: Iterable[Path]) -> list[str]:
    """Returns the classes that a file in ``folders`` lists, or an empty list without such a file. Raises UserError if
    two files differ."""
    names_of: dict[Path, list[str]] = {}
    for folder in folders:
        for path in (path for pattern in _NAME_LISTS for path in sorted(folder.glob(pattern))):
            names = [line.strip() for line in read_text(path).splitlines() if line.strip()]
            if names:
                names_of[path] = names
        notes = folder / "notes.json"
        names = _names_in_notes(notes) if notes.is_file() else []
        if names:
            names_of[notes] = names
    if not names_of:
        return []
    first, *others = names_of
    for other in others:
        if names_of[other] != names_of[first]:
            raise UserError(f"{other}: its classes differ from those of {first}; make them agree")
    return names_of[first]


def _names_in_notes(path: Path) -> list[str]:
    """Returns the classes in the notes.json that Label Studio writes next to YOLO txt; an empty list for others."""
    try:
        categories = json.loads(read_text(path, max_bytes=_MAX_NOTES_BYTES))["categories"]
        return [str(category["name"]).strip() for category in sorted(categories, key=lambda category: category["id"])]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
