"""COCO detection JSON: one file per split, boxes as x, y, w, h in pixels, classes matched by name.

`LabelsPerSplit` is for other formats with one file per split, too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data.labels.clean import TOP_LEFT, RawLabels, RowProblem
from data.labels.findings import ABSENT, BAD_ROW, NOT_FINITE, STRAY, UNKNOWN_CLASS, UNLISTED, Finding
from data.labels.image_names import ImageNames
from data.labels.label_format import ImageFile, LabelFile, LabelFormat
from utils.errors import UserError, one_line
from utils.files.paths import path_of
from utils.files.safe_io import read_text
from utils.files.schema import suggestion
from utils.logger import get_logger
from utils.strings import counted

_EXPECTED = "a COCO JSON: expected images, annotations and categories"
_MAX = 1e300  # larger numbers count as infinite


class ImageEntry(NamedTuple):
    """An image in the label file of a split. Lines of its labels are positions in the list of annotations."""

    file_name: str  # with /
    image_id: int | str
    labels: RawLabels


class SplitFile(NamedTuple):
    """The content of a label file of a split, with classes matched by name."""

    images: list[ImageEntry]
    category_ids: tuple[int, ...]  # by class; an unused id for a class that the file does not have
    annotation_ids: Sequence[Any]  # by position
    strays: list[tuple[int, str]]  # positions of annotations without an image, and the reason


def read_coco(path: Path, names: tuple[str, ...] | None) -> SplitFile:
    """With ``names`` None every object is of class 0. Raises UserError if the file is not a COCO JSON."""
    data = load_json(path, _EXPECTED)
    if not isinstance(data, dict):
        raise UserError(f"{path}: not {_EXPECTED}")
    keys = ("images", "annotations", "categories")
    if missing := [key for key in keys if not isinstance(data.get(key), list)]:
        raise UserError(f"{path}: has no list of '{missing[0]}'; is it a COCO JSON of detection?")
    images, annotations, categories = (data[key] for key in keys)
    try:
        category_name = {_typed(c["id"], int): str(_typed(c["name"], str, int, float)) for c in categories}
        found = {
            _typed(i["id"], int, str): ImageEntry(
                i["file_name"].replace("\\", "/"), i["id"], RawLabels([], [], _size(i))
            )
            for i in images
        }
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: an image without id and file_name, or a category without id and name") from None
    if len(found) < len(images):
        raise UserError(f"{path}: two images have the same id; ids must be unique")
    if len(category_name) < len(categories):
        raise UserError(f"{path}: two categories have the same id; ids must be unique")
    number = {name: i for i, name in enumerate(names or ())}
    class_of = {i: 0 if names is None else number.get(n, n) for i, n in category_name.items()}
    strays = []
    for position, annotation in enumerate(annotations):
        image_id = annotation.get("image_id") if isinstance(annotation, dict) else None
        image = found.get(image_id) if type(image_id) in (int, str) else None
        if image is None:
            strays.append((position, "its image_id is not among the images"))
            continue
        image.labels.add(_parse_annotation(annotation, position, class_of, names or ()))
    annotation_ids = [a.get("id", i) if isinstance(a, dict) else i for i, a in enumerate(annotations)]
    return SplitFile(list(found.values()), _category_ids(category_name, names), annotation_ids, strays)


def _typed(value: Any, *kinds: type) -> Any:
    """``value``. Raises TypeError unless its type is one of ``kinds``; unlike for isinstance, a bool is not an int."""
    if type(value) not in kinds:
        raise TypeError
    return value


def category_names(paths: Sequence[Path]) -> tuple[str, ...]:
    """The names of the first COCO JSON's categories, by id. Raises UserError.

    A category that all others name as their supercategory, and that has no box in any of the files, is not a class:
    exports of Roboflow begin with such a root. Only the categories are parsed: the files are large.
    """
    categories = _categories(read_json(paths[0], _EXPECTED), paths[0])
    for root in categories if len(categories) > 1 else ():
        others = [c for c in categories if c is not root]
        is_root = all(c.get("supercategory") == root["name"] for c in others)
        if is_root and not any(_has_boxes(root, path) for path in dict.fromkeys(paths) if path.is_file()):
            text = "%s: the category '%s' has no boxes and is the supercategory of all others: it is not a class"
            get_logger().info(text, paths[0], root["name"])
            return tuple(str(c["name"]) for c in others)
    return tuple(str(c["name"]) for c in categories)


def _has_boxes(category: dict, path: Path) -> bool:
    """Whether an annotation of a file has this category, whose id may differ from file to file."""
    text = read_json(path, _EXPECTED)
    kind = category["name"], category.get("supercategory")
    ids = [c["id"] for c in _categories(text, path) if (c["name"], c.get("supercategory")) == kind]
    return any(re.search(rf'"category_id"\s*:\s*{re.escape(str(i))}\b', text) for i in ids)


def _categories(text: str, path: Path) -> list[dict]:
    """The categories in the text of a COCO JSON, by id. Raises UserError."""
    decoder = json.JSONDecoder()
    for match in re.finditer(r'(?<!\\)"categories"\s*:\s*(?=\[)', text):
        try:
            categories, _ = decoder.raw_decode(text, match.end())
            return sorted(categories, key=lambda c: (c["id"], str(c["name"])))
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # another key of this name, such as in "info"
    raise UserError(f"{path}: has no categories to take the names from; is it a COCO JSON?")


def _category_ids(category_name: dict[int, str], names: tuple[str, ...] | None) -> tuple[int, ...]:
    if names is None:
        return (min(category_name, default=0),)
    id_of = {name: i for i, name in sorted(category_name.items())}  # Roboflow's root, first, may be called like a class
    unused = max(category_name, default=-1) + 1
    return tuple(id_of.get(name, unused + k) for k, name in enumerate(names))


def _size(image: dict) -> tuple[int, int] | None:
    height, width = image.get("height"), image.get("width")
    return (height, width) if isinstance(height, int) and isinstance(width, int) and height > 0 < width else None


def _parse_annotation(annotation: dict, position: int, class_of: dict, names: tuple[str, ...]) -> tuple | RowProblem:
    box = annotation.get("bbox")
    if not (isinstance(box, list) and len(box) == 4 and all(type(v) in (int, float) for v in box)):
        return RowProblem(position, BAD_ROW, f"expected a bbox of four numbers, got {str(box)[:60]}")
    if not all(-_MAX < v < _MAX for v in box):  # not isfinite: there are integers that no float holds
        return RowProblem(position, NOT_FINITE, f"bbox {str(box)[:100]}")
    x, y, w, h = box
    corners, category = (x, y, x + w, y + h), annotation.get("category_id")
    if type(category) is not int or category not in class_of:
        text = f"category {str(category)[:60]} is not among the categories; left out"
        return RowProblem(position, UNKNOWN_CLASS, text, xyxy=corners)
    class_id = class_of[category]
    if isinstance(class_id, str):
        text = f"'{class_id}' is not in the names{suggestion(class_id, names)}; left out"
        return RowProblem(position, UNKNOWN_CLASS, text, xyxy=corners)
    crowd = annotation.get("iscrowd")
    if crowd not in (0, 1, None):
        return RowProblem(position, BAD_ROW, f"expected iscrowd 0 or 1, got {str(crowd)[:60]}")
    area = annotation.get("area")
    if not isinstance(area, int | float) or not 0 <= area < _MAX:
        area = w * h
    return class_id, *corners, area, 1 if crowd else 0, position


class LabelsPerSplit:
    """A `LabelSource` of one file per split, in pixels. Images that it does not name are left out."""

    normalized = False

    def __init__(self, name: str, images: list[ImageFile], file: SplitFile) -> None:
        """Matches by ``file_name`` in the split's folder, else as `ImageNames` does. ``name``: of the file, relative to
        the data set's folder. Raises UserError if the file names none of ``images``; those of other splits, which it
        may name, too, do not count."""
        self._name, self.category_ids, self._annotation_ids = name, file.category_ids, file.annotation_ids
        self.findings = [Finding(self._annotation(p), STRAY, text, lost_objects=1) for p, text in file.strays]
        entry_of, reasons = _match(file.images, images)
        for number, reason in reasons.items():
            entry = file.images[number]
            self.findings.append(self._absent(entry, f"{entry.file_name} {reason}"))
        own = [i for i, image in enumerate(images) if image.stamp is not None]
        listed = [i for i in own if i in entry_of]
        unlisted = [images[i].name for i in own if i not in entry_of]
        self.findings += [Finding(image, UNLISTED, f"left out: {name} doesn't name it") for image in unlisted]
        if not listed:
            first = f" (first: {one_line(file.images[0].file_name)[:200]})" if file.images else ""
            raise UserError(
                f"{name}: names {counted(len(file.images), 'image')}{first}, none of which is among the split's "
                f"{len(own)} (first: {images[own[0]].key}); check 'annotations' against the split's folder"
            )
        self.images = [images[i] for i in listed]
        self._entries = [entry_of[i] for i in listed]
        self.image_ids = [entry.image_id for entry in self._entries]

    def _absent(self, entry: ImageEntry, text: str) -> Finding:
        """The finding about an image of the file that the split does not have."""
        objects = len(entry.labels.rows) + len(entry.labels.problems)
        where = f"{self._name}: image {entry.image_id}"
        return Finding(where, ABSENT, text, lost_images=int(objects > 0), lost_objects=objects)

    def read(self, i: int) -> RawLabels | None:
        return self._entries[i].labels

    def where(self, i: int, line: int | None = None) -> str:
        return f"{self._name}: image {self.image_ids[i]}" if line is None else self._annotation(line)

    def _annotation(self, position: int) -> str:
        return f"{self._name}: annotation {self._annotation_ids[position]}"


def _match(entries: Sequence[ImageEntry], images: Sequence[ImageFile]) -> tuple[dict[int, ImageEntry], dict[int, str]]:
    """Returns the entry of each image that has one, by the image's position; and by the position of each other entry,
    why it has no image."""
    by_key = {image.key: i for i, image in enumerate(images)}
    entry_of: dict[int, ImageEntry] = {}
    others: list[int] = []
    for number, entry in enumerate(entries):
        i = by_key.get(os.path.normpath(entry.file_name))
        if i is None or i in entry_of:
            others.append(number)
        else:
            entry_of[i] = entry
    names = ImageNames([image.name for image in images])
    fits = {number: names.find(entries[number].file_name) for number in others}
    # A file of several splits may name images of another one that has the same file names in another folder.
    agreement = {n: names.agreement(entries[n].file_name, each[0]) for n, each in fits.items() if len(each) == 1}
    for number in sorted(agreement, key=lambda number: (-agreement[number], number)):
        entry_of.setdefault(fits[number][0], entries[number])
    reasons = {}
    for number, positions in fits.items():
        if len(positions) > 1:
            shown = f"{images[positions[0]].name} and {images[positions[1]].name}"
            reasons[number] = f"fits {len(positions)} of the split's images, such as {shown}"
        elif not positions:
            other = names.same_stem(entries[number].file_name)
            reasons[number] = "is not among the split's images" + (f", but {other} is" if other else "")
        elif entry_of[positions[0]] is not entries[number]:
            reasons[number] = f"would be {images[positions[0]].name}, which another entry names"
    return entry_of, reasons


def _read(images: list[ImageFile], files: list[LabelFile], root: Path, names: tuple[str, ...] | None) -> LabelsPerSplit:
    return LabelsPerSplit(files[0].name, images, read_coco(Path(path_of(files[0].name, root)), names))


def load_json(path: Path, expected: str) -> dict[str, Any] | list[Any]:
    """The content of a JSON file, an object or a list. Raises UserError, also if an object has a repeated key.
    ``expected``: what the file should be, for the message about a file of another kind."""
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
    """The text of a file that begins like a JSON object or list. Raises UserError."""
    text = read_text(path)
    if not text[:4096].lstrip().startswith(("{", "[")):
        raise UserError(f"{path}: not {expected}")
    return text


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError for a repeated key, of which ``json`` would silently take the last."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise ValueError(f"the key '{twice[:60]}' is used twice in one object")
    return content


COCO = LabelFormat("coco", TOP_LEFT, _read, class_names=category_names)
