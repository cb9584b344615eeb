"""``--data FOLDER``: reads a folder without a YAML as a data set, as annotation tools export it.

`folder_splits` finds the images of each split, and `folder_labels` their labels.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data.images.kinds import IMAGE_SUFFIXES
from data.source.folder_labels import find_folder_labels, has_yolo_rows
from data.source.folder_splits import IMAGE_FOLDERS, find_splits, images_in, split_of, split_parents
from data.source.missing_data import labels_without_images
from data.source.other_exports import first_unread_export
from data.source.yaml_keys import CLASS_KEYS, SPLITS, split_keys
from data.source.yaml_paths import is_yaml, resolve_root
from utils.config.commands import COMMANDS
from utils.config.yaml_files import MAX_BYTES, load_yaml
from utils.errors import UserError
from utils.files.safe_io import read_text
from utils.strings import counted, listed

_LABEL_FOLDERS = ("labels", "annotations")
_MAX_WRAPPING_FOLDERS = 4
_DATA_KEYS = (*SPLITS, "names")  # a YAML with one of these describes data
_DATA_LINE = re.compile(rf"^['\"]?({'|'.join(_DATA_KEYS)})['\"]?\s*:", re.MULTILINE)


class FolderContent(NamedTuple):
    """Description of a data set, inferred from its folder."""

    values: dict[str, Any]  # as in a YAML, with paths as Path; empty if the folder has a YAML that names the images
    yaml: Path | None  # the folder's YAML, which only names the classes if there are ``values``
    summary: str  # for the log


def read_folder(folder: Path) -> FolderContent:
    """Finds the splits of ``folder`` and their labels, unless it has a YAML that names them. Raises UserError with the
    content of the folder if it is not a data set."""
    folder = _unpacked(folder)
    yaml = _own_yaml(folder)
    values: dict[str, Any] = {}
    if yaml is not None:
        content = load_yaml(yaml, text_under=CLASS_KEYS)
        if not _has_names_only(content, yaml, folder):
            return FolderContent({}, yaml, f"{folder}: its YAML is {yaml.name}")
        values |= content
    splits = find_splits(folder)
    labels = find_folder_labels(folder, splits, values.get("names"))
    if labels is None:
        raise UserError(f"data set {folder}: {_content_summary(folder, splits)}")
    values |= splits | labels.values
    places = ", ".join(f"{split} {path.relative_to(folder)}" for split, path in splits.items())
    unused = _unused_folders(folder, splits.values())
    if unused:
        places += f"; not used because not named after a split: {listed(unused, 5)}"
    return FolderContent(values, yaml, f"{folder}: {' and '.join(labels.formats)}; {places}")


def yaml_of_folder(folder: Path) -> Path | None:
    """Returns the YAML that `read_folder` reads in place of ``folder``, without searching for images. Returns None if
    there is no YAML, if it only names the classes, or if the folder cannot be listed, which opening it reports."""
    try:
        folder = _unpacked(folder)
        yaml = _own_yaml(folder)
        if yaml is None or _has_names_only(load_yaml(yaml, text_under=CLASS_KEYS), yaml, folder):
            return None
    except OSError:
        return None
    return yaml


def _unpacked(folder: Path) -> Path:
    """Returns the innermost folder that contains everything in ``folder``, as after unpacking an archive."""
    for _ in range(_MAX_WRAPPING_FOLDERS):
        ignored = (".", "__macosx", "readme", "license")
        inside = [path for path in folder.iterdir() if not path.name.lower().startswith(ignored)]
        if len(inside) != 1 or not inside[0].is_dir() or split_of(inside[0].name) or inside[0].name in IMAGE_FOLDERS:
            break
        folder = inside[0]
    return folder


def _own_yaml(folder: Path) -> Path | None:
    """Returns the YAML that describes the data of a folder: one named like a data set, or else the only one with a
    split or names; None if there is none. YAMLs of other programs, such as dvc.yaml, are skipped even if their syntax
    is refused here. Raises UserError if several YAMLs describe data."""
    yamls = sorted(path for path in folder.iterdir() if is_yaml(path) and not path.name.startswith("."))
    for path in yamls:
        if path.stem in ("data", "dataset", folder.name):
            return path
    well_formed = [path for path in yamls if _describes_data(path)]
    describing = well_formed or [path for path in yamls if _seems_to_describe_data(path)]
    if len(describing) > 1:
        shown = listed([str(path) for path in describing], 3)
        raise UserError(f"data set {folder}: several YAMLs describe a data set: {shown}; name one of them")
    return describing[0] if describing else None


def _describes_data(yaml: Path) -> bool:
    """Returns whether a YAML has a split or names; False if it is malformed."""
    try:
        content = load_yaml(yaml, text_under=CLASS_KEYS)
    except UserError:
        return False
    return isinstance(content, dict) and not content.keys().isdisjoint(_DATA_KEYS)


def _seems_to_describe_data(yaml: Path) -> bool:
    """Returns whether a possibly malformed YAML has a line with the key of a split or names. Reading such a YAML then
    reports what is wrong with it."""
    try:
        return _DATA_LINE.search(read_text(yaml, max_bytes=MAX_BYTES)) is not None
    except UserError:
        return False


def _has_names_only(content: Any, yaml: Path, folder: Path) -> bool:
    """Returns whether a YAML names the classes but no images, as Supervision writes it. Raises UserError for a key that
    seems to be a misspelling."""
    if not isinstance(content, dict):
        return False
    used, _ = split_keys(content, yaml)
    if "names" not in used or not used.keys().isdisjoint((*SPLITS, "annotations")):
        return False
    return resolve_root(content.get("path"), yaml, known_root="") == folder


def _unused_folders(folder: Path, used: Collection[Path]) -> list[str]:
    """Returns the unused folders of images next to the split folders, relative to ``folder``."""
    unused: list[str] = []
    for parent in split_parents(folder):
        has_split_folders = any(parent in path.parents for path in used if path.is_dir())
        if not has_split_folders:
            continue
        for path in sorted(parent.iterdir()):
            if not _is_known_folder(path, used) and _has_images(path):
                unused.append(str(path.relative_to(folder)))
    return unused


def _is_known_folder(path: Path, used: Collection[Path]) -> bool:
    """Returns whether a folder is named like a label folder, is hidden, or is, contains or is in one of ``used``."""
    if path.name.startswith(".") or path.name.lower() in _LABEL_FOLDERS:
        return True
    return any(path == other or path in other.parents or other in path.parents for other in used)


def _has_images(folder: Path) -> bool:
    """Returns whether a folder contains images. False for a folder that cannot be listed, such as lost+found."""
    try:
        return folder.is_dir() and any(file.suffix.lower() in IMAGE_SUFFIXES for file in images_in(folder).iterdir())
    except OSError:
        return False


def _content_summary(folder: Path, splits: dict[str, Path]) -> str:
    """Returns the content of a folder that is not a data set, and what to do with it, for a message."""
    searched = [path for path in dict.fromkeys((folder, *splits.values())) if path.is_dir()]
    entries = [entry for path in searched for entry in sorted(path.iterdir())]
    export = first_unread_export(entries)
    if export:
        return export
    advice = labels_without_images(folder)
    if advice:
        return advice.removeprefix("; ")
    summary = _entries_summary(folder, entries)
    if any(has_yolo_rows(images) for images in splits.values()):
        return f"{summary}; YOLO txt needs the names of the classes: add classes.txt with one name a line, or a YAML"
    convert = f"{COMMANDS['convert'].typed} {shlex.join([str(folder), f'{folder.name}.json'])}"
    return f"{summary}; neither a YAML, COCO JSON, Pascal VOC nor YOLO txt; for the export of another tool: {convert}"


def _entries_summary(folder: Path, entries: Sequence[Path]) -> str:
    """Returns the number of images and the kinds of files among ``entries``, and the subfolders of ``folder``."""
    num_images = sum(path.suffix.lower() in IMAGE_SUFFIXES for path in entries)
    suffixes = {path.suffix.lower() for path in entries if path.is_file() and path.suffix} - IMAGE_SUFFIXES
    others = f"files of {', '.join(sorted(suffixes))}" if suffixes else "no other files"
    summary = f"{counted(num_images, 'image')}, {others}"
    folders = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if folders:
        shown = folders if len(folders) <= 5 else [*folders[:5], "..."]
        summary += f", folders {', '.join(shown)}"
    return summary
