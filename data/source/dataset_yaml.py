"""Reads data set YAMLs in the format of YOLOv5 and Ultralytics. Nothing is downloaded or run.

Keys: ``path`` (the data set's folder, relative to the YAML's folder or else to the current one; default: the YAML's
folder), ``train`` / ``val`` / ``test`` (a folder, a list of folders, or a .txt list of images; or YAMLs of other data
sets, whose splits of this name are joined), ``names`` (list or map), ``nc`` (checked against the names), and
extensions: ``annotations``, COCO JSON files or Pascal VOC folders, by split; ``classes``, a map that renames and merges
classes, or makes their boxes regions to ignore; ``ignore``, a list of the latter; ``channels`` and ``bits`` of the
images (`PixelFormat`); ``tile``, the side of the tiles that large images are cut into. `data.source.yaml_keys` handles
other keys.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from data.labels.formats import format_of
from data.labels.yolo import folder_with_labels
from data.source.dataset_spec import IGNORE, IGNORED, DatasetSpec, SplitSource
from data.source.folder import read_folder
from data.source.other_exports import check_no_export
from data.source.yaml_keys import CLASS_KEYS, SPLITS, split_keys
from utils.config.settings import MAX_IMGSZ
from utils.config.yaml_files import load_yaml
from utils.errors import UserError, one_line
from utils.files.folders import CONFIGS
from utils.files.paths import normal_path
from utils.files.schema import Bounds, check, suggestion
from utils.pixels import PixelFormat
from utils.strings import listed

YAML_FOLDER = CONFIGS / "data"  # YAMLs of public data sets
MIN_TILE = 32  # pixels


class _Description(NamedTuple):
    """Holds what a data set's YAML, or the content of its folder, says."""

    values: dict[str, Any]  # by key, without unused ones
    path: Path  # the YAML, or a folder without one, for messages
    notes: list[str]  # lines for the log


class _Place(NamedTuple):
    """Says where an entry stands that is read."""

    path: Path  # the YAML, for messages
    root: Path  # folder that relative paths are relative to
    joined_by: tuple[Path, ...]  # YAMLs that join this one, the outermost first


def load_dataset_spec(path: str | Path, known_root: str = "") -> DatasetSpec:
    """Reads and checks a data set YAML, or a folder (`read_folder`). Raises UserError with the file and the key.
    ``known_root``: see `DataSource`."""
    return _load_spec(Path(path), known_root, joined_by=())


def _load_spec(path: Path, known_root: str, *, joined_by: tuple[Path, ...]) -> DatasetSpec:
    """Implements `load_dataset_spec`. ``joined_by``: YAMLs that join this one, the outermost first."""
    values, path, notes = _read_description(path)
    pixels = PixelFormat.checked(values.get("channels", 3), values.get("bits", 8), str(path))
    root = _resolve_root(values.get("path"), path, known_root)
    splits = _resolve_splits(values, _Place(path, root, joined_by))
    _check_annotated_splits(values, splits, path)
    names = _read_names(values, splits, path)
    tile = check(values.get("tile"), Annotated[int, Bounds(MIN_TILE, MAX_IMGSZ)] | None, f"{path}: tile") or 0
    parts = [part for source in splits.values() for part in source.parts]
    _check_parts(parts, pixels, tile, path)
    notes += _windows_paths(values, splits, path)
    for part in parts:
        notes += part.notes
    spec = DatasetSpec(
        names=names,
        root=root,
        splits=splits,
        source=str(path),
        if_missing=_advice_if_missing(values, path),
        notes=tuple(dict.fromkeys(notes)),
        pixels=pixels,
        tile=tile,
    )
    if values.get("classes") or values.get("ignore"):
        return _with_class_map(spec, _read_class_map(values, names, path))
    return spec


def _read_description(path: Path) -> _Description:
    """Reads a YAML, or a folder: the YAML in it, or else what its files say."""
    notes: list[str] = []
    values: Any
    if path.is_dir():
        content = read_folder(normal_path(path))
        notes.append(content.summary)
        if content.yaml is None:
            values = content.values | {"path": str(path.absolute())}
        else:
            path = content.yaml
            values = read_yaml(path)
    else:
        values = read_yaml(path)
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected keys (path, train, val, names), got {type(values).__name__}")
    values, lines = split_keys(values, path)
    return _Description(values, path, notes + lines)


def _resolve_splits(values: dict[str, Any], place: _Place) -> dict[str, SplitSource]:
    """Reads the keys ``train``, ``val``, ``test`` and ``annotations``."""
    annotations = _read_annotations(values.get("annotations"), place.root, place.path)
    return {
        split: _read_split(values[split], annotations.get(split), split, place)
        for split in SPLITS
        if values.get(split) not in (None, "", [])
    }


def _check_annotated_splits(values: dict[str, Any], splits: dict[str, SplitSource], path: Path) -> None:
    """Raises UserError if there is no split, or one has annotations and no images."""
    if not splits:
        raise UserError(f"{path}: names no images; add 'train: <folder>' and 'val: <folder>'")
    annotations = values.get("annotations")
    if not isinstance(annotations, dict):  # one file for all
        return
    for split, file in annotations.items():
        if file is not None and split not in splits:
            raise UserError(f"{path}: annotations for '{split}', but no '{split}: <folder of its images>'")


def _check_parts(parts: Sequence[DatasetSpec], pixels: PixelFormat, tile: int, path: Path) -> None:
    """Raises UserError unless data sets that are joined have the same kind of images, and tiles."""
    for part in parts:
        if part.pixels != pixels:
            raise UserError(f"{path}: has images of {pixels}, {part.source} of {part.pixels}; write the same in both")
        if part.tile not in (0, tile):
            raise UserError(f"{path}: joins {part.source}, which has 'tile: {part.tile}'; add 'tile: {part.tile}' here")


def _advice_if_missing(values: dict[str, Any], path: Path) -> str:
    """Returns the advice for `DatasetSpec.if_missing`."""
    if path.absolute().parent == YAML_FOLDER and "url" in values:
        unpacked = "unpack it as the first lines of that file describe"
        return f"download {values['url']} (license: {values['license']}) and {unpacked}"
    if values.get("download"):
        return "its 'download' is never run: download and unpack the data yourself"
    return "correct its paths"


def _with_class_map(spec: DatasetSpec, targets: Sequence[str | None]) -> DatasetSpec:
    """Returns the data set with its classes mapped to ``targets``, one per class, that a model learns; None:
    ignored."""
    names = tuple(dict.fromkeys(name for name in targets if name is not None))
    if not names:
        raise UserError(f"{spec.source}: classes: all classes are ignored; there is nothing to learn")
    number = {name: i for i, name in enumerate(names)}
    class_of = tuple(IGNORED if name is None else number[name] for name in targets)
    return replace(spec, names=names, label_names=spec.names, class_of=class_of)


def read_yaml(path: Path) -> Any:
    """Reads a data set's YAML, with names of classes as they are written. Raises UserError."""
    check_no_export(path)
    return load_yaml(path, text_under=CLASS_KEYS)


def _text_path(value: Any, location: str) -> Path:
    """Returns the path that a YAML entry names. Raises UserError, beginning with ``location``, if it is not one."""
    path = Path(os.path.expanduser(check(value, str, location).strip()))
    if len(str(path)) > 4000 or any(len(part.encode("utf-8", "surrogatepass")) > 255 for part in path.parts):
        raise UserError(f"{location}: a path or a name in it is longer than file systems allow: {str(path)[:100]}...")
    return path


def _resolve_root(value: Any, yaml_path: Path, known_root: str) -> Path:
    """Returns the data set's folder, by the value of the key ``path``."""
    home = yaml_path.absolute().parent
    if value in (None, ""):
        return normal_path(home)
    path = _text_path(value, f"{yaml_path}: path")
    candidates: list[Path] = []
    for reading in _readings(path):
        candidates += [reading] if reading.is_absolute() else [home / reading, Path.cwd() / reading]
    if known_root and not path.is_absolute():
        candidates.append(Path(known_root))
    missing = candidates[1] if home == YAML_FOLDER and not path.is_absolute() else candidates[0]
    return normal_path(next((c for c in candidates if c.is_dir()), missing))


def _read_split(value: Any, annotations: Path | None, split: str, place: _Place) -> SplitSource:
    """Reads the value of the key ``split``."""
    location = f"{place.path}: {split}"
    entries = value if isinstance(value, list) else [value]
    if _joins(value):
        parts = tuple(_read_part(entry, split, place) for entry in entries)
        sources = [os.path.realpath(part.source) for part in parts]
        for i, part in enumerate(parts):
            if sources[i] in sources[:i]:
                raise UserError(f"{location}: joins {part.source} twice; name it once")
        if annotations is not None:
            raise UserError(f"{location}: joins other data sets; 'annotations' belong in their YAMLs")
        return SplitSource((), None, None, parts)
    images = tuple(_resolve(_text_path(entry, location), place.root) for entry in entries)
    if annotations is None:
        images = tuple(Path(folder_with_labels(str(path))) if path.is_dir() else path for path in images)
    return SplitSource(images, annotations, format_of(annotations))


def _joins(value: Any) -> bool:
    """Returns whether a split's entry names YAMLs of other data sets."""
    entries = value if isinstance(value, list) else [value]
    return any(str(entry).lower().endswith((".yaml", ".yml")) for entry in entries)


def _read_part(entry: Any, split: str, place: _Place) -> DatasetSpec:
    """Reads the YAML of a data set that a split joins. Raises UserError if it joins data sets itself: those of a cycle
    have no end."""
    location = f"{place.path}: {split}"
    path = _resolve(_text_path(entry, location), place.root)
    if path.suffix.lower() not in (".yaml", ".yml") or not path.is_file():
        raise UserError(f"{location}: {path}: not a YAML of a data set; name YAMLs only, or folders and lists only")
    chain = (*place.joined_by, place.path)
    for i, outer in enumerate(chain):
        if path.samefile(outer):
            cycle = " -> ".join(map(str, (*chain[i:], path)))
            raise UserError(f"{location}: data sets join each other in a cycle: {cycle}; remove one of these entries")
    part = _load_spec(path, "", joined_by=chain)
    inner = [each.source for each in part.split(split).parts]
    if inner:
        raise UserError(
            f"{location}: {path} joins data sets itself ({listed(inner, 3)}); name those here instead of it"
        )
    return part


def _resolve(entry: Path, root: Path) -> Path:
    """Returns the absolute path of an entry. Roboflow exports ``../train/images`` instead of ``train/images``."""
    for reading in _readings(entry):
        candidates = [reading]
        if reading.parts[:1] == ("..",):
            candidates.append(Path(*reading.parts[1:]))
        for candidate in candidates:
            if os.path.exists(root / candidate):
                return normal_path(root / candidate)
    return normal_path(root / entry)


def _readings(path: Path) -> list[Path]:
    """Returns what a path can mean: as it is written, or else with the separators of Windows replaced."""
    return [path, Path(str(path).replace("\\", "/"))]


def _windows_paths(values: dict[str, Any], splits: dict[str, SplitSource], path: Path) -> list[str]:
    """Returns lines for the log about the entries whose separators `_resolve` has replaced."""
    lines = []
    for split, source in splits.items():
        entries = values[split] if isinstance(values[split], list) else [values[split]]
        lines += [
            f"{path}: {split}: {entry} is read as {resolved}"
            for entry, resolved in zip(entries, source.images)
            if "\\" in entry and "\\" not in str(resolved)
        ]
    return lines


def _read_annotations(value: Any, root: Path, path: Path) -> dict[str, Path]:
    if value is None:
        return {}
    value = dict.fromkeys(SPLITS, value) if isinstance(value, str) else value
    for split in check(value, dict, f"{path}: annotations"):
        if split not in SPLITS:
            raise UserError(f"{path}: annotations: unknown split '{split}'{suggestion(str(split), SPLITS)}")
    return {s: _resolve(_text_path(v, f"{path}: annotations: {s}"), root) for s, v in value.items() if v is not None}


def _read_names(values: dict, splits: dict[str, SplitSource], path: Path) -> tuple[str, ...]:
    """Returns the class names: of the YAML, the data sets that it joins, the annotations, or numbered by ``nc``. Raises
    UserError if there are none, or they are not valid."""
    count = check(values.get("nc"), Annotated[int, Bounds(1)] | None, f"{path}: nc")
    part_names = list(dict.fromkeys(name for source in splits.values() for part in source.parts for name in part.names))
    names = _find_names(values, part_names, splits, count, path)
    unknown = set(part_names) - set(names)
    if unknown:
        raise UserError(f"{path}: names: without '{min(unknown)}', a class of a data set that it joins; add it")
    if count is not None and count != len(names):
        raise UserError(f"{path}: nc is {count}, but 'names' has {len(names)}; make them agree")
    for name in names:
        if one_line(name) != name:
            raise UserError(f"{path}: names: {name!r} contains a line break or another control character")
    for name, times in Counter(names).items():
        if times > 1:
            raise UserError(f"{path}: names: several classes are called '{name}'; class names must be unique")
    return names


def _find_names(
    values: dict, part_names: list[str], splits: dict[str, SplitSource], count: int | None, path: Path
) -> tuple[str, ...]:
    """Returns the class names from the first source that has them. ``part_names``: classes of the joined data sets."""
    if values.get("names") is not None:
        return _checked_names(values["names"], path)
    if part_names:
        return _checked_names(part_names, path)
    formats = [source.label_format for source in splits.values()]
    for label_format in formats:
        if label_format is not None and label_format.class_names is not None:
            sources = [source for source in splits.values() if source.label_format is label_format]
            return label_format.class_names([s.annotations for s in sources if s.annotations is not None])
    if count is not None:
        return tuple(f"class_{i}" for i in range(count))
    message = "has no 'names'; list the classes in the order of their ids"
    if isinstance(values.get("classes"), list):
        message += " ('classes' renames and merges those that 'names' lists)"
    raise UserError(f"{path}: {message}")


def _read_class_map(values: dict, names: tuple[str, ...], path: Path) -> list[str | None]:
    """Returns, for each class of the labels, the class that the model learns; None: ignored."""
    renamed = check(values.get("classes") or {}, dict, f"{path}: classes")
    ignored = check(values.get("ignore") or [], list, f"{path}: ignore")
    target_of = {str(name).strip(): target for name, target in renamed.items()}
    for name in map(one_line, map(str, ignored)):
        if target_of.get(name.strip(), IGNORE) != IGNORE:
            raise UserError(f"{path}: '{name}' is in 'classes' and in 'ignore'; remove one of the two")
    target_of |= {str(name).strip(): IGNORE for name in ignored}
    for name, target in target_of.items():
        if name not in names:
            raise UserError(f"{path}: classes: '{one_line(name)}' is not one of the names{suggestion(name, names)}")
        is_text = isinstance(target, str | int | float) and not isinstance(target, bool) and str(target)
        if not is_text or one_line(str(target)).strip() != str(target):
            raise UserError(f"{path}: classes: {name}: expected the name of a class, got {target!r}")
    return [None if target_of.get(name) == IGNORE else str(target_of.get(name, name)) for name in names]


def _checked_names(value: Any, path: Path) -> tuple[str, ...]:
    """Returns the class names in the value of ``names``, a list or a map. Raises UserError if it is not valid."""
    names = _numbered_names(value, path) if isinstance(value, dict) else value
    if not isinstance(names, list) or not names:
        raise UserError(f"{path}: names: expected a list or 'number: name' lines, got {names!r}")
    for name in names:
        if isinstance(name, bool) or not isinstance(name, str | int | float) or not str(name).strip():
            raise UserError(f"{path}: names: {name!r} is not text in YAML; put it in quotes")
    return tuple(str(name).strip() for name in names)


def _numbered_names(name_of: dict[Any, Any], path: Path) -> list[Any]:
    """Returns the names of ``number: name`` lines, by number. A number may be in quotes, as in YAML that was JSON."""
    names: dict[int, Any] = {}
    for key, name in name_of.items():
        number = str(key).strip()
        if isinstance(key, bool) or not (number.isascii() and number.isdecimal() and len(number) < 10):
            raise UserError(f"{path}: names: {key!r} is not the number of a class; write 'number: name' lines")
        if int(number) in names:
            raise UserError(f"{path}: names: two lines have the number {int(number)}; number them from 0")
        names[int(number)] = name
    if missing := set(range(len(names))) - set(names):
        raise UserError(f"{path}: names: must be numbered 0 to {len(names) - 1}; {min(missing)} is missing")
    return [names[number] for number in range(len(names))]
