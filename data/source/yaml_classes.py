"""Reads the classes in a data set's YAML: the keys ``names``, ``nc``, ``classes`` and ``ignore``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from data.source.dataset_spec import IGNORE, IGNORED, ListedSplit, Split, joined_parts
from utils.errors import UserError, one_line
from utils.schema import Bounds, check, suggestion

T = TypeVar("T", list, dict)


class Classes(NamedTuple):
    """The classes of a data set, see the fields of `DatasetSpec`."""

    names: tuple[str, ...]
    label_names: tuple[str, ...] = ()
    class_of: tuple[int, ...] = ()


def read_classes(
    values: dict[str, Any], splits: Mapping[str, Split], path: Path, missing_error: Callable[[Path], UserError]
) -> Classes:
    """Reads the class names, and renames, merges and ignores classes as the keys ``classes`` and ``ignore`` specify.
    Raises UserError if there are no names, or for invalid values.

    Args:
        values: the YAML's values by key.
        path: the file or folder that contains the names, for messages.
        missing_error: returns the error about missing annotations, which would contain the names.
    """
    names = _read_names(values, splits, path, missing_error)
    renamed = _value_or_empty(values, "classes", dict, path)
    ignored = _value_or_empty(values, "ignore", list, path)
    if not renamed and not ignored:
        return Classes(names)
    targets = _targets(renamed, ignored, names, path)
    learned = tuple(dict.fromkeys(name for name in targets if name is not None))
    if not learned:
        raise UserError(f"{path}: classes: all classes are ignored; there is nothing to learn")
    number_of = {name: i for i, name in enumerate(learned)}
    class_of = tuple(IGNORED if name is None else number_of[name] for name in targets)
    return Classes(learned, names, class_of)


def _read_names(
    values: dict[str, Any], splits: Mapping[str, Split], path: Path, missing_error: Callable[[Path], UserError]
) -> tuple[str, ...]:
    """Returns the class names from the YAML, the data sets that it joins or the annotations, or else ``nc`` numbered
    names. Raises UserError if there are none or they are invalid."""
    count = check(values.get("nc"), Annotated[int, Bounds(1)] | None, f"{path}: nc")
    part_names = list(dict.fromkeys(name for part in joined_parts(splits.values()) for name in part.names))
    names = _names_in_yaml(values, part_names, path)
    if names is None:
        names = _names_in_annotations(splits, missing_error)
    if names is None and count is not None:
        names = tuple(f"class_{i}" for i in range(count))
    if names is None:
        message = "has no 'names'; list the classes in the order of their ids"
        if isinstance(values.get("classes"), list):
            message += " ('classes' renames and merges those that 'names' lists)"
        raise UserError(f"{path}: {message}")
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


def _names_in_yaml(values: dict[str, Any], part_names: list[str], path: Path) -> tuple[str, ...] | None:
    """Returns the class names in the YAML, or else those of the data sets that it joins, or None."""
    if values.get("names") is not None:
        return _checked_names(values["names"], path)
    return _checked_names(part_names, path) if part_names else None


def _names_in_annotations(
    splits: Mapping[str, Split], missing_error: Callable[[Path], UserError]
) -> tuple[str, ...] | None:
    """Returns the class names in the annotations of all splits with the first format that has names, or None if no
    split has one. Raises UserError if the first of these annotations are missing; other missing ones are skipped."""
    listed = [split for split in splits.values() if isinstance(split, ListedSplit)]
    for split in listed:
        label_format = split.label_format
        if label_format is None or label_format.class_names is None:
            continue
        paths = [other.annotations for other in listed if other.label_format is label_format and other.annotations]
        if not paths[0].exists():
            raise missing_error(paths[0])
        return label_format.class_names([path for path in paths if path.exists()])
    return None


def _value_or_empty(values: dict[str, Any], key: str, kind: type[T], path: Path) -> T:
    """Returns the value of a key, or an empty one if the key is absent or has no content."""
    value = values.get(key)
    return kind() if value in (None, "", [], {}) else check(value, kind, f"{path}: {key}")


def _targets(renamed: dict[Any, Any], ignored: list[Any], names: Sequence[str], path: Path) -> list[str | None]:
    """Returns, for each class of the labels, the class that the model learns, or None for an ignored class. ``renamed``
    and ``ignored`` are the values of ``classes`` and ``ignore``."""
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
