"""Reads the classes in a data set's YAML: the keys ``names``, ``nc``, ``classes`` and ``ignore``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from data.labels.label_format import LabelFormat
from data.source.dataset_spec import IGNORE, IGNORED, DatasetSpec, joined_parts
from utils.errors import UserError, one_line
from utils.schema import Bounds, check, suggestion


def read_names(values: dict[str, Any], spec: DatasetSpec, path: Path) -> tuple[str, ...]:
    """Returns the class names from the YAML, the data sets that it joins or the annotations, or else ``nc`` numbered
    names. Raises UserError if there are none or they are invalid.

    Args:
        values: the YAML's values by key.
        spec: the data set, still without names.
        path: the file or folder that contains the names, for messages.
    """
    count = check(values.get("nc"), Annotated[int, Bounds(1)] | None, f"{path}: nc")
    parts = joined_parts(spec.splits.values())
    part_names = list(dict.fromkeys(name for part in parts for name in part.names))
    names = _find_names(values, part_names, spec, count, path)
    unknown = set(part_names) - set(names)
    if unknown:
        raise UserError(f"{path}: names: lacks '{min(unknown)}', a class of a data set that it joins; add it")
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
    values: dict[str, Any], part_names: list[str], spec: DatasetSpec, count: int | None, path: Path
) -> tuple[str, ...]:
    """Returns the class names from the first source that has them. ``part_names``: classes of the joined data sets."""
    if values.get("names") is not None:
        return _checked_names(values["names"], path)
    if part_names:
        return _checked_names(part_names, path)
    for split in spec.listed_splits.values():
        label_format = split.label_format
        if label_format is not None and label_format.class_names is not None:
            return label_format.class_names(_annotations_of(spec, label_format))
    if count is not None:
        return tuple(f"class_{i}" for i in range(count))
    message = "has no 'names'; list the classes in the order of their ids"
    if isinstance(values.get("classes"), list):
        message += " ('classes' renames and merges those that 'names' lists)"
    raise UserError(f"{path}: {message}")


def _annotations_of(spec: DatasetSpec, label_format: LabelFormat) -> list[Path]:
    """Returns the annotation paths of all splits in a label format, without missing ones. Raises UserError if the first
    one, which has the names, is missing."""
    splits = [split for split in spec.listed_splits.values() if split.label_format is label_format]
    paths = [split.annotations for split in splits if split.annotations is not None]
    if not paths[0].exists():
        raise spec.missing_error(paths[0])
    return [path for path in paths if path.exists()]


def with_class_map(spec: DatasetSpec, values: dict[str, Any]) -> DatasetSpec:
    """Returns the data set with its classes renamed, merged and ignored as the keys ``classes`` and ``ignore`` specify.
    Raises UserError if these are invalid."""
    targets = _read_class_map(values, spec.names, Path(spec.source))
    names = tuple(dict.fromkeys(name for name in targets if name is not None))
    if not names:
        raise UserError(f"{spec.source}: classes: all classes are ignored; there is nothing to learn")
    number_of = {name: i for i, name in enumerate(names)}
    class_of = tuple(IGNORED if name is None else number_of[name] for name in targets)
    return replace(spec, names=names, label_names=spec.names, class_of=class_of)


def _read_class_map(values: dict[str, Any], names: Sequence[str], path: Path) -> list[str | None]:
    """Returns, for each class of the labels, the class that the model learns, or None for an ignored class."""
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
        if not _is_class_name(target):
            raise UserError(f"{path}: classes: {name}: expected the name of a class, got {target!r}")
    return [None if target_of.get(name) == IGNORE else str(target_of.get(name, name)) for name in names]


def _is_class_name(value: Any) -> bool:
    """Returns whether a value of ``classes`` is a number or a string of one line without outer spaces."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return False
    text = str(value)
    return text != "" and one_line(text).strip() == text


def _checked_names(value: Any, path: Path) -> tuple[str, ...]:
    """Returns the class names in the value of ``names``, a list or a map. Raises UserError if the value is invalid."""
    names = _numbered_names(value, path) if isinstance(value, dict) else value
    if not isinstance(names, list) or not names:
        raise UserError(f"{path}: names: expected a list or 'number: name' lines, got {names!r}")
    for name in names:
        if isinstance(name, list | dict):
            raise UserError(f"{path}: names: {name!r} is not a name; write a list of names, or 'number: name' lines")
        if isinstance(name, bool) or not isinstance(name, str | int | float) or not str(name).strip():
            raise UserError(f"{path}: names: {name!r} is not a string in YAML; put it in quotes")
    return tuple(str(name).strip() for name in names)


def _numbered_names(name_of: dict[Any, Any], path: Path) -> list[Any]:
    """Returns the names of ``number: name`` lines in order. Numbers may be in quotes, as in YAML made from JSON."""
    names: dict[int, Any] = {}
    for key, name in name_of.items():
        number = str(key).strip()
        if isinstance(key, bool) or not (number.isascii() and number.isdecimal() and len(number) < 10):
            raise UserError(f"{path}: names: {key!r} is not the number of a class; write 'number: name' lines")
        if int(number) in names:
            raise UserError(f"{path}: names: two lines have the number {int(number)}; number them from 0")
        names[int(number)] = name
    missing = set(range(len(names))) - set(names)
    if missing:
        raise UserError(f"{path}: names: must be numbered 0 to {len(names) - 1}; {min(missing)} is missing")
    return [names[number] for number in range(len(names))]
