"""Reads CSV files with one row per object, from Roboflow, TensorFlow and Open Images."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from tools.convert.annotations import AnnotatedBox, Annotations, Entry
from tools.convert.values import MAX_FILE_BYTES, image_name, image_size, number, parse_flag, parse_size
from utils.errors import UserError
from utils.files.encoding import decode_loosely
from utils.files.safe_io import open_regular, read_text

MAX_FRACTION = 2.0  # boxes may end outside the image, but not by more than its size
_MAX_HEADER = 1 << 16  # characters
_CORNERS = ("xmin", "ymin", "xmax", "ymax")
_REQUIRED = ("image", "name", *_CORNERS)
# Names of columns in files, in lower case and without "_", by content. The first name has precedence.
_COLUMNS = {
    "image": ("filename", "imageid", "image", "path", "file"),
    "name": ("class", "labelname", "label", "name"),
    "width": ("width",),
    "height": ("height",),
    "xmin": ("xmin", "x1"),
    "ymin": ("ymin", "y1"),
    "xmax": ("xmax", "x2"),
    "ymax": ("ymax", "y2"),
    "crowd": ("isgroupof",),
}


def read_csv(file: Path, annotations: Annotations) -> None:
    """Adds the objects of Roboflow's and TensorFlow's ``_annotations.csv`` (corners in pixels), and of Open Images
    (``ImageID``; corners as fractions; ``LabelName``, an id whose name is in a ``class-descriptions`` file next to the
    CSV; ``IsGroupOf`` 1 makes a region to ignore)."""
    text = read_text(file, max_bytes=MAX_FILE_BYTES)
    rows = csv.DictReader(io.StringIO(text, newline=None), delimiter=_delimiter(text))
    try:
        objects = _Objects(file, rows.fieldnames or (), annotations)
        for row in rows:
            objects.add(row, f"{file}:{rows.line_num}")
    except csv.Error as error:
        raise UserError(f"{file}:{rows.line_num + 1}: malformed CSV ({error})") from None
    objects.check_unit()


class _Objects:
    """Adds the rows of a CSV to the annotations."""

    def __init__(self, file: Path, header: Sequence[str], annotations: Annotations) -> None:
        """Raises UserError if a column is missing in the ``header``."""
        self._file = file
        self._annotations = annotations
        self._num_columns = len(header)
        self._columns = _known_columns(header)
        missing = [name for name in _REQUIRED if name not in self._columns]
        if missing:
            raise UserError(f"{file}:1: no column for {', '.join(missing)}; expected a header and one row per object")
        self._is_open_images = self._columns["image"].lower() == "imageid"
        self._class_names = _class_descriptions(file) if self._is_open_images else {}  # by id
        self._sizes: dict[Path, tuple[int, int]] = {}  # an image has many rows
        self._largest_corner = 0.0

    def add(self, row: Mapping[str | None, Any], location: str) -> None:
        """Adds the object of a row. Raises UserError, which begins with ``location``."""
        if None in row or None in row.values():
            num_fields = sum(value is not None for value in row.values())
            raise UserError(f"{location}: {num_fields} fields, expected {self._num_columns}")
        cells = {name: row[column] for name, column in self._columns.items()}
        image_name(cells["image"], location)
        if not cells["name"] and not cells["xmin"]:  # an image without objects
            self._annotations.add(Entry(image=cells["image"], boxes=(), location=location, file=self._file))
            return
        x1, y1, x2, y2 = (number(cells[name], f"{location}: {name}") for name in _CORNERS)
        self._largest_corner = max(self._largest_corner, x2, y2)
        crowd = "crowd" in cells and parse_flag(cells["crowd"], f"{location}: {self._columns['crowd']}")
        box = AnnotatedBox(cells["name"], x1, y1, x2, y2, crowd)
        make_entry = self._open_images_entry if self._is_open_images else self._pixel_entry
        self._annotations.add(make_entry(cells, box, location))

    def _pixel_entry(self, cells: Mapping[str, str], box: AnnotatedBox, location: str) -> Entry:
        """Returns the entry of a row with a ``box`` in pixels."""
        size = parse_size(cells.get("width"), cells.get("height"), location)
        return Entry(image=cells["image"], boxes=[box], location=location, file=self._file, size=size)

    def _open_images_entry(self, cells: Mapping[str, str], box: AnnotatedBox, location: str) -> Entry:
        """Returns the entry of a row of Open Images: ``box`` has a class id, and fractions of the image's size."""
        image = self._annotations.source_images.find(cells["image"], location, self._file)
        size = self._size_of(image, location)
        width, height = size
        box = box._replace(
            name=self._class_names.get(box.name, box.name),
            x1=box.x1 * width,
            y1=box.y1 * height,
            x2=box.x2 * width,
            y2=box.y2 * height,
        )
        return Entry(image=image, boxes=[box], location=location, file=self._file, size=size)

    def check_unit(self) -> None:
        """Raises UserError if the corners of all rows seem to have another unit than the columns imply."""
        largest = self._largest_corner
        if self._is_open_images and largest > MAX_FRACTION:
            raise UserError(
                f"{self._file}: has a corner at {largest:g}; with a column ImageID, corners are fractions of the "
                "image's size; call it filename if they are pixels"
            )
        if not self._is_open_images and 0 < largest <= 1:
            raise UserError(
                f"{self._file}: no corner is above 1; fractions of the image's size are read with a column ImageID"
            )

    def _size_of(self, image: Path, location: str) -> tuple[int, int]:
        """Returns width and height of an image file; of a damaged one, which training leaves out, those in its header.
        Raises UserError, which begins with ``location``, if the header is damaged, too."""
        if image not in self._sizes:
            try:
                self._sizes[image] = image_size(image)
            except UserError as error:
                size = _size_in_header(image)
                if size is None:
                    raise UserError(f"{location}: {error}") from None
                self._sizes[image] = size
        return self._sizes[image]


def _size_in_header(image: Path) -> tuple[int, int] | None:
    """Returns width and height in the header of an image file, or None if there are none."""
    try:
        with Image.open(image) as opened:
            return opened.size
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):  # Pillow's errors for damaged files
        return None


def _known_columns(header: Iterable[str]) -> dict[str, str]:
    """Returns the file's names of the known columns, by content."""
    column_of = {name.strip().lower().replace("_", ""): name for name in header}
    known: dict[str, str] = {}
    for key, names in _COLUMNS.items():
        present = [column_of[name] for name in names if name in column_of]
        if present:
            known[key] = present[0]
    return known


def _class_descriptions(file: Path) -> dict[str, str]:
    """Reads the names of Open Images' classes, by ids such as /m/01g317; FiftyOne stores them in a folder of their
    own."""
    names: dict[str, str] = {}
    for path in (*file.parent.glob("*class-descriptions*.csv"), *file.parent.parent.glob("metadata/classes.csv")):
        try:
            rows = list(csv.reader(io.StringIO(read_text(path))))
        except csv.Error as error:
            raise UserError(f"{path}: malformed CSV ({error})") from None
        names |= {row[0]: row[1] for row in rows if len(row) == 2}
    return names


def is_csv(head: str) -> bool:
    """Returns whether a file that begins with ``head`` has a header that `read_csv` supports."""
    header = csv.reader([_header(head).replace("\0", "")], delimiter=_delimiter(head))
    return {"image", "name", "xmin"} <= _known_columns(next(header, ())).keys()


def unknown_columns(files: Iterable[Path]) -> str:
    """Returns a message about the first CSV of ``files``, whose columns `read_csv` cannot read; "" without a CSV."""
    for file in files:
        if file.suffix.lower() == ".csv":
            with open_regular(file) as opened:
                header = _header(decode_loosely(opened.read(_MAX_HEADER)))
            expected = "filename, class, xmin, ymin, xmax, ymax, and one row per object"
            return f"{file}: begins with {header[:100]!r}; a CSV is read if it has a header with {expected}"
    return ""


def _delimiter(text: str) -> str:
    return max(",;\t", key=_header(text).count)


def _header(text: str) -> str:
    return (text[:_MAX_HEADER].splitlines() or [""])[0].strip()
