"""``--data FOLDER``: reads a folder without a YAML as a data set, as annotation tools export it."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from data.image_io.decode import IMAGE_SUFFIXES
from data.labels.label_format import MAX_BYTES
from data.labels.voc import is_voc, object_names
from data.labels.yolo import has_row, label_folders
from data.source.missing_data import labels_without_images
from data.source.other_exports import first_unread_export
from data.source.yaml_keys import CLASS_KEYS
from utils.config.yaml_files import load_yaml
from utils.errors import UserError
from utils.files.safe_io import read_regular, read_text
from utils.program import COMMANDS
from utils.strings import counted, listed

_SPLIT_NAME = re.compile(r"(train|val|test)(ing|val|id|idation)?([-_ ]?\d+)?", re.IGNORECASE)
_NAME_LISTS = ("_darknet.labels", "classes.txt", "obj.names", "labels.txt", "*.names")
_IMAGE_FOLDERS = ("images", "JPEGImages", "data")  # the last is FiftyOne's
_LABEL_FOLDERS = ("labels", "annotations")
_COCO = re.compile(r'"categories"\s*:\s*\[')
_FILE_NAME = re.compile(r'"file_name"\s*:\s*"(?:[^"]*[/\\])?([^"/\\]+)"')
_COCO_IMAGES = re.compile(r'"images"\s*:\s*\[\s*\{')  # the notes.json of Label Studio has none


def split_of(name: str) -> str:
    """Returns the split that a folder or file is named after, such as "val" for "Valid" or "val2017"; else ""."""
    match = _SPLIT_NAME.fullmatch(name)
    return match[1].lower() if match else ""


class FolderContent(NamedTuple):
    """Holds what a folder says about its data set."""

    values: dict[str, Any]  # as in a YAML; empty if the folder has a YAML
    yaml: Path | None  # its own YAML
    summary: str  # for the log


class _Labels(NamedTuple):
    """Holds where the labels of a folder are, and their formats."""

    formats: list[str]  # for the log
    values: dict[str, Any]  # as in a YAML: names and annotations


def read_folder(folder: Path) -> FolderContent:
    """Finds the splits of ``folder``, and their labels: COCO JSON or Pascal VOC XML, else YOLO txt with a list of
    names. Raises UserError, with what the folder has instead."""
    folder = _unpacked(folder)
    splits = _splits(folder)
    yaml = _own_yaml(folder)
    values: dict[str, Any] = {}
    if yaml is not None:
        content = load_yaml(yaml, text_under=CLASS_KEYS)
        if not isinstance(content, dict) or not {"names"} <= content.keys() <= {"names", "nc"}:
            return FolderContent({}, yaml, f"{folder}: its YAML is {yaml.name}")
        values |= content  # Supervision writes the names alone
    labels = _read_annotated(folder, splits) or _read_yolo(folder, splits, values.get("names"))
    if labels is None:
        raise UserError(f"--data {folder}: {_content_summary(folder, splits)}")
    values |= {split: str(path) for split, path in splits.items()} | labels.values
    places = ", ".join(f"{split} {path.relative_to(folder)}" for split, path in splits.items())
    unused = _unused_folders(folder, splits.values())
    if unused:
        places += f"; called like no split, and not used: {listed(unused, 5)}"
    return FolderContent(values, None, f"{folder}: {' and '.join(labels.formats)}; {places}")


def _unused_folders(folder: Path, used: Collection[Path]) -> list[str]:
    """Returns the folders with images that are next to those of splits, relative to ``folder``."""
    unused: list[str] = []
    for base in (folder, folder / "images"):
        if not base.is_dir() or not any(base in path.parents for path in used if path.is_dir()):
            continue
        for path in sorted(base.iterdir()):
            is_used = any(path == each or path in each.parents or each in path.parents for each in used)
            if is_used or not path.is_dir() or path.name.startswith(".") or path.name.lower() in _LABEL_FOLDERS:
                continue
            if any(file.suffix.lower() in IMAGE_SUFFIXES for file in _images_in(path).iterdir()):
                unused.append(str(path.relative_to(folder)))
    return unused


def _own_yaml(folder: Path) -> Path | None:
    """Returns the YAML of a folder; of several, the one that is named like a data set."""
    yamls = sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml"))
    if len(yamls) > 1:
        yamls = [path for path in yamls if path.stem in ("data", "dataset", folder.name)]
    return yamls[0] if yamls else None


def _read_annotated(folder: Path, splits: dict[str, Path]) -> _Labels | None:
    """Finds COCO JSON and Pascal VOC, one of them for each split; None if no split has either."""
    coco: dict[str, Path] = {}
    voc: dict[str, Path] = {}
    known_jsons: dict[Path, _Json] = {}
    for split, images in splits.items():
        file = _coco_json(folder, split, images, known_jsons)
        if file is not None:
            coco[split] = file
            continue
        place = _voc_folder(folder, images)
        if place is not None:
            voc[split] = place
    if not coco and not voc:
        return None
    formats = ["COCO JSON"] if coco else []
    if voc:
        formats.append("Pascal VOC")
    for split, images in splits.items():  # which classes the numbers of YOLO txt mean is not known
        if split not in coco and split not in voc and images.is_dir() and _has_yolo_rows(images):
            reason = f"{images} has YOLO txt, other splits {formats[0]}; write a YAML, with the names by number"
            raise UserError(f"--data {folder}: {reason}")
    annotations = {split: str((coco | voc)[split]) for split in splits if split in coco or split in voc}
    values: dict[str, Any] = {"annotations": annotations}
    if voc:
        values["names"] = _voc_names(voc.values())
        if not values["names"]:
            raise UserError(f"--data {folder}: {', '.join(annotations.values())}: no object in any XML")
    return _Labels(formats, values)


def _read_yolo(folder: Path, splits: dict[str, Path], names: Any) -> _Labels | None:
    """Finds YOLO txt, whose classes are ``names`` or listed in a file; None without label files or names."""
    names = names or _listed_names([folder, *splits.values()])
    if not names or not any(map(_has_yolo_rows, splits.values())):
        return None
    return _Labels(["YOLO txt"], {"names": names})


def _unpacked(folder: Path) -> Path:
    """Returns the folder below ``folder`` that has all of its content, as after unpacking an archive."""
    for _ in range(4):
        ignored = (".", "__macosx", "readme", "license")
        inside = [path for path in folder.iterdir() if not path.name.lower().startswith(ignored)]
        if len(inside) != 1 or not inside[0].is_dir() or split_of(inside[0].name) or inside[0].name in _IMAGE_FOLDERS:
            break
        folder = inside[0]
    return folder


def _splits(folder: Path) -> dict[str, Path]:
    """Returns the folders of the images by split, else the lists of images, else all images as the training split."""
    splits = _split_folders(folder) or _split_lists(folder) or {"train": _images_in(folder)}
    return {split: splits[split] for split in ("train", "val", "test") if split in splits}


def _split_folders(folder: Path) -> dict[str, Path]:
    """Returns the folders of images that are named after splits. Raises UserError if two have the same split."""
    splits: dict[str, Path] = {}
    for base in (folder, folder / "images"):
        for path in sorted(base.iterdir()) if base.is_dir() else ():
            split = split_of(path.name)
            if not split or not path.is_dir():
                continue
            images = _images_in(path)
            if split in splits and not images.samefile(splits[split]):
                both = f"{splits[split]} and {images} are both '{split}'"
                raise UserError(f"--data {folder}: {both}; rename one, or write a YAML with 'train:' and 'val:'")
            splits.setdefault(split, images)
    return splits


def _split_lists(folder: Path) -> dict[str, Path]:
    """Returns the lists of images, as Darknet and Pascal VOC have them, that are named after splits."""
    splits: dict[str, Path] = {}
    for path in sorted((*folder.glob("*.txt"), *folder.glob("ImageSets/Main/*.txt"))):
        split = split_of(path.stem)
        is_label = any(path.with_suffix(suffix).exists() for suffix in IMAGE_SUFFIXES)
        if not split or is_label:
            continue
        if not path.exists():
            raise UserError(f"{path}: a link to nothing; restore the list of images, or remove the link")
        if path.stat().st_size:
            splits.setdefault(split, path)
    return splits


def _images_in(folder: Path) -> Path:
    return next((folder / name for name in _IMAGE_FOLDERS if (folder / name).is_dir()), folder)


class _Json(NamedTuple):
    """Says what a JSON file has, without its text: the files may be large."""

    is_coco: bool
    has_boxes: bool


def _coco_json(folder: Path, split: str, images: Path, known: dict[Path, _Json]) -> Path | None:
    """Returns a COCO JSON of the split, preferably one with boxes; None if there is none. ``known``: the files that
    have been read, to which others are added."""
    without_boxes: Path | None = None  # such as image_info_test2017.json
    for paths in _json_candidates(folder, split, images):
        for path in paths:
            if path not in known:
                known[path] = _read_json(path)
        coco = [path for path in paths if known[path].is_coco]
        with_boxes = [path for path in coco if known[path].has_boxes]
        if with_boxes:
            _check_one_has_all(with_boxes, split)
            return with_boxes[0]
        if without_boxes is None and coco:
            without_boxes = coco[0]
    return without_boxes


def _json_candidates(folder: Path, split: str, images: Path) -> list[list[Path]]:
    """Returns the JSON files that may be of a split: those next to its images, those that are named after it, and those
    that are named after no split."""
    nearby = sorted(images.glob("*.json"))
    if not nearby and images.name in _IMAGE_FOLDERS:
        nearby = sorted(images.parent.glob("*.json"))
    nearby = [path for path in nearby if _split_in(path) in (split, "")]
    nearby.sort(key=lambda path: _split_in(path) != split)  # one that names the split first
    of_splits: dict[str, list[Path]] = {}
    for path in (*sorted((folder / "annotations").glob("*.json")), *sorted(folder.glob("*.json"))):
        of_splits.setdefault(_split_in(path), []).append(path)
    return [nearby, of_splits.get(split, []), of_splits.get("", [])]


def _read_json(path: Path) -> _Json:
    text = _json_text(path)
    is_coco = _COCO.search(text) is not None and _COCO_IMAGES.search(text) is not None
    return _Json(is_coco, has_boxes='"bbox"' in text)


def _json_text(path: Path) -> str:
    return read_text(path, most=1 << 32)


def _voc_folder(folder: Path, images: Path) -> Path | None:
    """Returns the folder with the Pascal VOC XML of a split; None if there is none."""
    places = (
        images,
        images.parent / "annotations",
        images.parent / "Annotations",
        folder / "annotations" / images.name,
        folder / "annotations",
        folder / "Annotations",
        images.parent / "labels",  # FiftyOne's
        folder / "labels" / images.name,
    )
    return next((place for place in places if any(map(_is_voc, place.glob("*.xml")))), None)


def _split_in(path: Path) -> str:
    """Returns the split that a part of a file's name means, as in instances_val2017.json; else ""."""
    return next(filter(None, map(split_of, re.split(r"[_.]", path.stem))), "")


def _check_one_has_all(paths: list[Path], split: str) -> None:
    """Raises UserError if any COCO JSON of a split names images that the first one does not name."""
    first = paths[0]
    others = [path for path in paths[1:] if _split_in(path) == _split_in(first)]
    names = set(_FILE_NAME.findall(_json_text(first))) if others else set()
    for path in others:
        if not names.issuperset(_FILE_NAME.findall(_json_text(path))):
            reason = f"names images that {first} does not, and both seem to be of '{split}'; join them, or write a YAML"
            raise UserError(f"{path}: {reason}")


def _is_voc(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return is_voc(read_regular(path, MAX_BYTES)[:4096])
    return False


def _voc_names(folders: Iterable[Path]) -> list[str]:
    files = [path for folder in dict.fromkeys(folders) for path in sorted(folder.glob("*.xml"))]
    names: set[str] = set()
    for path in files:
        with contextlib.suppress(OSError):  # the scan names a file that cannot be read
            names |= object_names(read_regular(path, MAX_BYTES))
    return sorted(names)


def _listed_names(folders: Iterable[Path]) -> list[str]:
    """Returns the classes that a file in ``folders`` lists; none without such a file. Raises UserError if two
    differ."""
    names_of: dict[Path, list[str]] = {}
    for folder in folders:
        lists = [path for pattern in _NAME_LISTS for path in sorted(folder.glob(pattern))]
        if lists:
            names_of[lists[0]] = [line.strip() for line in read_text(lists[0]).splitlines() if line.strip()]
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
    """Returns the classes in the notes.json that Label Studio writes next to YOLO txt; none for other files."""
    try:
        categories = json.loads(read_text(path, most=1 << 26))["categories"]
        return [str(category["name"]).strip() for category in sorted(categories, key=lambda category: category["id"])]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []


def _has_yolo_rows(images: Path) -> bool:
    """Returns whether YOLO txt files are where those of ``images`` may be. True for a list of images: the scan looks
    for their label files."""
    if images.is_file():
        return True
    for place in map(Path, label_folders(str(images))):
        for path in (*place.glob("*.[tT][xX][tT]"), *place.glob("*/*.[tT][xX][tT]")):
            with contextlib.suppress(OSError):
                if has_row(read_regular(path, MAX_BYTES)):
                    return True
    return False


def _content_summary(folder: Path, splits: dict[str, Path]) -> str:
    """Returns what a folder contains that is not a data set, and what to do with it, for a message."""
    entries = [path for each in {folder, *splits.values()} if each.is_dir() for path in sorted(each.iterdir())]
    export = first_unread_export(entries)
    if export:
        return export
    images = sum(path.suffix.lower() in IMAGE_SUFFIXES for path in entries)
    others = sorted({path.suffix.lower() for path in entries if path.is_file() and path.suffix} - IMAGE_SUFFIXES)
    folders = sorted(path.name for path in folder.iterdir() if path.is_dir())
    advice = labels_without_images(folder)
    if advice:
        return advice.removeprefix("; ")
    summary = f"{counted(images, 'image')}, {'files of ' + ', '.join(others) if others else 'no other files'}"
    if folders:
        shown = folders if len(folders) <= 5 else [*folders[:5], "..."]
        summary += f", folders {', '.join(shown)}"
    if any(_has_yolo_rows(path) for path in splits.values()):
        return f"{summary}; YOLO txt needs the names of the classes: add classes.txt with one name a line, or a YAML"
    convert = f"{COMMANDS['convert'].typed} {shlex.join([str(folder), f'{folder.name}.json'])}"
    return f"{summary}; neither a YAML, COCO JSON, Pascal VOC nor YOLO txt; for the export of another tool: {convert}"
