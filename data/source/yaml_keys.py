"""Sorts the keys of a data set's YAML into those that are used, those that only describe it, and misspelled ones."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from utils.errors import UserError, one_line
from utils.strings import listed

SPLITS = ("train", "val", "test")
CLASS_KEYS = frozenset({"names", "classes", "ignore"})  # their values are class names
_USED = (*SPLITS, "path", "names", "nc", "classes", "ignore", "annotations", "channels", "bits", "tile")
_FOR_MISSING_DATA = frozenset({"download", "url", "license"})  # quoted by messages about missing data
_SYNONYMS = {"validation": "val", **dict.fromkeys(("num_classes", "number_of_classes", "n_classes"), "nc")}
_MIN_SIMILARITY = 0.75  # smallest `difflib` ratio between a misspelled key and the intended one
_MISTAKEN_FOR = {  # misspelled keys for which `difflib` finds no key or the wrong one
    **dict.fromkeys(("class_names", "classnames", "class_name", "label_names"), "names"),
    **dict.fromkeys(("tile_size", "tilesize"), "tile"),
    **dict.fromkeys(("bit_depth", "bitdepth"), "bits"),
}
# Keys that resemble one of `_USED` but only describe the data set.
_DESCRIPTIVE = frozenset({"title", "annotator", "annotators", "annotation_type", "annotation_format"})
_SHOWN = 12  # unused keys named in the log
_KEYPOINTS = "a data set of keypoints; only bounding boxes are supported"
_KEYS_OF_OTHER_TASKS = dict.fromkeys(("kpt_shape", "flip_idx", "kpt_names"), _KEYPOINTS)
_DETECTION = re.compile(r"(object|od)?[ _-]?(detect(ion)?)?|(bounding[ _-]?)?box(es)?|bbox(es)?", re.IGNORECASE)
# Pattern for the value of `task`, and the kind of labels of such a task. The first match decides.
_REFUSED_TASKS = (
    (re.compile("pose|keypoint", re.IGNORECASE), _KEYPOINTS),
    (re.compile("semantic|panoptic", re.IGNORECASE), "classes of pixels; this program detects boxes"),
    (re.compile("classif", re.IGNORECASE), "classes of whole images; this program detects boxes"),
)
_TASKS_WITH_BOXES = (
    (re.compile("seg", re.IGNORECASE), "polygons are used as the boxes around them"),
    (re.compile("obb|orient|rotat", re.IGNORECASE), "rotated boxes are used as the upright boxes around them"),
)


def split_keys(values: dict[Any, Any], path: Path) -> tuple[dict[str, Any], list[str]]:
    """Separates the used keys, with synonyms replaced, from the others.

    Returns the values of the used keys, and log lines about the others. Raises UserError for a key that seems to be a
    misspelling of a used one, and for a data set of another task.
    """
    used: dict[str, Any] = {}
    unused: list[str] = []
    lines: list[str] = []
    for key, value in values.items():
        if key in _USED or key in _FOR_MISSING_DATA:
            used[key] = value
        elif key in _KEYS_OF_OTHER_TASKS:
            raise UserError(f"{path}: '{key}' declares {_KEYS_OF_OTHER_TASKS[key]}")
        elif key == "task":
            lines += _task_lines(value, path)
        elif key in _SYNONYMS and _SYNONYMS[key] not in values and _SYNONYMS[key] not in used:
            used[_SYNONYMS[key]] = value
        elif isinstance(key, int | float) and not isinstance(key, bool):
            raise UserError(f"{path}: unknown key '{key}'; lines 'number: name' belong under 'names:', indented")
        else:
            meant = _misspelled(str(key), values)
            if meant:
                raise UserError(f"{path}: unknown key '{key}' (did you mean '{meant}'?)")
            unused.append(one_line(str(key))[:60])
    if unused:
        lines.append(f"{path}: not used: {listed(unused, _SHOWN)}")
    return used, lines


def _task_lines(value: Any, path: Path) -> list[str]:
    """Returns log lines about how the labels of a task are used. Raises UserError if the labels contain no boxes."""
    task = one_line(str(value)).strip()[:60]
    for pattern, labels in _REFUSED_TASKS:
        if pattern.search(task):
            raise UserError(f"{path}: 'task: {task}' declares {labels}")
    if value is None or _DETECTION.fullmatch(task):
        return []
    for pattern, labels in _TASKS_WITH_BOXES:
        if pattern.search(task):
            return [f"{path}: task: {task}: this program detects boxes; {labels}"]
    return [f"{path}: task: {task}: not used; this program detects boxes"]


def _misspelled(key: str, present: Iterable[Any]) -> str:
    """Returns the key that ``key`` seems to be a misspelling of, or "". A key that is ``present`` is never returned:
    ``names_zh`` next to ``names`` is a description."""
    is_switched_off = not key[:1].isalnum()  # such as _train, or .names for an anchor
    if is_switched_off or key in _DESCRIPTIVE or key in _SYNONYMS:
        return ""
    key = key.lower()
    missing = [used for used in _USED if used not in present]
    if key in _MISTAKEN_FOR:
        meant = _MISTAKEN_FOR[key]
        return meant if meant in missing else ""
    close = difflib.get_close_matches(key, missing, n=1, cutoff=_MIN_SIMILARITY)
    transposed = [used for used in missing if sorted(used) == sorted(key)]
    return next(iter([*close, *transposed]), "")
