"""``--data FOLDER``: reads a folder without a YAML as a data set.

The splits are the folders that are named after one and have an image below; or else the lists that are; or else the
label files of one folder of images; or else all images are for training. The labels of a split are in one of the places
of `_places`. Nothing outside is read but what a list names. Any other folder is refused with the YAML to write.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from os.path import commonpath, dirname
from pathlib import Path
from typing import Any, NamedTuple

from data.folders import Folders
from data.formats.label_format import Format
from data.formats.table import CSV, FORMATS, PER_IMAGE, YOLO, format_of_file, unread_formats
from data.images.kinds import IMAGE_SUFFIXES
from data.listing import IMAGE_FOLDERS, images_below, images_of_list, rows_of_list
from data.pairing import pair, two_places
from data.spec import CLASS_KEYS, SPLITS, FilesSplit
from utils.config.yaml_files import load_yaml
from utils.errors import UserError
from utils.files.paths import relative_name
from utils.files.safe_io import read_text
from utils.strings import counted, listed

_SPLIT_NAME = re.compile(
    r"(train|val|test)(ing|val|id|idate|idation)?([-_ ]?(images?|imgs?|set|data|\d+))*", re.IGNORECASE
)
LABEL_FOLDER = "annotations"
NAME_LISTS = ("classes.txt", "obj.names", "_darknet.labels")
# Starts of the names of label files that name no split; `result` is Label Studio's.
FILE_NAMES = ("_annotations", "annotations", "instances", "labels", "result", "via")
_FILE_SUFFIXES = tuple(form.suffix for form in FORMATS if not form.is_per_image)


class _Labels(NamedTuple):
    """Labels of a split's images: a file for all, or the label files of some images in a folder."""

    path: Path | None  # as in `FilesSplit`
    label_format: Format
    files: frozenset[str]  # names


class _Source(NamedTuple):
    """A split: the folder or list of its images, their paths by name, and their labels; None without any."""

    entry: Path
    images: dict[str, str]
    labels: _Labels | None


def split_of(name: str) -> str:
    """Returns the split that a folder or file is named after, such as "val" for "Valid" or "val2017", or ""."""
    match = _SPLIT_NAME.fullmatch(name)
    return match[1].lower() if match else ""


def read_folder(folder: Path) -> tuple[Any, Path, str, dict[str, FilesSplit]]:
    """Reads the YAML in ``folder`` or, without one that names images, the folder's layout.

    Returns the unchecked content of the YAML, with class names if the labels have none; the path of the YAML or folder,
    for messages; a line for the log; and the splits, none if the YAML names them. Raises UserError, with what to write,
    if the folder is in no known layout, or in several.
    """
    folders = Folders(_unpacked(folder), is_bounded=True)
    layout = _read(folders)
    if layout is None:
        raise _refusal(folders)
    return layout


def _read(folders: Folders) -> tuple[Any, Path, str, dict[str, FilesSplit]] | None:
    """Implements `read_folder`. None: the folder is in no known layout."""
    root = folders.root
    yaml = _own_yaml(root)
    values = load_yaml(yaml, text_under=CLASS_KEYS) if yaml else {}
    # A malformed one is read, too, to say how.
    if yaml and (not isinstance(values, dict) or "names" not in values or not values.keys().isdisjoint(SPLITS)):
        return values, yaml, f"{root}: its YAML is {yaml.name}", {}
    all_images = images_below(str(root), IMAGE_SUFFIXES, folders)
    sources = _find_sources(all_images, folders)
    formats = {source.labels.label_format for source in sources.values() if source.labels}
    if len(formats) != 1:
        return None
    (label_format,) = formats
    classes = yaml
    if label_format is YOLO and not values.get("names"):
        classes = _name_list([root, *(source.entry for source in sources.values()), root / "labels"])
        values["names"] = _names_in(classes)
        if not values["names"]:
            return None
    splits: dict[str, FilesSplit] = {}
    shown = []
    any_place = next(source.labels.path for source in sources.values() if source.labels)
    for split, source in sources.items():
        labels = source.labels
        # Without label files or images, a split is refused if it is used, and one of unlabeled images is left out.
        if labels or label_format is YOLO or not source.images:
            splits[split] = FilesSplit((source.entry,), labels.path if labels else any_place, label_format)
        place = f"{len(labels.files):,} label files" if labels else "no labels"
        if labels and labels.path:
            place = "labels beside" if labels.path == source.entry else relative_name(labels.path, root)
        shown.append(f"{split} {relative_name(source.entry, root)} ({place})")
    shown.append(f"classes of {relative_name(classes, root) if classes else 'the labels'}")
    note = f"{root}: {label_format.title}: {', '.join(shown)}{_not_used(sources.values(), all_images, folders)}"
    return values, root, note, splits


def _unpacked(folder: Path) -> Path:
    """Returns the innermost folder that contains everything in ``folder``."""
    while True:
        inside = [path for path in folder.iterdir() if not path.name.startswith((".", "__MACOSX"))]
        if len(inside) != 1 or not inside[0].is_dir():
            return folder
        if split_of(inside[0].name) or inside[0].name.lower() in IMAGE_FOLDERS:
            return folder
        folder = inside[0]


def _own_yaml(folder: Path) -> Path | None:
    """Returns the YAML that describes the data of a folder: one named like a data set, or else the only one with a
    split or names. Raises UserError if there are several."""
    describing = []
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in (".yaml", ".yml") and path.name[0] != ".":
            if path.stem in ("data", "dataset", folder.name):
                return path
            with contextlib.suppress(UserError):  # malformed, as YAMLs of other programs may be
                values = load_yaml(path)
                if isinstance(values, dict) and not values.keys().isdisjoint((*SPLITS, "names")):
                    describing.append(path)
    if len(describing) > 1:
        names = ", ".join(path.name for path in describing)
        raise UserError(f"data set {folder}: several YAMLs describe a data set: {names}; name one of them")
    return describing[0] if describing else None


# Images


def _find_sources(all_images: Mapping[str, str], folders: Folders) -> dict[str, _Source]:
    """Returns the images and labels of each split. ``all_images``: those below the folder. Lists count if no folder
    that is named after a split has labels: they may be those of another export or of a part of a folder."""
    sources: dict[str, _Source] = {}
    for entries in (_split_folders(all_images, folders), _split_lists(folders)):
        found = {split: _source_of(split, entry, all_images, folders) for split, entry in entries.items()}
        sources = found or sources
        if any(source.labels for source in found.values()):
            return sources
    if sources:
        return sources
    entry = _image_folder(folders.root, folders)
    files = [path for place in _places(entry, folders) for path in _label_files(place, folders)]
    splits = {_split_in(file) for file in files if _split_in(file) and format_of_file(file)} or {"train"}
    return {split: _source_of(split, entry, all_images, folders) for split in SPLITS if split in splits}


def _split_folders(all_images: Mapping[str, str], folders: Folders) -> dict[str, Path]:
    """Returns the folder of the images of each split: below it is an image, and no other folder of a split."""
    with_image = map(Path, dict.fromkeys(map(dirname, all_images.values())))
    above = dict.fromkeys(path for folder in with_image for path in (folder, *folder.parents))
    named = [path for path in above if folders.root in path.parents and split_of(path.name)]
    lowest = sorted(path for path in named if not any(path in other.parents for other in named))
    return _by_split({path: split_of(path.name) for path in lowest}, folders)


def _split_lists(folders: Folders) -> dict[str, Path]:
    """Returns the list of the images of each split: a .txt file that is named after one and names an image."""
    paths = sorted((*folders.root.glob("*.txt"), *folders.root.glob("ImageSets/Main/*.txt")))
    lists = {path: split_of(path.stem) for path in paths if split_of(path.stem)}
    if any(path.stem == "train" for path in lists):  # Pascal VOC's trainval.txt names the images of both splits
        lists = {path: split for path, split in lists.items() if path.stem != "trainval"}
    return _by_split({path: split for path, split in lists.items() if _names_images(path, folders)}, folders)


def _names_images(path: Path, folders: Folders) -> bool:
    """Returns whether a .txt file is a list of images, and not notes or the label file of an image beside it."""
    if any(path.with_suffix(suffix).exists() for suffix in IMAGE_SUFFIXES):
        return False
    with contextlib.suppress(UserError):  # it is no text
        return any(paths for _, _, paths in rows_of_list(path, IMAGE_SUFFIXES, folders))
    return False


def _by_split(split_of_path: dict[Path, str], folders: Folders) -> dict[str, Path]:
    """Returns the folder of images in a folder, or a list, by split. Raises UserError if a split
    has two."""
    found: dict[str, Path] = {}
    for path, split in split_of_path.items():
        entry = _image_folder(path, folders)
        other = found.setdefault(split, entry)
        if not other.samefile(entry):
            reason = f"{other} and {entry} are both '{split}'"
            raise UserError(f"data set {folders.root}: {reason}; rename one, or write a YAML with 'train:' and 'val:'")
    return {split: found[split] for split in SPLITS if split in found}


def _image_folder(path: Path, folders: Folders) -> Path:
    """Returns the folder of images in the folder of a split or data set, or ``path`` itself."""
    names = (folders.find(str(path), name) for name in IMAGE_FOLDERS)
    return next((path / name for name in names if name and (path / name).is_dir()), path)


# Labels


def _source_of(split: str, entry: Path, all_images: Mapping[str, str], folders: Folders) -> _Source:
    """Returns the images in a folder or of a list with their labels. Raises UserError if several places have labels
    (rule D1)."""
    if entry.is_dir():
        images = {name: path for name, path in all_images.items() if path.startswith(f"{entry}{os.sep}")}
    else:
        images = images_of_list(entry, IMAGE_SUFFIXES, folders, [])
    found = _labels_of(split, entry, images, folders)
    if len(found) > 1:  # a CSV may be a table of the others, as of TensorFlow's xml_to_csv.py
        found = [labels for labels in found if labels.label_format is not CSV]
    if len(found) > 1:
        places = [(labels.path or entry, labels.label_format, len(labels.files)) for labels in found]
        raise two_places(f"data set {folders.root}: '{split}'", split, [entry], places, folders.root)
    return _Source(entry, images, found[0] if found else None)


def _labels_of(split: str, entry: Path, images: Mapping[str, str], folders: Folders) -> list[_Labels]:
    """Returns the labels of ``images`` in each place that has some."""
    labels: list[_Labels] = []
    places = _places(entry, folders)
    for label_format in PER_IMAGE:
        for place in [None] if label_format is YOLO else places:
            source = FilesSplit((entry,), place, label_format)
            label_of, _ = pair(images, source, split, folders, named_by=str(folders.root))
            files = frozenset(label_of.values())
            if files and not any(files <= other.files for other in labels):
                labels.append(_Labels(place, label_format, files))
    stems = {os.path.splitext(os.path.basename(name))[0] for name in images}
    for place in places:
        # A file that is called like an image has its labels alone.
        paths = [path for path in _label_files(place, folders) if path.stem not in stems]
        of_split = [path for path in paths if _split_in(path) == split]
        of_all = [path for path in paths if not _split_in(path)]
        of_all = [path for path in of_all if path.suffix == ".csv" or path.name.startswith(FILE_NAMES)]
        for candidates in (of_split, of_all):
            formats = {path: found for path in candidates if (found := format_of_file(path))}
            # COCO also has captions and keypoints of the same images.
            formats = {path: formats[path] for path in formats if path.name.startswith("instances")} or formats
            if formats:
                return labels + [_Labels(path, form, frozenset([str(path)])) for path, form in formats.items()]
    return labels


def _places(entry: Path, folders: Folders) -> list[Path]:
    """Returns the folders of a data set in which the labels of a split's images may be: beside them, in the folder of
    the split, in a folder of annotations, and at the top."""
    root = folders.root
    split_folder = entry.parent if entry.name.lower() in IMAGE_FOLDERS else entry
    above = [folder for folder in (split_folder.parent, root) if folder.is_relative_to(root)]
    annotations = [folder / name for folder in above if (name := folders.find(str(folder), LABEL_FOLDER))]
    of_split = [place / split_folder.name for place in annotations]
    places = dict.fromkeys([entry, split_folder, *of_split, *annotations, root])
    return [place for place in places if place.is_dir() and place.is_relative_to(root)]


def _label_files(place: Path, folders: Folders) -> list[Path]:
    """Returns the files in a folder that may label all images."""
    return [place / name for name in folders.entries(str(place)) if name.lower().endswith(_FILE_SUFFIXES)]


def _split_in(path: Path) -> str:
    """Returns the split that a file's name contains, as in instances_val2017.json, or ""."""
    return next(filter(None, map(split_of, re.split(r"[-_.]", path.stem))), "")


def _not_used(sources: Iterable[_Source], all_images: Mapping[str, str], folders: Folders) -> str:
    """Returns the part of the log line about folders whose images have labels and are in no split."""
    used_images = {dirname(path) for source in sources for path in source.images.values()}
    used_files = {name for source in sources if source.labels for name in source.labels.files}
    unused: dict[str, dict[str, str]] = defaultdict(dict)
    for name, path in all_images.items():
        if dirname(path) not in used_images:
            unused[dirname(path)][name] = path
    named = []
    for folder, images in unused.items():
        with contextlib.suppress(UserError):
            labels = _labels_of("train", Path(folder), images, folders)
            if count := len({name for of_place in labels for name in of_place.files} - used_files):
                named.append(f"{relative_name(folder, folders.root)} (its label files: {count:,})")
    return f"; not used: {listed(named)}" if named else ""


def _name_list(places: Iterable[Path]) -> Path | None:
    """Returns the first list of class names in ``places``."""
    return next((place / name for place in places for name in NAME_LISTS if (place / name).is_file()), None)


def _names_in(name_list: Path | None) -> list[str]:
    return [line.strip() for line in read_text(name_list).splitlines() if line.strip()] if name_list else []


def _refusal(folders: Folders) -> UserError:
    """Returns the error about a folder in no layout: what is not read, the data set one level down, or the YAML to
    write. Without labels in their places, it names the folders that have the most images and the most label files
    called like images."""
    root = folders.root
    message = f"data set {root}: in no layout that --data FOLDER reads (docs/formats.md)"
    if unread := unread_formats(str(root), folders):
        return UserError(message + unread)
    for path in sorted(path for path in root.iterdir() if path.is_dir() and path.name[0] != "."):
        with contextlib.suppress(UserError):
            if _read(Folders(_unpacked(path), is_bounded=True)):
                return UserError(f"{message}; {path} is a data set: --data {shlex.quote(str(path))}")
    all_images = images_below(str(root), IMAGE_SUFFIXES, folders)
    sources = _find_sources(all_images, folders)
    if all_images and any(source.entry == root and not source.labels for source in sources.values()):
        # nothing is named after a split
        ((most, _),) = Counter(map(dirname, all_images.values())).most_common(1)
        images = {name: path for name, path in all_images.items() if dirname(path) == most}
        sources = {"train": _Source(Path(most), images, None)}
    lines = [f"'path: {root}'"]
    name_lists = [root]
    places: dict[str, list[str]] = {}  # by key of the YAML
    num_files: Counter[str] = Counter()
    for split, source in sources.items():
        lines.append(f"'{split}: {relative_name(source.entry, root)}'")
        name_lists.append(source.entry)
        labels = source.labels or _most_label_files(source, folders)
        if labels and labels.path:
            key = "labels" if labels.label_format is YOLO else "annotations"
            places.setdefault(key, []).append(f"{split}: {relative_name(labels.path, root)}")
            num_files[key] += len(labels.files)
            name_lists.append(labels.path)
    lines += [f"'{key}: {{{', '.join(places[key])}}}' ({counted(num_files[key], 'file')})" for key in places]
    if "annotations" not in places:
        names = _names_in(_name_list(name_lists))
        lines.append(f"'names: [{', '.join(names) or '<class>, ...'}]'")
    return UserError(f"{message}; write a YAML with {', '.join(lines)}")


def _most_label_files(source: _Source, folders: Folders) -> _Labels | None:
    """Returns the most label files of one format in a folder that are called like the images of a split; of equal
    numbers, those nearest to its folder or list."""
    stems = {Path(name).stem for name in source.images}
    names: dict[tuple[str, Format], set[str]] = defaultdict(set)
    for folder in folders.walk(str(folders.root), skips_unlisted=True):
        for name in folders.entries(folder):
            for label_format in PER_IMAGE:
                if name.lower().endswith(label_format.suffix) and name[: -len(label_format.suffix)] in stems:
                    names[folder, label_format].add(name)
    if not names:
        return None
    folder, label_format = max(names, key=lambda key: (len(names[key]), len(commonpath([key[0], source.entry]))))
    return _Labels(Path(folder), label_format, frozenset(names[folder, label_format]))
