"""Reads the categories of COCO JSON files: the class names that they give (`category_names`), and the classes of the
categories in one file (`Categories`)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from data.labels.coco_ids import Ids
from data.labels.findings import UNKNOWN_CLASS
from data.labels.json_files import read_json, shown
from data.labels.rows import RowProblem
from utils.errors import UserError, one_line
from utils.files.once_per_file import once_per_file
from utils.logger import get_logger
from utils.schema import suggestion

COCO_JSON = "a COCO JSON: expected images, annotations and categories"
_CATEGORY_ID = re.compile(r'"category_id"\s*:\s*"?(-?\w+)')


class Categories:
    """The categories of a file, and their classes."""

    def __init__(self, name_of: dict[int, str], names: tuple[str, ...] | None) -> None:
        """``name_of``: category names by id; ``names``: class names, or None if all objects are of class 0."""
        self.name_of = name_of
        self._names = names
        self._ids = Ids(name_of, "the categories'")
        number_of_name = {name: i for i, name in enumerate(names or ())}
        self._class_of = {i: number_of_name[name] for i, name in name_of.items() if name in number_of_name}

    def id_of(self, annotation: dict) -> int | None:
        """Returns the id of an annotation's category, or None if the category does not exist."""
        return self._ids.find(annotation.get("category_id"))

    def class_of(self, category_id: int | None) -> int | None:
        """Returns the class index of a category, or None if the category is unknown or not in the names."""
        if self._names is None:
            return 0
        return None if category_id is None else self._class_of.get(category_id)

    def unknown_class(self, annotation: dict, position: int, corners: tuple[float, ...]) -> RowProblem:
        """Returns the problem of an annotation whose category is not a class."""
        category_id = self.id_of(annotation)
        if category_id is None:
            name = f"category_id {shown(annotation.get('category_id'))}"
            reason = self._ids.mismatch(annotation, "category_id")
        else:
            name = self.name_of[category_id]
            reason = f"'{name}' is not in the names{suggestion(name, self._names or ())}"
        return RowProblem(
            row_number=position, kind=UNKNOWN_CLASS, text=reason, consequence="left out", class_name=name, xyxy=corners
        )

    def check_used_names(self, used_ids: Set[int], path: Path) -> None:
        """Raises UserError if two categories with the name of one class have annotations, which pycocotools would score
        as two classes. ``used_ids``: category ids that occur in annotations."""
        used_id_of: dict[str, int] = {}
        for category_id in sorted(used_ids):
            name = self.name_of[category_id]
            if name in used_id_of and name in (self._names or ()):
                raise _same_name(name, used_id_of[name], category_id, path)
            used_id_of[name] = category_id


def checked_categories(categories: list[Any], path: Path) -> dict[int, str]:
    """Returns the category names, without outer spaces, by id. Raises UserError that names an invalid entry."""
    name_of: dict[int, str] = {}
    for position, category in enumerate(categories):
        location = f"{path}: categories[{position}]"
        if not isinstance(category, dict) or "id" not in category or "name" not in category:
            raise UserError(f"{location}: expected a category with id and name, got {shown(category)}")
        category_id, name = category["id"], category["name"]
        if type(category_id) is float and category_id.is_integer():
            category_id = int(category_id)
        if type(category_id) is not int:
            kind = " is a string" if isinstance(category_id, str) else ""
            raise UserError(f"{location}: id {shown(category_id)}{kind}; category ids must be integers")
        if type(name) not in (str, int, float):
            raise UserError(f"{location}: name {shown(name)} is not a string")
        if not str(name).strip():
            raise UserError(f"{location}: name {shown(name)} is empty; give the category a name")
        if category_id in name_of:
            raise UserError(f"{location}: has the id {category_id} of '{name_of[category_id]}'; ids must be unique")
        name_of[category_id] = str(name).strip()  # like the names in the YAML
    return name_of


def category_names(paths: Sequence[Path]) -> tuple[str, ...]:
    """Returns the names of the first COCO JSON's categories, ordered by id. Raises UserError if they are invalid.

    A category that all others name as their supercategory, and that has no box in any of the files, is not a class:
    exports of Roboflow begin with such a root. Only the categories are parsed, because the files are large.
    """
    categories: Sequence[dict] = _categories_of(paths[0]).categories
    root = _root_category(categories, paths)
    if root is not None:
        message = "%s: the category '%s' has no boxes and is the supercategory of all others: it is not a class"
        get_logger().info(message, paths[0], root["name"])
        categories = [category for category in categories if category is not root]
    id_of: dict[str, int] = {}
    for category in categories:
        name = str(category["name"]).strip()
        if name in id_of:
            raise _same_name(name, id_of[name], category["id"], paths[0])
        id_of[name] = category["id"]
    return tuple(id_of)


class _CategoryList(NamedTuple):
    """The categories of a COCO JSON."""

    categories: tuple[dict, ...]  # ordered by id
    used_ids: frozenset[str]  # ids in annotations, as strings; empty if no category can be Roboflow's root

    def has_boxes(self, category: dict) -> bool:
        """Returns whether an annotation has this category, whose id may differ between files."""
        kind = _kind_of(category)
        return any(_kind_of(other) == kind and str(int(other["id"])) in self.used_ids for other in self.categories)


@once_per_file
def _categories_of(path: Path) -> _CategoryList:
    """Reads the categories of a COCO JSON. Raises UserError."""
    text = read_json(path, COCO_JSON)
    categories = tuple(_sorted_categories(text, path))
    supercategories = {parent for name, parent in map(_kind_of, categories) if parent != name}
    may_have_root = len(categories) == 1 or any(category["name"] in supercategories for category in categories)
    used_ids = frozenset(_CATEGORY_ID.findall(text)) if may_have_root else frozenset()
    return _CategoryList(categories, used_ids)


def _kind_of(category: dict) -> tuple[Any, Any]:
    """Returns the name and supercategory, which identify a category across files. A supercategory that cannot be a name
    is None."""
    parent = category.get("supercategory")
    return category["name"], parent if isinstance(parent, (str, int, float)) else None


def _root_category(categories: Sequence[dict], paths: Sequence[Path]) -> dict | None:
    """Returns the category that all others name as their supercategory and that has no box, or None."""
    files = [path for path in dict.fromkeys(paths) if path.is_file()]
    for root in categories:
        others = [category for category in categories if category is not root]
        is_root = bool(others) and all(category.get("supercategory") == root["name"] for category in others)
        if is_root and not any(_categories_of(path).has_boxes(root) for path in files):
            return root
    return None


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
            return sorted(categories, key=lambda c: c["id"])
        # Otherwise this is another key of the same name, such as one in "info".
    raise UserError(f"{path}: has no categories to take the names from; is it a COCO JSON?")


def _same_name(name: str, first: int, second: int, path: Path) -> UserError:
    return UserError(
        f"{path}: categories: '{one_line(name)}' is the name of the ids {first} and {second}; rename one, or give the "
        "annotations of both the same category_id"
    )
