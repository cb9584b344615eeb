"""``--data FOLDER``: reads a folder without a YAML as a data set.

The splits are the folders that are named after one and have an image below; or else the lists that are; or else the
label files of one folder of images; or else all images are for training. The labels of a split are in one of the places
of `_places`. Nothing outside is read but what a list names. Any other folder is refused with the YAML to write.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from os.path import commonpath
from pathlib import Path
from typing import Any, NamedTuple

from data.folders import Folders
from data.formats.label_format import Format
from data.formats.table import CSV, FORMATS, PER_IMAGE, YOLO, format_of_file
from data.formats.unread import unread_formats
from data.images.kinds import IMAGE_SUFFIXES
from data.listing import SplitImages, folder_of, images_below, images_of_list
from data.pairing import pair
from data.spec import CLASS_KEYS, SPLITS, FilesSplit
from utils.config.yaml_files import load_yaml
from utils.errors import UserError
from utils.files.paths import relative_name
from utils.files.safe_io import read_text
from utils.strings import counted, listed

_SPLIT_NAME = re.compile(
    r"(train|val|test)(ing|val|id|idate|idation)?([-_ ]?(images?|imgs?|set|data|\d+))*", re.IGNORECASE
)
_IMAGE_FOLDERS = ("images", "JPEGImages", "Images")
_LABEL_FOLDERS = ("annotations", "Annotations")
_NAME_LISTS = ("classes.txt", "obj.names", "_darknet.labels")
_FILE_SUFFIXES = tuple(form.suffix for form in FORMATS if not form.is_per_image)
# Starts of the names of label files that name no split; `result` is Label Studio's.
_FILE_NAMES = ("_annotations", "annotations", "instances", "labels", "result", "via")


def split_of(name: str) -> str:
    """Returns the split that a folder or file is named after, such as "val" for "Valid" or "val2017", or ""."""
    match = _SPLIT_NAME.fullmatch(name)
    return match[1].lower() if match else ""


class _Labels(NamedTuple):
    """Labels of a split's images: a file for all, or the label files of some images in a folder."""

    path: Path | None  # as in `FilesSplit`
    label_format: Format
    names: frozenset[str]  # of the files

    @property
    def key(self) -> str:
        """The key of a YAML that names them."""
        return "labels" if self.label_format is YOLO else "annotations"

    def line(self, root: Path) -> str:
        """Returns the line of a YAML that names them."""
        return f"'{self.key}: {relative_name(self.path, root)}'" if self.path else "no 'annotations:'"


class _Source(NamedTuple):
    """A split: the folder or list of its images, and their labels; None without any."""

    images: Path
    labels: _Labels | None
    folders: frozenset[str]  # of the images


def read_folder(folder: Path, *, explains: bool = True) -> tuple[Any, Path, str]:
    """Reads the YAML in ``folder`` or, without one that names images, the folder's layout.

    Returns the content of the YAML, unchecked, or values as in one, with paths as Path; the YAML or the folder, for
    messages; and a line for the log. Raises UserError if the folder is in no known layout, or in several, and
    ``explains`` what to write.
    """
    folder = _unpacked(folder)
    yaml = _own_yaml(folder)
    values = load_yaml(yaml, text_under=CLASS_KEYS) if yaml else {}
    # A malformed one is read, too, to say how.
    if yaml and (not isinstance(values, dict) or "names" not in values or not values.keys().isdisjoint(SPLITS)):
        return values, yaml, f"{folder}: its YAML is {yaml.name}"
    folders = Folders(folder)
    sources = _find_sources(folders)
    labels_of = {split: source.labels for split, source in sources.items() if source.labels}
    formats = {labels.label_format for labels in labels_of.values()}
    if len(formats) != 1:
        raise _refusal(sources, folders, explains=explains)
    (label_format,) = formats
    images = {split: source.images for split, source in sources.items()}
    name_list: Path | None = None
    if label_format is YOLO:  # a split without label files is refused if it is used
        name_list = _name_list([folder, *images.values(), folder / "labels"])
        values["names"] = values.get("names") or _names_in(name_list)
        if not values["names"]:
            raise _refusal(sources, folders, explains=explains)
    else:
        values["annotations"] = {split: labels.path for split, labels in labels_of.items()}
        images = {split: images[split] for split in labels_of}
    classes = yaml or name_list
    shown = []
    for split, source in sources.items():
        place = source.labels.path or f"{len(source.labels.names):,} label files" if source.labels else "no labels"
        if isinstance(place, Path):
            place = "labels beside" if place == source.images else relative_name(place, folder)
        shown.append(f"{split} {relative_name(source.images, folder)} ({place})")
    shown.append(f"classes of {relative_name(classes, folder) if classes else 'the labels'}")
    note = f"{folder}: {label_format.title}: {', '.join(shown)}{_not_used(sources.values(), folders)}"
    return values | {"path": folder} | images, folder, note


def _unpacked(folder: Path) -> Path:
    """Returns the innermost folder that contains everything in ``folder``."""
    while True:
        inside = [path for path in folder.iterdir() if not path.name.startswith((".", "__MACOSX"))]
        if len(inside) != 1 or not inside[0].is_dir() or split_of(inside[0].name) or inside[0].name in _IMAGE_FOLDERS:
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


def _find_sources(folders: Folders) -> dict[str, _Source]:
    """Returns the images and labels of each split. Lists that name an image count if no folder that is named after a
    split has labels: they may be those of another export or of a part of a folder."""
    sources: dict[str, _Source] = {}
    for images_of in (_split_folders(folders), _split_lists(folders.root)):
        listed_sources = {split: _source_of(split, images, folders) for split, images in images_of.items()}
        found = {split: source for split, source in listed_sources.items() if source.folders}
        sources = found or sources
        if any(source.labels for source in found.values()):
            return sources
    if sources:
        return sources
    images = _image_folder(folders.root)
    files = [path for place in _places(images, folders.root) for path in _label_files(place, folders)]
    splits = {_split_in(file) for file in files if _split_in(file) and format_of_file(file)} or {"train"}
    return {split: _source_of(split, images, folders) for split in SPLITS if split in splits}


def _split_folders(folders: Folders) -> dict[str, Path]:
    """Returns the folder of the images of each split: below it is an image, and no other folder of a split."""
    with_image = map(Path, _folders_with_images(folders))
    above = dict.fromkeys(path for folder in with_image for path in (folder, *folder.parents))
    named = [path for path in above if path.is_relative_to(folders.root) and path != folders.root]
    named = [path for path in named if split_of(path.name)]
    lowest = [path for path in named if not any(path in other.parents for other in named)]
    return _by_split(folders.root, {path: path.name for path in sorted(lowest)})


def _folders_with_images(folders: Folders) -> list[str]:
    """Returns the folders of a data set that have an image."""
    found = images_below(str(folders.root), IMAGE_SUFFIXES, folders)
    return [found.folders[prefix] for prefix in dict.fromkeys(map(folder_of, found.stamps))]


def _split_lists(folder: Path) -> dict[str, Path]:
    """Returns the list of the images of each split. Raises UserError if a split has two."""
    paths = sorted((*folder.glob("*.txt"), *folder.glob("ImageSets/Main/*.txt")))
    return _by_split(folder, {path: path.stem for path in paths if split_of(path.stem) and _is_list(path)})


def _is_list(path: Path) -> bool:
    """Returns whether a .txt file named after a split is its list, and not the label file of an image beside it, or
    Pascal VOC's trainval.txt beside train.txt."""
    if path.name == "trainval.txt" and path.with_name("train.txt").exists():
        return False
    return path.stat().st_size > 0 and not any(path.with_suffix(suffix).exists() for suffix in IMAGE_SUFFIXES)


def _by_split(folder: Path, names: dict[Path, str]) -> dict[str, Path]:
    """Returns the images in a folder, or a list, by the split after which it is named. ``names``: by folder or list."""
    found: dict[str, Path] = {}
    for path, name in names.items():
        images = _image_folder(path)
        other = found.setdefault(split_of(name), images)
        if not other.samefile(images):
            reason = f"{other} and {images} are both '{split_of(name)}'"
            raise UserError(f"data set {folder}: {reason}; rename one, or write a YAML with 'train:' and 'val:'")
    return {split: found[split] for split in SPLITS if split in found}


def _image_folder(path: Path) -> Path:
    """Returns the folder of images in the folder of a split or data set, or ``path`` itself."""
    return next((path / name for name in _IMAGE_FOLDERS if (path / name).is_dir()), path)


# Labels


def _source_of(split: str, images: Path, folders: Folders) -> _Source:
    """Returns ``images``, a folder or list, with their labels. Raises UserError if several places have labels (D1)."""
    found_images = _list_images(images, folders)
    found = _labels_of(split, images, found_images, folders)
    if len(found) > 1:  # a CSV may be a table of the others, as of TensorFlow's xml_to_csv.py
        found = [labels for labels in found if labels.label_format is not CSV]
    if len(found) > 1:
        root = folders.root
        lines = [f"{labels.line(root)} ({labels.label_format.title}: {len(labels.names)})" for labels in found]
        raise UserError(
            f"data set {root}: '{split}' has labels in {len(found)} places; keep one, or write a YAML with "
            f"'path: {root}', '{split}: {relative_name(images, root)}', and {' or '.join(lines)}"
        )
    return _Source(images, found[0] if found else None, frozenset(found_images.folders.values()))


def _labels_of(split: str, images: Path, found_images: SplitImages, folders: Folders) -> list[_Labels]:
    """Returns the labels of ``found_images``, those of ``images``, in each place that has some."""
    labels: list[_Labels] = []
    for label_format in PER_IMAGE:
        for place in [None] if label_format is YOLO else _places(images, folders.root):
            names = _paired(split, found_images, FilesSplit((images,), place, label_format), folders)
            if names and not any(names <= other.names for other in labels):
                labels.append(_Labels(place, label_format, names))
    stems = {name.rpartition("/")[2].rpartition(".")[0] for name in found_images.stamps}
    for place in _places(images, folders.root):
        # A file that is called like an image has its labels alone.
        files = [path for path in _label_files(place, folders) if path.stem not in stems]
        of_split = [path for path in files if _split_in(path) == split]
        of_all = [path for path in files if not _split_in(path)]
        of_all = [path for path in of_all if path.suffix == ".csv" or path.name.startswith(_FILE_NAMES)]
        candidates = _known_formats(of_split) or _known_formats(of_all)
        # COCO also has captions and keypoints of the same images.
        candidates = {path: candidates[path] for path in candidates if path.name.startswith("instances")} or candidates
        if candidates:
            return labels + [_Labels(path, form, frozenset([str(path)])) for path, form in candidates.items()]
    return labels


def _list_images(images: Path, folders: Folders) -> SplitImages:
    """Returns the images in a folder or of a list; none of a list that cannot be read."""
    if images.is_dir():
        return images_below(str(images), IMAGE_SUFFIXES, folders)
    with contextlib.suppress(UserError):
        return images_of_list(images, IMAGE_SUFFIXES, folders)
    return SplitImages()


def _paired(split: str, found_images: SplitImages, source: FilesSplit, folders: Folders) -> frozenset[str]:
    """Returns the names of the label files of a split's images."""
    root = str(folders.root)
    return frozenset(pair(found_images, source, split, folders, named_by=root, is_bounded=True).used)


def _places(images: Path, root: Path) -> list[Path]:
    """Returns the folders below ``root`` in which the labels of ``images`` may be: beside them, in the folder of their
    split, in a folder of annotations, and in ``root``."""
    split_folder = images.parent if images.name in _IMAGE_FOLDERS else images
    annotations = [parent / name for parent in (split_folder.parent, root) for name in _LABEL_FOLDERS]
    of_split = [place / split_folder.name for place in annotations]
    places = dict.fromkeys([images, split_folder, *of_split, *annotations, root])
    return [place for place in places if place.is_dir() and place.is_relative_to(root)]


def _label_files(place: Path, folders: Folders) -> list[Path]:
    """Returns the files in a folder that may label all images."""
    return [place / name for name in folders.entries(str(place)) if name.lower().endswith(_FILE_SUFFIXES)]


def _known_formats(files: Iterable[Path]) -> dict[Path, Format]:
    """Returns the formats of those of ``files`` that have one."""
    formats = {path: format_of_file(path) for path in files}
    return {path: label_format for path, label_format in formats.items() if label_format}


def _split_in(path: Path) -> str:
    """Returns the split that a file's name contains, as in instances_val2017.json, or ""."""
    return next(filter(None, map(split_of, re.split(r"[-_.]", path.stem))), "")


def _not_used(sources: Iterable[_Source], folders: Folders) -> str:
    """Returns the part of the log line about folders whose images have labels and are in no split."""
    used_images = {folder for source in sources for folder in source.folders}
    used_labels = {name for source in sources if source.labels for name in source.labels.names}
    unused = []
    for folder in _folders_with_images(folders):
        if folder not in used_images:
            with contextlib.suppress(UserError):
                found_images = images_below(folder, IMAGE_SUFFIXES, folders)
                labels = _labels_of("train", Path(folder), found_images, folders)
                count = len({name for of_place in labels for name in of_place.names} - used_labels)
                if count:
                    unused.append(f"{relative_name(folder, folders.root)} (its label files: {count:,})")
    return f"; not used: {listed(unused)}" if unused else ""


def _name_list(places: Iterable[Path]) -> Path | None:
    """Returns the first list of class names in ``places``."""
    return next((place / name for place in places for name in _NAME_LISTS if (place / name).is_file()), None)


def _names_in(name_list: Path | None) -> list[str]:
    return [line.strip() for line in read_text(name_list).splitlines() if line.strip()] if name_list else []


def _refusal(sources: Mapping[str, _Source], folders: Folders, *, explains: bool) -> UserError:
    """Returns the error about a folder in no layout: what is not read, the data set one level down, or the YAML to
    write. Without labels in their places, it names the folders that have the most images and the most label files
    called like images."""
    root = folders.root
    message = f"data set {root}: in no layout that --data FOLDER reads (docs/formats.md)"
    unread = unread_formats(str(root), folders) if explains else ""
    if unread or not explains:
        return UserError(message + unread)
    for path in sorted(path for path in root.iterdir() if path.is_dir() and path.name[0] != "."):
        with contextlib.suppress(UserError):
            read_folder(path, explains=False)
            return UserError(f"{message}; {path} is a data set: --data {shlex.quote(str(path))}")
    images_of = {split: source.images for split, source in sources.items()}
    labels_of = {split: source.labels for split, source in sources.items() if source.labels}
    found = _list_images(root, folders)
    if found.stamps and not labels_of:
        if root in images_of.values():  # nothing is named after a split
            (most, _), *_ = Counter(map(folder_of, found.stamps)).most_common(1)
            images_of = {"train": Path(found.folders[most])}
        likely = {split: _most_label_files(images, folders) for split, images in images_of.items()}
        labels_of = {split: labels for split, labels in likely.items() if labels}
    lines = [f"'path: {root}'", *(f"'{split}: {relative_name(path, root)}'" for split, path in images_of.items())]
    places: dict[str, dict[str, str]] = defaultdict(dict)  # of labels, by key of the YAML and split
    for split, labels in labels_of.items():
        if labels.path:
            places[labels.key][split] = relative_name(labels.path, root)
    for key, place_of in places.items():
        is_same = len(place_of) == len(images_of) and len({*place_of.values()}) == 1
        place = next(iter(place_of.values())) if is_same else f"{{{', '.join(map(': '.join, place_of.items()))}}}"
        num_files = sum(len(labels_of[split].names) for split in place_of)
        lines.append(f"'{key}: {place}' ({counted(num_files, 'file')})")
    formats = {labels.label_format for labels in labels_of.values()}
    if YOLO in formats or not formats:
        label_folders = [labels.path for labels in labels_of.values() if labels.path]
        classes = _names_in(_name_list([root, *label_folders, *images_of.values()])) or ["<class>", "..."]
        lines.append(f"'names: [{', '.join(classes)}]'")
    return UserError(f"{message}; write a YAML with {', '.join(lines)}")


def _most_label_files(images: Path, folders: Folders) -> _Labels | None:
    """Returns the most label files of one format in a folder that are called like the images of a split; of equal
    numbers, those nearest to ``images``, its folder or list."""
    stems = {Path(name).stem for name in _list_images(images, folders).stamps}
    names: dict[tuple[str, Format], set[str]] = defaultdict(set)
    for folder in folders.walk(str(folders.root), skips_unlisted=True):
        for name in folders.entries(folder):
            for label_format in PER_IMAGE:
                if name.lower().endswith(label_format.suffix) and name[: -len(label_format.suffix)] in stems:
                    names[folder, label_format].add(name)
    if not names:
        return None
    folder, label_format = max(names, key=lambda key: (len(names[key]), len(commonpath([key[0], images]))))
    return _Labels(Path(folder), label_format, frozenset(names[folder, label_format]))
