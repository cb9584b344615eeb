"""Pascal VOC XML: one file per image, objects with a name and the corners xmin, ymin, xmax, ymax in pixels.

Corners are used unchanged, as in annotation tools and converters to YOLO txt: the width is xmax - xmin, without the
shift by one of VOC's 1-based pixels. ``difficult`` objects are treated like all others.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from math import isfinite
from pathlib import Path
from xml.parsers import expat

from data.labels.clean import LabelFileError, RawLabels, RowProblem, is_plain_number_text
from data.labels.findings import BAD_ROW, NOT_FINITE, UNKNOWN_CLASS
from data.labels.label_format import CORNERS, ImageFile, LabelFile, LabelFormat, LabelPerImage, LabelSource
from utils.files.schema import suggestion

_CORNERS = ("xmin", "ymin", "xmax", "ymax")
_AMBIGUITY = ""  # key of an object's fields: why they are ambiguous
_MAX_DEPTH = 5  # deeper elements are not read


def parse_voc(data: bytes, class_ids: Mapping[str, int] | None) -> RawLabels:
    """Parses a file to rows in pixels, with the image size that the file states. Lines are those of ``<object>``.

    Args:
        data: the file's bytes.
        class_ids: by name; None: every object is of class 0.

    Raises LabelFileError if the file is not a VOC annotation.
    """
    reader = _Reader()
    reader.parse(data)
    labels = RawLabels([], [], reader.size_hw())
    for line, fields in reader.objects:
        labels.add(_parse_object(fields, line, class_ids))
    return labels


def object_names(data: bytes) -> set[str]:
    """The names of a file's objects; none of a file that is not a VOC annotation."""
    reader = _Reader()
    with contextlib.suppress(LabelFileError):
        reader.parse(data)
    return {name for _, fields in reader.objects if (name := fields.get("name"))}


class _Reader:
    """Collects fields of objects with their line numbers, which ElementTree does not provide."""

    def __init__(self) -> None:
        self.objects: list[tuple[int, dict[str, str]]] = []  # line, then name and corners as text
        self._size: dict[str, str] = {}
        self._path: list[str] = []
        self._boxes = 0  # in the current object
        self._text: list[str] = []
        self._parser = expat.ParserCreate()
        self._parser.buffer_text = True
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._text.append
        self._parser.EntityDeclHandler = self._refuse_entity

    def parse(self, data: bytes) -> None:
        try:
            self._parser.Parse(data, True)
        except expat.ExpatError as error:
            raise LabelFileError(f"{error.lineno}: malformed XML ({expat.ErrorString(error.code)})") from None
        except (ValueError, LookupError):  # raised by Python's codecs, which the parser uses
            raise LabelFileError("1: malformed XML (in an encoding that cannot be read)") from None

    def size_hw(self) -> tuple[int, int] | None:
        """The image's height and width; None if the file has none, or zeros, as some tools write."""
        try:
            size = int(self._size["height"]), int(self._size["width"])
        except (KeyError, ValueError):
            return None
        return size if min(size) > 0 else None

    def _start(self, tag: str, _attributes: dict) -> None:
        if not self._path and tag != "annotation":
            raise LabelFileError(f"{self._parser.CurrentLineNumber}: <{tag}> where VOC has <annotation>")
        if self._is_field(self._enclosing(), self._path[-1] if self._path else ""):
            self._mark_ambiguous(f"<{tag}> inside <{self._path[-1]}>")
        if self._path[1:_MAX_DEPTH] == ["object"] and tag == "bndbox":
            self._boxes += 1
            if self._boxes > 1:
                self._mark_ambiguous("two <bndbox>")
        self._path.append(tag)
        self._text.clear()
        if self._path[1:_MAX_DEPTH] == ["object"]:
            self.objects.append((self._parser.CurrentLineNumber, {}))
            self._boxes = 0

    def _enclosing(self) -> list[str]:
        """Path of the enclosing element below <annotation>, cut at `_MAX_DEPTH`."""
        return self._path[1 : min(len(self._path) - 1, _MAX_DEPTH)]

    def _refuse_entity(self, name: str, *_: object) -> None:
        """Refuses entities, which can include other files or expand to gigabytes."""
        raise LabelFileError(f"{self._parser.CurrentLineNumber}: declares the entity '{name}'")

    @staticmethod
    def _is_field(where: list[str], tag: str) -> bool:
        return (where == ["object"] and tag == "name") or (where == ["object", "bndbox"] and tag in _CORNERS)

    def _mark_ambiguous(self, what: str) -> None:
        self.objects[-1][1].setdefault(_AMBIGUITY, what)

    def _end(self, tag: str) -> None:
        where, text = self._enclosing(), "".join(self._text).strip()
        if where == ["size"]:
            self._size[tag] = text
        elif self._is_field(where, tag):
            if tag in self.objects[-1][1]:
                self._mark_ambiguous(f"two <{tag}>")
            self.objects[-1][1][tag] = text
        self._path.pop()
        self._text.clear()


def _parse_object(fields: dict[str, str], line: int, class_ids: Mapping[str, int] | None) -> tuple | RowProblem:
    if _AMBIGUITY in fields:
        return RowProblem(line, BAD_ROW, f"object with {fields[_AMBIGUITY]}")
    missing = [tag for tag in ("name", *_CORNERS) if not fields.get(tag)]
    if missing:
        return RowProblem(line, BAD_ROW, f"object without {', '.join(missing)}")
    try:
        if not all(is_plain_number_text(fields[tag]) for tag in _CORNERS):
            raise ValueError
        x1, y1, x2, y2 = (float(fields[tag]) for tag in _CORNERS)
    except ValueError:
        return RowProblem(line, BAD_ROW, f"corners are not numbers: {' '.join(fields[tag] for tag in _CORNERS)[:60]!r}")
    if not all(map(isfinite, (x1, y1, x2, y2))):
        return RowProblem(line, NOT_FINITE, f"corners {' '.join(fields[tag] for tag in _CORNERS)[:60]!r}")
    name = fields["name"]
    if class_ids is not None and name not in class_ids:
        text = f"'{name}' is not in the names{suggestion(name, class_ids)}; left out"
        return RowProblem(line, UNKNOWN_CLASS, text, xyxy=(x1, y1, x2, y2))
    class_id = 0 if class_ids is None else class_ids[name]
    return (class_id, x1, y1, x2, y2, (x2 - x1) * (y2 - y1), 0, line)


def _read(images: list[ImageFile], files: list[LabelFile], root: Path, names: tuple[str, ...] | None) -> LabelSource:
    class_ids = None if names is None else {name: i for i, name in enumerate(names)}
    return LabelPerImage(images, files, root, names, partial(parse_voc, class_ids=class_ids), normalized=False)


def _label_path(image: ImageFile, root: Path, annotations: Path, exists: Callable[[str], bool]) -> str:
    """Mirrors the image's path in the split's folder; if there is no such file, all XML files are in one folder."""
    path = os.path.join(annotations, os.path.splitext(image.key)[0] + ".xml")
    if exists(path):
        return path
    flat = os.path.join(annotations, os.path.basename(path))
    return flat if exists(flat) else path


VOC = LabelFormat("voc", CORNERS, _read, _label_path)
