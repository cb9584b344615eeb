"""Reads data set YAMLs in the format of YOLOv5 and Ultralytics. Nothing is downloaded or run.

Keys: ``path`` (the data set's folder, relative to the YAML's folder or else to the current one; default: the YAML's
folder), ``train`` / ``val`` / ``test`` (a folder, a .txt list of images, or a list of these; or YAMLs of other data
sets, whose splits of this name are joined), ``names`` (list or map), ``nc`` (checked against the names), and
extensions: ``annotations``, COCO JSON files or Pascal VOC folders, by split; ``classes``, a map that renames or merges
classes, or turns their boxes into ignore regions; ``ignore``, a list of classes with ignore regions; ``channels`` and
``bits`` of the images (`PixelFormat`); ``tile``, the side of the tiles that large images are cut into.

`yaml_keys` handles all other keys, `yaml_paths` resolves the paths of entries, and `yaml_classes` reads the classes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from data.images.shards import is_shard_path
from data.labels.formats import format_of
from data.labels.yolo import folder_with_labels
from data.source.dataset_spec import DatasetSpec, FilesSplit, JoinedSplit, JsonSplit, ShardSplit, Split, joined_parts
from data.source.folder import read_folder
from data.source.missing_data import missing_error, nearby_paths_hint
from data.source.other_exports import check_no_export
from data.source.yaml_classes import read_classes
from data.source.yaml_keys import CLASS_KEYS, SPLITS, split_keys
from data.source.yaml_paths import YAML_FOLDER, is_yaml, replaced_separators, resolve_entry, resolve_root
from utils.config.settings import MAX_IMGSZ
from utils.config.yaml_files import load_yaml
from utils.errors import UserError
from utils.files.paths import normal_path
from utils.pixels import PixelFormat
from utils.schema import Bounds, check, suggestion
from utils.strings import listed

MIN_TILE = 32  # pixels


class _Description(NamedTuple):
    """Description of a data set, read from its YAML or inferred from the content of its folder."""

    values: dict[str, Any]  # by key, without unused keys
    path: Path  # the YAML, or a folder without one, for messages
    names_file: Path  # where the class names come from: ``path``, or a folder's YAML that only names the classes
    notes: list[str]  # lines for the log


class _YamlContext(NamedTuple):
    """Context of the YAML being read."""

    path: Path  # the YAML, for messages
    root: Path  # folder that relative paths are relative to
    joined_by: tuple[Path, ...]  # YAMLs that join this one, outermost first


def load_dataset_spec(path: str | Path, known_root: str = "") -> DatasetSpec:
    """Reads and checks a data set YAML or folder (`read_folder`). Raises UserError that names the file and the key.
    ``known_root``: see `DataSource`."""
    return _load_spec(Path(path), known_root, joined_by=())


def _load_spec(path: Path, known_root: str, *, joined_by: tuple[Path, ...]) -> DatasetSpec:
    """Implements `load_dataset_spec`. ``joined_by``: YAMLs that join this one, outermost first."""
    values, yaml_path, names_file, notes = _read_description(path)
    pixels = PixelFormat.checked(values.get("channels", 3), values.get("bits", 8), str(yaml_path))
    root = resolve_root(values.get("path"), yaml_path, known_root)
    splits = _read_splits(values, _YamlContext(yaml_path, root, joined_by))
    tile = check(values.get("tile"), Annotated[int, Bounds(MIN_TILE, MAX_IMGSZ)] | None, f"{yaml_path}: tile") or 0
    parts = joined_parts(splits.values())
    _check_parts(parts, pixels, tile, yaml_path)
    for name, split in splits.items():
        notes += replaced_separators(_entries(values[name]), split.paths, f"{yaml_path}: {name}")
    for part in parts:
        notes += part.notes
    source = str(yaml_path)
    if_missing = _advice_if_missing(values, yaml_path)
    missing = functools.partial(missing_error, root=root, source=source, advice=if_missing)
    classes = read_classes(values, splits, names_file, missing)
    return DatasetSpec(
        names=classes.names,
        root=root,
        splits=splits,
        source=source,
        if_missing=if_missing,
        label_names=classes.label_names,
        class_of=classes.class_of,
        notes=tuple(dict.fromkeys(notes)),
        pixels=pixels,
        tile=tile,
    )


def _read_description(path: Path) -> _Description:
    """Reads a YAML or, for a folder, the YAML in it; without one, infers the description from the folder's files."""
    notes: list[str] = []
    names_file = path
    values: Any
    if path.is_dir():
        content = read_folder(normal_path(path))
        notes.append(content.summary)
        names_file = content.yaml or path
        if content.values:
            values = content.values | {"path": path.absolute()}
        else:
            path = names_file
            values = read_yaml(path)
    else:
        values = read_yaml(path)
    if not isinstance(values, dict):
        hint = "; for a Darknet .data file, name its folder" if isinstance(values, str) and "=" in values else ""
        raise UserError(f"{path}: expected keys (path, train, val, names), got {type(values).__name__}{hint}")
    values, lines = split_keys(values, names_file)
    return _Description(values, path, names_file, notes + lines)


def read_yaml(path: Path) -> Any:
    """Reads a data set's YAML, keeping class names exactly as written. Raises UserError."""
    check_no_export(path)
    return load_yaml(path, text_under=CLASS_KEYS)


def _read_splits(values: dict[str, Any], context: _YamlContext) -> dict[str, Split]:
    """Reads the keys ``train``, ``val``, ``test`` and ``annotations``. Raises UserError if there is no split, or if a
    split has annotations but no images."""
    annotations = _read_annotations(values.get("annotations"), context)
    splits: dict[str, Split] = {}
    for split in SPLITS:
        if values.get(split) not in (None, "", []):
            splits[split] = _read_split(values[split], annotations.get(split), split, context)
    if not splits:
        raise UserError(f"{context.path}: names no images; add 'train: <folder>' and 'val: <folder>'")
    is_one_file_for_all = isinstance(values.get("annotations"), str)
    for split in annotations:
        if split not in splits and not is_one_file_for_all:
            raise UserError(f"{context.path}: annotations for '{split}', but no '{split}: <folder of its images>'")
    return splits


def _read_annotations(value: Any, context: _YamlContext) -> dict[str, Path]:
    """Returns the annotations by split. ``value``: a map, one path for all splits, or None."""
    if value is None:
        return {}
    location = f"{context.path}: annotations"
    by_split = dict.fromkeys(SPLITS, value) if isinstance(value, str) else check(value, dict, location)
    for split in by_split:
        if split not in SPLITS:
            raise UserError(f"{location}: unknown split '{split}'{suggestion(str(split), SPLITS)}")
    return {
        split: _resolve(entry, f"{location}: {split}", context, content="the annotations")
        for split, entry in by_split.items()
        if entry is not None
    }


def _read_split(value: Any, annotations: Path | None, split: str, context: _YamlContext) -> Split:
    """Reads the value of the key ``split``: folders and lists of images, or YAMLs of other data sets."""
    location = f"{context.path}: {split}"
    entries = _entries(value)
    if any(is_yaml(str(entry)) for entry in entries):
        if annotations is not None:
            raise UserError(f"{location}: joins other data sets; 'annotations' belong in their YAMLs")
        return _read_joined_split(entries, split, context)
    images = tuple(_resolve(entry, location, context, content="its images") for entry in entries)
    if annotations is None:
        images = tuple(Path(folder_with_labels(str(path))) if os.path.isdir(path) else path for path in images)
    shards = [path for path in images if is_shard_path(path)]
    if shards:
        if len(images) > 1:
            raise UserError(f"{location}: {shards[0]} must be the only entry; join data sets by their YAMLs")
        if annotations is not None:
            raise UserError(f"{location}: {shards[0]} has labels of its own; remove the 'annotations' of this split")
        return ShardSplit(shards[0])
    label_format = format_of(annotations)
    if annotations is not None and label_format is not None and label_format.per_image is None:
        return JsonSplit(images, annotations, label_format)
    return FilesSplit(images, annotations, label_format)


def _resolve(entry: Any, location: str, context: _YamlContext, *, content: str) -> Path:
    """Returns the absolute path of an entry. Raises UserError if it is no path, or a whole disk, which would be
    searched for ``content``."""
    path = resolve_entry(entry, context.root, location)
    if path == Path(path.anchor):
        raise UserError(f"{location}: {path} is the whole disk; name the folder of {content}")
    return path


def _entries(value: Any) -> list[Any]:
    """Returns the entries of a split, whose value is a single entry or a list."""
    return value if isinstance(value, list) else [value]


def _read_joined_split(entries: Sequence[Any], split: str, context: _YamlContext) -> JoinedSplit:
    """Reads the YAMLs of the data sets that a split joins. Raises UserError if it joins a data set twice."""
    parts = tuple(_read_part(entry, split, context) for entry in entries)
    sources: set[str] = set()
    for part in parts:
        source = os.path.realpath(part.source)
        if source in sources:
            raise UserError(f"{context.path}: {split}: joins {part.source} twice; name it once")
        sources.add(source)
    return JoinedSplit(parts)


def _read_part(entry: Any, split: str, context: _YamlContext) -> DatasetSpec:
    """Reads the YAML of a data set that a split joins. Raises UserError if that data set's split joins others itself,
    or if the data sets join each other in a cycle."""
    location = f"{context.path}: {split}"
    path = resolve_entry(entry, context.root, location)
    if is_yaml(path) and not path.exists():
        raise UserError(f"{location}: {path}: no such file{nearby_paths_hint(path)}")
    if not is_yaml(path) or not path.is_file():
        raise UserError(f"{location}: {path}: not a YAML of a data set; name only YAMLs, or only folders and lists")
    chain = (*context.joined_by, context.path)
    for i, outer in enumerate(chain):
        if path.samefile(outer):
            cycle = " -> ".join(map(str, (*chain[i:], path)))
            raise UserError(f"{location}: data sets join each other in a cycle: {cycle}; remove one of these entries")
    part = _load_spec(path, "", joined_by=chain)
    inner = [inner_part.source for inner_part in joined_parts([part.split(split)])]
    if inner:
        raise UserError(
            f"{location}: {path} joins data sets itself ({listed(inner, 3)}); name those here instead of it"
        )
    return part


def _check_parts(parts: Sequence[DatasetSpec], pixels: PixelFormat, tile: int, path: Path) -> None:
    """Raises UserError unless the joined data sets have the pixel format ``pixels`` and, if they are tiled, tiles
    of ``tile``."""
    for part in parts:
        if part.pixels != pixels:
            raise UserError(f"{path}: has images of {pixels}, but {part.source} of {part.pixels}; make them agree")
        if part.tile not in (0, tile):
            raise UserError(f"{path}: joins {part.source}, which has 'tile: {part.tile}'; add 'tile: {part.tile}' here")


def _advice_if_missing(values: dict[str, Any], path: Path) -> str:
    """Returns the advice for `DatasetSpec.if_missing`."""
    if path.absolute().parent == YAML_FOLDER and {"url", "license"} <= values.keys():
        unpacked = "unpack it as the first lines of that file describe"
        return f"download {values['url']} (license: {values['license']}) and {unpacked}"
    if values.get("download"):
        return "its 'download' is never run: download and unpack the data yourself"
    return "correct its paths"
