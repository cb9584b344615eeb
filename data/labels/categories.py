"""Reads the categories of COCO JSON files: the class names that they give, and their ids, which identify classes in
results in COCO's format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data.labels.json_files import number, read_json, shown
from utils.errors import UserError, one_line
from utils.files.once_per_file import once_per_file
from utils.logger import get_logger

COCO_JSON = "a COCO JSON: expected images, annotations and categories"
_CATEGORY_ID = re.compile(r'"category_id"\s*:\s*"?(-?\w+)')


class Category(NamedTuple):
    """A category of a COCO JSON."""

    id: int
    name: str
    is_used: bool  # whether annotations have its id


def ids_of_classes(categories: Sequence[Category], names: Sequence[str]) -> tuple[int, ...]:
    """Returns the category id of each class.

    Of several categories with the same name, a used one is preferred, because Roboflow's root may be named like a
    class. A class without a category gets an id above all ids of the file.
    """
    id_of: dict[str, int] = {}
    for category in sorted(categories, key=lambda category: (not category.is_used, category.id)):
        id_of.setdefault(category.name, category.id)
    first_free = max((category.id for category in categories), default=-1) + 1
    return tuple(id_of.get(name, first_free + number) for number, name in enumerate(names))


def id_of_merged_class(categories: Sequence[Category], ids: Iterable[int]) -> int:
    """Returns the category id of a class that merges those with ``ids``: the smallest of them that annotations have, or
    else that the file contains, or else the smallest."""
    merged_ids = set(ids)
    in_file = {category.id for category in categories if category.id in merged_ids}
    used = {category.id for category in categories if category.is_used and category.id in merged_ids}
    if used:
        return min(used)
    return min(in_file) if in_file else min(merged_ids)


def checked_categories(categories: list[Any], path: Path) -> dict[int, str]:
    """Returns the category names, without outer spaces, by id. Raises UserError that names an invalid entry."""
    name_of: dict[int, str] = {}
    for position, category in enumerate(categories):
        location = f"{path}: categories[{position}]"
        if not isinstance(category, dict) or "id" not in category or "name" not in category:
            raise UserError(f"{location}: expected a category with id and name, got {shown(category)}")
        category_id, name = number(category["id"]), category["name"]
        if category_id is None or category_id != int(category_id):
            raise UserError(f"{location}: id {shown(category['id'])}: category ids must be integers")
        category_id = int(category_id)
        if type(name) not in (str, int, float) or not str(name).strip():
            raise UserError(f"{location}: name {shown(name)}: expected text")
        if category_id in name_of:
            raise UserError(f"{location}: has the id {category_id} of '{name_of[category_id]}'; ids must be unique")
        name_of[category_id] = str(name).strip()  # like the names in the YAML
    return name_of


def _id_of(category: dict) -> int:
    return int(number(category["id"]) or 0)


def same_name_error(path: Path, name: str, first: int, second: int) -> UserError:
    """Returns the error about two categories with one name, which pycocotools would score as two classes."""
    return UserError(
        f"{path}: categories: '{one_line(name)}' is the name of the ids {first} and {second}; rename one, or give the "
        "annotations of both the same category_id"
    )


def category_names(paths: Sequence[Path]) -> tuple[str, ...]:
    """Returns the names of the first COCO JSON's categories, ordered by id. Raises UserError if they are invalid.

    A category that all others name as their supercategory, and that has no box in any of the files, is not a class:
    exports of Roboflow begin with such a root. Only the categories are parsed, because the files are large.
    """
    categories = _categories_of(paths[0]).categories
    root = _root_category(categories, paths)
    id_of: dict[str, int] = {}
    for category in categories:
        if category is root:
            message = "%s: the category '%s' has no boxes and is the supercategory of all others: it is not a class"
            get_logger().info(message, paths[0], root["name"])
            continue
        name = str(category["name"]).strip()
        if name in id_of:
            raise same_name_error(paths[0], name, id_of[name], category["id"])
        id_of[name] = category["id"]
    return tuple(id_of)


class _CategoryList(NamedTuple):
    """The categories of a COCO JSON, ordered by id, and the `_kind_of` those that annotations have."""

    categories: tuple[dict, ...]
    used_kinds: frozenset[tuple[Any, Any]]  # empty if no category can be Roboflow's root


def _kind_of(category: dict) -> tuple[Any, Any]:
    """Returns the name and supercategory, which identify a category across files, whose ids may differ. A supercategory
    that cannot be a name is None."""
    parent = category.get("supercategory")
    return category["name"], parent if isinstance(parent, (str, int, float)) else None


def _root_category(categories: Sequence[dict], paths: Sequence[Path]) -> dict | None:
    """Returns the category that all others name as their supercategory and that has no box, or None."""
    files = [path for path in dict.fromkeys(paths) if path.is_file()]
    for root in categories:
        others = [category for category in categories if category is not root]
        is_root = bool(others) and all(category.get("supercategory") == root["name"] for category in others)
        if is_root and not any(_kind_of(root) in _categories_of(path).used_kinds for path in files):
            return root
    return None


@once_per_file
def _categories_of(path: Path) -> _CategoryList:
    """Reads the categories of a COCO JSON. Raises UserError."""
    text = read_json(path, COCO_JSON)
    categories = tuple(_sorted_categories(text, path))
    supercategories = {parent for name, parent in map(_kind_of, categories) if parent != name}
    may_have_root = len(categories) == 1 or any(category["name"] in supercategories for category in categories)
    used_ids = set(_CATEGORY_ID.findall(text)) if may_have_root else set()
    return _CategoryList(categories, frozenset(_kind_of(c) for c in categories if str(_id_of(c)) in used_ids))


def _sorted_categories(text: str, path: Path) -> list[dict]:
    """Returns the categories in the text of a COCO JSON, ordered by id. Raises UserError."""
    decoder = json.JSONDecoder()
    for match in re.finditer(r'(?<!\\)"categories"\s*:\s*(?=\[)', text):
        try:
            categories, _ = decoder.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            continue
        if all(isinstance(c, dict) and {"id", "name"} <= c.keys() for c in categories):
            checked_categories(categories, path)
            return sorted(categories, key=_id_of)
        # Otherwise this is another key of the same name, such as one in "info".
    raise UserError(f"{path}: has no categories to take the names from; is it a COCO JSON?")
