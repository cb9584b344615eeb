"""Reads data set YAMLs in the format of YOLOv5 and Ultralytics. Nothing is downloaded or run.

Keys: ``path`` (the data set's folder, relative to the YAML's folder or else to the current one; default: the YAML's
folder), ``train`` / ``val`` / ``test`` (a folder, a .txt list of images, or a list of these; or YAMLs of other data
sets, whose splits of this name are joined), ``names`` (list or map), ``nc`` (checked against the names), and
extensions: ``annotations``, label files for all images or folders of a file for each (`data.formats`), and ``labels``,
folders of YOLO txt, each by split or for all; ``classes``, a map that renames or merges classes, or turns their boxes
into ignore regions; ``ignore``, a list of classes with ignore regions; ``channels`` and ``bits`` of the images
(`PixelFormat`); ``tile``, the side of the tiles that large images are cut into.
"""

from __future__ import annotations

import operator
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from data.formats.label_format import Format
from data.formats.table import YOLO, format_of
from data.images.shards import is_shard_path
from data.labels import class_names_in
from data.layouts import read_folder
from data.spec import CLASS_KEYS, IGNORE, IGNORED, SPLITS, DatasetSpec, FilesSplit, JoinedSplit, ShardSplit, Split
from utils.config.yaml_files import load_yaml
from utils.errors import UserError, one_line
from utils.files.paths import normal_path
from utils.pixels import PixelFormat
from utils.program_folders import CONFIGS
from utils.schema import Bounds, bounded_repr, check, suggestion
from utils.strings import listed

YAML_FOLDER = CONFIGS / "data"  # YAMLs of public data sets
MIN_TILE = 32  # pixels
_FOR_MISSING_DATA = ("download", "url", "license")  # quoted by messages about missing data
_KEYS = (*SPLITS, "path", "names", "nc", "classes", "ignore", "annotations", "labels", "channels", "bits", "tile")


def load_dataset_spec(path: str | Path, known_root: str = "", *, is_joined: bool = False) -> DatasetSpec:
    """Reads and checks a data set YAML or folder. Raises UserError that names the file and the key. ``known_root``: see
    `DataSource`; ``is_joined``: whether another YAML joins this one."""
    path = Path(path)
    notes: list[str] = []
    splits: dict[str, Split] = {}
    if path.is_dir():
        values, path, note, found = read_folder(normal_path(path))
        notes.append(note)
        splits.update(found)
    elif is_yaml(path):
        values = load_yaml(path, text_under=CLASS_KEYS)
    else:
        raise UserError(f"{path}: expected a data set's .yaml file, or its folder")
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected keys (path, train, val, names), got {type(values).__name__}")
    if "kpt_shape" in values:
        raise UserError(f"{path}: 'kpt_shape' declares a data set of keypoints; only bounding boxes are supported")
    if "val" not in values:  # as Ultralytics reads it
        values = {"val" if key == "validation" else key: value for key, value in values.items()}
    unused = [one_line(str(key))[:60] for key in values if key not in (*_KEYS, *_FOR_MISSING_DATA)]
    if unused:
        notes.append(f"{path}: not used: {listed(unused, 12)}")
    pixels = PixelFormat.checked(values.get("channels", 3), values.get("bits", 8), str(path))
    tile = check(values.get("tile"), Annotated[int, Bounds(MIN_TILE)] | None, f"{path}: tile") or 0
    root = path
    if not splits:
        root = resolve_root(values.get("path"), path, known_root)
        splits = _read_splits(values, path, root, is_joined=is_joined)
    parts = [part for split in splits.values() if isinstance(split, JoinedSplit) for part in split.parts]
    for part in parts:
        notes += part.notes
        if part.pixels != pixels:
            raise UserError(f"{path}: has images of {pixels}, but {part.source} of {part.pixels}; make them agree")
        if part.tile not in (0, tile):
            raise UserError(f"{path}: joins {part.source}, which has 'tile: {part.tile}'; add 'tile: {part.tile}' here")
    label_names = _read_names(values, splits, parts, path)
    names, class_of = _read_classes(values, label_names, path)
    return DatasetSpec(
        names=names,
        root=root,
        splits=splits,
        source=str(path),
        if_missing=_advice_if_missing(values, path),
        label_names=label_names if class_of else (),
        class_of=class_of,
        notes=tuple(dict.fromkeys(notes)),
        pixels=pixels,
        tile=tile,
    )


def is_yaml(path: str | Path) -> bool:
    """Returns whether a path has the suffix of a YAML."""
    return str(path).lower().endswith((".yaml", ".yml"))


# Paths


def resolve_root(value: Any, yaml_path: Path, known_root: str) -> Path:
    """Returns the data set's folder for the value of the key ``path``. ``known_root``: see `DataSource`."""
    yaml_folder = yaml_path.absolute().parent
    if value is None or (isinstance(value, str) and not value.strip()):
        return normal_path(yaml_folder)
    path = checked_path(value, f"{yaml_path}: path")
    candidates = [yaml_folder / path, Path.cwd() / path]
    if known_root and not path.is_absolute():
        candidates.append(Path(known_root))
    for candidate in candidates:
        if os.path.isdir(candidate):
            return normal_path(candidate)
    # The YAMLs of public data sets name folders below the current one.
    return normal_path(candidates[1 if yaml_folder == YAML_FOLDER else 0])


def checked_path(value: Any, location: str) -> Path:
    """Returns the path that a YAML entry names; ``\\`` is ``/``."""
    text = check(value, str, location).strip()
    if not text:
        raise UserError(f"{location}: an entry is empty; name a folder, or remove it")
    if one_line(text) != text:
        raise UserError(f"{location}: {text!r}: in double quotes, \\ begins an escape: write / or leave out the quotes")
    return Path(os.path.expanduser(text.replace("\\", "/")))


def _resolve(value: Any, root: Path, location: str) -> Path:
    """Returns the absolute path of an entry. Roboflow writes ``../train/images`` for a folder beside the YAML,
    which counts even if the parent has such a folder, too."""
    path = checked_path(value, location)
    if path.parts[:1] == ("..",) and path.parts[1:2] != ("..",):
        beside = root.joinpath(*path.parts[1:])
        if os.path.exists(beside):
            path = beside
    return normal_path(root / path)


# Splits


def _read_splits(values: dict[str, Any], path: Path, root: Path, *, is_joined: bool) -> dict[str, Split]:
    """Reads the splits and their labels. Raises UserError if there is no split, or labels of a split without images."""
    entries_of: dict[str, list[Any]] = {}
    for split in SPLITS:
        if values.get(split) not in (None, "", []):
            entries_of[split] = values[split] if isinstance(values[split], list) else [values[split]]
    if not entries_of:
        raise UserError(f"{path}: names no images; add 'train: <folder>' and 'val: <folder>'")
    labels_of = _read_labels(values, entries_of, path, root)
    splits: dict[str, Split] = {}
    for split, entries in entries_of.items():
        location = f"{path}: {split}"
        if any(isinstance(entry, str) and is_yaml(entry) for entry in entries):
            if split in labels_of:
                raise UserError(f"{location}: joins other data sets; 'annotations' belong in their YAMLs")
            if is_joined:
                raise UserError(f"{location}: joins data sets itself; name those in its place")
            splits[split] = _read_joined_split(entries, split, path, root)
            continue
        images = tuple(_resolve(entry, root, location) for entry in entries)
        shards = [image for image in images if is_shard_path(image)]
        if shards and (len(images) > 1 or split in labels_of):
            raise UserError(f"{location}: {shards[0]} has labels of its own, and must be the only entry")
        annotations, label_format = labels_of.get(split, (None, YOLO))
        splits[split] = ShardSplit(shards[0]) if shards else FilesSplit(images, annotations, label_format)
    return splits


def _read_labels(
    values: Mapping[str, Any], splits: Collection[str], path: Path, root: Path
) -> dict[str, tuple[Path, Format]]:
    """Returns the labels of ``splits`` that ``annotations`` and ``labels`` name, a map or one path for all splits, with
    their formats."""
    found: dict[str, tuple[Path, Format]] = {}
    formats: dict[Path, Format | None] = {}
    for key in ("annotations", "labels"):
        location = f"{path}: {key}"
        value = values.get(key) or {}
        by_split = dict.fromkeys(splits, value) if isinstance(value, str) else check(value, dict, location)
        for split, entry in by_split.items():
            if split not in SPLITS:
                raise UserError(f"{location}: unknown split '{split}'{suggestion(str(split), SPLITS)}")
            if split not in splits:
                raise UserError(f"{location}: names '{split}', but there is no '{split}: <folder of its images>'")
            if entry is None:
                continue
            if split in found:
                raise UserError(f"{path}: {split}: has 'annotations' and 'labels'; remove one of the two")
            labels = _resolve(entry, root, f"{location}: {split}")
            if labels not in formats:
                formats[labels] = YOLO if key == "labels" else format_of(labels)
            label_format = formats[labels]
            if label_format is None:
                expected = "neither a .json, .xml or .csv file nor a folder of label files"
                raise UserError(f"{location}: {split}: {labels}: {expected}")
            found[split] = labels, label_format
    return found


def _read_joined_split(entries: Sequence[Any], split: str, path: Path, root: Path) -> JoinedSplit:
    """Reads the YAMLs of the data sets that a split joins. Raises UserError if it joins a data set twice, or one that
    joins others itself."""
    location = f"{path}: {split}"
    parts: dict[str, DatasetSpec] = {}
    for entry in entries:
        part_path = _resolve(entry, root, location)
        if not is_yaml(part_path) or not part_path.is_file():
            raise UserError(f"{location}: {part_path}: no such YAML; name only YAMLs, or only folders and lists")
        real = os.path.realpath(part_path)
        if real in parts:
            raise UserError(f"{location}: joins {part_path} twice; name it once")
        parts[real] = load_dataset_spec(part_path, is_joined=True)
        parts[real].split(split)
    return JoinedSplit(tuple(parts.values()))


def _advice_if_missing(values: dict[str, Any], path: Path) -> str:
    """Returns the advice for `DatasetSpec.if_missing`."""
    if path.absolute().parent == YAML_FOLDER and {"url", "license"} <= values.keys():
        unpacked = "unpack it as the first lines of that file describe"
        return f"download {values['url']} (license: {values['license']}) and {unpacked}"
    if values.get("download"):
        return "its 'download' is never run: download and unpack the data yourself"
    return "correct its paths"


# Classes


def _read_names(
    values: dict[str, Any], splits: Mapping[str, Split], parts: Sequence[DatasetSpec], path: Path
) -> tuple[str, ...]:
    """Returns the class names from the YAML, the data sets that it joins or the annotations, or else ``nc`` numbered
    names. Raises UserError if there are none or they are invalid."""
    count = check(values.get("nc"), Annotated[int, Bounds(1)] | None, f"{path}: nc")
    part_names = tuple(dict.fromkeys(name for part in parts for name in part.names))
    names: tuple[str, ...] | None
    if values.get("names") is not None:
        names = _checked_names(values["names"], path)
    else:
        names = part_names or _names_in_annotations(splits, path)
    if names is None and count is not None:
        names = tuple(f"class_{i}" for i in range(count))
    if names is None:
        raise UserError(f"{path}: has no 'names'; list the classes in the order of their ids")
    unknown = set(part_names) - set(names)
    if unknown:
        raise UserError(f"{path}: names: lacks '{min(unknown)}', a class of a data set that it joins; add it")
    if count is not None and count != len(names):
        raise UserError(f"{path}: nc is {count}, but 'names' has {len(names)}; make them agree")
    for name, times in Counter(names).items():
        if one_line(name) != name:
            raise UserError(f"{path}: names: {name!r} contains a line break or another control character")
        if times > 1:
            raise UserError(f"{path}: names: several classes are called '{name}'; class names must be unique")
    return names


def _checked_names(value: Any, path: Path) -> tuple[str, ...]:
    """Returns the class names in the value of ``names``: a list, or a map from the numbers, which may be in quotes."""
    location = f"{path}: names"
    if isinstance(value, dict):
        numbers = [int(str(key)) if re.fullmatch("[0-9]{1,9}", str(key).strip()) else -1 for key in value]
        if sorted(numbers) != list(range(len(numbers))):
            raise UserError(f"{location}: must be numbered 0 to {len(numbers) - 1}, got {bounded_repr(list(value))}")
        value = [name for _, name in sorted(zip(numbers, value.values()), key=operator.itemgetter(0))]
    if not isinstance(value, list) or not value:
        raise UserError(f"{location}: expected a list or 'number: name' lines, got {bounded_repr(value)}")
    for name in value:
        if not _is_name(name):
            raise UserError(f"{location}: {bounded_repr(name)} is not the name of a class; put names in quotes")
    return tuple(name.strip() for name in value)


def _is_name(value: Any) -> bool:
    """Returns whether a value of the YAML can be the name of a class."""
    return isinstance(value, str) and bool(value.strip())


def _names_in_annotations(splits: Mapping[str, Split], path: Path) -> tuple[str, ...] | None:
    """Returns the class names in the annotations of all splits with the first format that has names, or None if no
    split has one. Raises UserError if all of these annotations are missing."""
    of_splits = [split for split in splits.values() if isinstance(split, FilesSplit)]
    with_names = [split for split in of_splits if split.annotations and split.label_format is not YOLO]
    if not with_names:
        return None
    label_format = with_names[0].label_format
    labels = [split.annotations for split in with_names if split.label_format is label_format and split.annotations]
    existing = [path for path in labels if path.exists()]
    if not existing:
        raise UserError(f"{labels[0]}: not found (named by {path}), and 'names' has no classes; correct its path")
    return tuple(class_names_in(existing, label_format)) or None


def _read_classes(
    values: dict[str, Any], names: tuple[str, ...], path: Path
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Renames, merges and ignores classes as the keys ``classes`` and ``ignore`` specify. Returns the classes that a
    model learns, and the number of each of ``names`` in them, or `IGNORED`; empty numbers without these keys."""
    targets: dict[str, Any] = {}
    for name, target in check(values.get("classes") or {}, dict, f"{path}: classes").items():
        if not _is_name(target):
            raise UserError(f"{path}: classes: {name}: expected the name of a class, got {bounded_repr(target)}")
        targets[str(name).strip()] = one_line(str(target)).strip()
    for name in check(values.get("ignore") or [], list, f"{path}: ignore"):
        if not _is_name(name):
            raise UserError(f"{path}: ignore: expected names of classes, got {bounded_repr(name)}")
        if targets.setdefault(str(name).strip(), IGNORE) != IGNORE:
            raise UserError(f"{path}: '{name}' is in 'classes' and in 'ignore'; remove one of the two")
    if not targets:
        return names, ()
    for name in targets:
        if name not in names:
            raise UserError(f"{path}: classes: '{one_line(name)}' is not one of the names{suggestion(name, names)}")
    target_of = [None if targets.get(name) == IGNORE else str(targets.get(name, name)) for name in names]
    learned = tuple(dict.fromkeys(target for target in target_of if target is not None))
    if not learned:
        raise UserError(f"{path}: classes: all classes are ignored; there is nothing to learn")
    return learned, tuple(IGNORED if target is None else learned.index(target) for target in target_of)
