"""Reads COCO detection JSON: one file per split, boxes as x, y, w, h in pixels, classes matched by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from data.labels.categories import Category
from data.labels.findings import BAD_ROW, NOT_FINITE, UNKNOWN_CLASS
from data.labels.image_entries import ImageEntry
from data.labels.label_format import TOP_LEFT, LabelFiles, LabelFormat, LabelRequest, LabelSource
from data.labels.per_split import LabelsPerSplit, SplitFile
from data.labels.rows import LabelRow, RawLabels, RowProblem, shape_of
from utils.errors import UserError, one_line
from utils.files.once_per_file import once_per_file
from utils.files.paths import path_of
from utils.files.safe_io import read_text
from utils.logger import get_logger
from utils.schema import suggestion

_EXPECTED = "a COCO JSON: expected images, annotations and categories"
_MAX = 1e300  # larger numbers count as infinite
_MAX_SIDE = 2**32  # pixels; no format of images stores a larger one
_FIRST_LIST = re.compile(rb'"(annotations|images)"\s*:\s*\[\s*\{')
_CATEGORY_ID = re.compile(r'"category_id"\s*:\s*"?(-?\w+)')
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,18}(\.0*)?")
_NUMBERS_OF_BOX = 8  # length of a polygon with four corners
_COMPARED = 6  # numbers at each end of a polygon that distinguish it from others
Id = TypeVar("Id", bound=int | str)


class Ids(Generic[Id]):
    """Looks up the ids with which annotations refer to images or categories. An integer, an integral float and a string
    with the same number are the same id if only one entry has that number."""

    def __init__(self, ids: Iterable[Id], owner: str) -> None:
        """``owner``: "the images'", for messages."""
        self._ids = frozenset(ids)
        self._owner = owner
        self._ids_by_number: dict[int, list[Id]] | None = None

    def find(self, value: Any) -> Id | None:
        """Returns the id that ``value``, from a JSON file, refers to, or None if no id or several match."""
        if type(value) in (int, str) and value in self._ids:
            return value
        number = _whole_number(value)
        if number is None:
            return None
        fits = self._by_number(number)
        return fits[0] if len(fits) == 1 else None

    def _by_number(self, number: int) -> list[Id]:
        """Returns the ids that are this number or a string of it."""
        if self._ids_by_number is None:
            self._ids_by_number = {}
            for entry_id in self._ids:
                number_of_id = _whole_number(entry_id)
                if number_of_id is not None:
                    self._ids_by_number.setdefault(number_of_id, []).append(entry_id)
        return self._ids_by_number.get(number, [])

    def mismatch(self, value: Any) -> str:
        """Returns why ``value`` refers to no entry, as text to follow the key."""
        shown = _shown(value)
        if not self._ids:
            return f"{shown} is of an empty list: {self._owner} ids are missing"
        are_numbers = not any(isinstance(entry_id, str) for entry_id in self._ids)
        are_text = not any(isinstance(entry_id, int) for entry_id in self._ids)
        if isinstance(value, str) and are_numbers:
            return f"{shown} is a string; {self._owner} ids are numbers"
        if isinstance(value, int | float) and are_text:
            return f"{shown} is a number; {self._owner} ids are strings"
        number = _whole_number(value)
        if number is not None and len(self._by_number(number)) > 1:
            return f"{shown} matches several of {self._owner} ids"
        return f"{shown} is not among {self._owner} ids"


def _whole_number(value: Any) -> int | None:
    """Returns the integer that ``value`` is or, as a string, contains; None for other values."""
    if type(value) is int:
        return value
    if type(value) is float:
        return int(value) if value.is_integer() else None
    if type(value) is str and _WHOLE_NUMBER.fullmatch(value):
        return int(value.partition(".")[0])
    return None


class _Categories:
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
            name = f"category_id {_shown(annotation.get('category_id'))}"
            reason = _mismatch(annotation, "category_id", self._ids)
        else:
            name = self.name_of[category_id]
            reason = f"'{name}' is not in the names{suggestion(name, self._names or ())}"
        return RowProblem(
            row_number=position, kind=UNKNOWN_CLASS, text=reason, consequence="left out", class_name=name, xyxy=corners
        )


def read_coco(path: Path, names: tuple[str, ...] | None) -> SplitFile:
    """Reads a COCO JSON. If ``names`` is None, every object is of class 0. Raises UserError for any other file."""
    data = load_json(path, _EXPECTED)
    if not isinstance(data, dict):
        raise UserError(f"{path}: not {_EXPECTED}")
    for key in ("images", "annotations", "categories"):
        if not isinstance(data.get(key), list):
            raise UserError(f"{path}: has no list '{key}'; is it a COCO JSON for detection?")
    annotations = data["annotations"]
    entry_of = _image_entries(data["images"], path)
    image_ids = Ids(entry_of, "the images'")
    categories = _Categories(_checked_categories(data["categories"], path), names)
    strays = []
    used_categories: set[int] = set()
    for position, annotation in enumerate(annotations):
        if not isinstance(annotation, dict):
            strays.append((position, f"expected keys and values, got {_shown(annotation)}"))
            continue
        image_id = image_ids.find(annotation.get("image_id"))
        if image_id is None:
            strays.append((position, _mismatch(annotation, "image_id", image_ids)))
            continue
        category_id = categories.id_of(annotation)
        if category_id is not None:
            used_categories.add(category_id)
        entry_of[image_id].labels.add(_parse_annotation(annotation, position, category_id, categories))
    if names is not None:
        _check_used_names(categories.name_of, names, used_categories, path)
    return SplitFile(
        images=list(entry_of.values()),
        categories=tuple(Category(i, name, i in used_categories) for i, name in sorted(categories.name_of.items())),
        annotation_ids=[a.get("id", i) if isinstance(a, dict) else i for i, a in enumerate(annotations)],
        strays=strays,
    )


def _image_entries(images: list[Any], path: Path) -> dict[int | str, ImageEntry]:
    """Returns the image entries by id, without labels. Raises UserError that names an invalid entry."""
    entry_of: dict[int | str, ImageEntry] = {}
    position_of: dict[int | str, int] = {}
    for position, image in enumerate(images):
        location = f"{path}: images[{position}]"
        if not isinstance(image, dict) or not isinstance(image.get("file_name"), str) or image.get("id") is None:
            raise UserError(f"{location}: expected an image with id and file_name, got {_shown(image)}")
        image_id = image["id"]
        if type(image_id) is float and image_id.is_integer():
            image_id = int(image_id)
        if type(image_id) not in (int, str):
            raise UserError(f"{location}: id {_shown(image_id)} is neither an integer nor a string")
        if image_id in entry_of:
            raise UserError(
                f"{location}: has the id {_shown(image_id)} of images[{position_of[image_id]}]; ids must be unique"
            )
        position_of[image_id] = position
        file_name = image["file_name"].replace("\\", "/")
        entry_of[image_id] = ImageEntry(file_name, image_id, RawLabels([], [], _size(image)))
    return entry_of


def _mismatch(annotation: dict, key: str, ids: Ids) -> str:
    """Returns why ``key`` of an annotation is not among ``ids``."""
    return f"{key} {ids.mismatch(annotation[key])}" if key in annotation else f"has no {key}"


def _checked_categories(categories: list[Any], path: Path) -> dict[int, str]:
    """Returns the category names, without outer spaces, by id. Raises UserError that names an invalid entry."""
    name_of: dict[int, str] = {}
    for position, category in enumerate(categories):
        location = f"{path}: categories[{position}]"
        if not isinstance(category, dict) or "id" not in category or "name" not in category:
            raise UserError(f"{location}: expected a category with id and name, got {_shown(category)}")
        category_id, name = category["id"], category["name"]
        if type(category_id) is float and category_id.is_integer():
            category_id = int(category_id)
        if type(category_id) is not int:
            kind = " is a string" if isinstance(category_id, str) else ""
            raise UserError(f"{location}: id {_shown(category_id)}{kind}; category ids must be integers")
        if type(name) not in (str, int, float):
            raise UserError(f"{location}: name {_shown(name)} is not a string")
        if not str(name).strip():
            raise UserError(f"{location}: name {_shown(name)} is empty; give the category a name")
        if category_id in name_of:
            raise UserError(f"{location}: has the id {category_id} of '{name_of[category_id]}'; ids must be unique")
        name_of[category_id] = str(name).strip()  # like the names in the YAML
    return name_of


def _shown(value: Any) -> str:
    """Returns a value as JSON, for messages."""
    return one_line(json.dumps(value, ensure_ascii=False))[:100]


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
        return any(_kind_of(other) == kind and str(other["id"]) in self.used_ids for other in self.categories)


@once_per_file
def _categories_of(path: Path) -> _CategoryList:
    """Reads the categories of a COCO JSON. Raises UserError."""
    text = read_json(path, _EXPECTED)
    categories = tuple(_sorted_categories(text, path))
    supercategories = {parent for name, parent in map(_kind_of, categories) if parent != name}
    may_have_root = len(categories) == 1 or any(category["name"] in supercategories for category in categories)
    used_ids = frozenset(_CATEGORY_ID.findall(text)) if may_have_root else frozenset()
    return _CategoryList(categories, used_ids)


def _kind_of(category: dict) -> tuple[Any, Any]:
    """Returns the name and supercategory, which identify a category across files."""
    return category["name"], category.get("supercategory")


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
            _checked_categories(categories, path)
            return sorted(categories, key=lambda c: c["id"])
        # Otherwise this is another key of the same name, such as one in "info".
    raise UserError(f"{path}: has no categories to take the names from; is it a COCO JSON?")


def _check_used_names(name_of: dict[int, str], names: Sequence[str], used_ids: Set[int], path: Path) -> None:
    """Raises UserError if two categories with the name of one class have annotations, which pycocotools would score as
    two classes. ``name_of``: category names by id; ``used_ids``: category ids that occur in annotations."""
    used_id_of: dict[str, int] = {}
    for category_id in sorted(used_ids):
        name = name_of[category_id]
        if name in used_id_of and name in names:
            raise _same_name(name, used_id_of[name], category_id, path)
        used_id_of[name] = category_id


def _same_name(name: str, first: int, second: int, path: Path) -> UserError:
    return UserError(
        f"{path}: categories: '{one_line(name)}' is the name of the ids {first} and {second}; rename one, or give the "
        "annotations of both the same category_id"
    )


def _size(image: dict) -> tuple[int, int] | None:
    """Returns the height and width that the labels state; None if they state none, or what no image can have."""
    height, width = (_whole_number(image.get(side)) for side in ("height", "width"))
    if height is None or width is None or not (0 < height < _MAX_SIDE and 0 < width < _MAX_SIDE):
        return None
    return height, width


def _parse_annotation(
    annotation: dict, position: int, category_id: int | None, categories: _Categories
) -> LabelRow | RowProblem:
    """Returns the row of an annotation, or its problem.

    Args:
        annotation: an entry of the JSON's ``annotations``, at ``position``.
        category_id: id of the annotation's category in ``categories``; None if it is unknown or missing.
    """
    box = annotation.get("bbox")
    if not (isinstance(box, list) and len(box) == 4 and all(type(v) in (int, float) for v in box)):
        expected = "expected a bbox of four numbers"
        return RowProblem(position, BAD_ROW, f"{expected}, got {_shown(box)[:60]}", cause=expected)
    if not all(-_MAX < v < _MAX for v in box):  # not isfinite, because JSON integers may be too large for a float
        return RowProblem(position, NOT_FINITE, f"bbox {str(box)[:100]}")
    x, y, w, h = box
    corners = (x, y, x + w, y + h)
    class_id = categories.class_of(category_id)
    if class_id is None:
        return categories.unknown_class(annotation, position, corners)
    crowd = annotation.get("iscrowd")
    if crowd not in (0, 1, None):
        expected = "expected iscrowd 0 or 1"
        return RowProblem(position, BAD_ROW, f"{expected}, got {_shown(crowd)[:60]}", cause=expected)
    area = annotation.get("area")
    if not isinstance(area, int | float) or not 0 <= area < _MAX:
        area = w * h
    return class_id, *corners, area, 1 if crowd else 0, position, _shape(annotation.get("segmentation"))


def _shape(segmentation: Any) -> int:
    """Returns the `shape_of` polygons, computed from both ends of the first one; 0 for other values."""
    if not isinstance(segmentation, list) or not segmentation or not isinstance(segmentation[0], list):
        return 0
    first = segmentation[0]
    ends = (*first[:_COMPARED], *first[-_COMPARED:])
    if not all(type(value) in (int, float) for value in ends):
        return 0
    if len(first) == _NUMBERS_OF_BOX and len(set(first[::2])) == len(set(first[1::2])) == 2:
        return 0  # the box itself
    return shape_of((len(segmentation), len(first), *ends))


def _read(request: LabelRequest) -> LabelSource:
    path = Path(path_of(request.files[0].name, request.root))
    return LabelsPerSplit(request, read_coco(path, request.names))


def load_json(path: Path, expected: str) -> dict[str, Any] | list[Any]:
    """Reads a JSON file that contains an object or a list. Raises UserError if it is malformed or an object repeats a
    key. ``expected``: description of the expected file, for the message about another kind of file."""
    text = read_json(path, expected)
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: malformed JSON ({error.msg}, column {error.colno})") from None
    except ValueError as error:  # a repeated key, or a number of thousands of digits
        raise UserError(f"{path}: malformed JSON ({str(error).split(';')[0]})") from None
    except RecursionError:
        raise UserError(f"{path}: malformed JSON (nested too deeply)") from None


def read_json(path: Path, expected: str) -> str:
    """Reads the text of a file. Raises UserError unless it begins like a JSON object or list."""
    text = read_text(path)
    if not text[:4096].lstrip().startswith(("{", "[")):
        raise UserError(f"{path}: not {expected}")
    return text


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a dict. Raises ValueError for a repeated key, for which ``json`` would silently use the last value."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise ValueError(f"the key '{twice[:60]}' is used twice in one object")
    return content


def is_coco(head: bytes) -> bool:
    """Returns whether a file that begins with ``head`` seems to be a COCO JSON with annotations or images."""
    return _FIRST_LIST.search(head) is not None


_FILES = LabelFiles(suffix=".json", is_labels=is_coco, advice="if it is COCO's, add 'annotations: {entry}' to the YAML")
COCO = LabelFormat("coco", TOP_LEFT, _read, _FILES, class_names=category_names)
