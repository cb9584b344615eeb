"""Reads the exports of annotation tools: one function per format, and how to recognize its files.

The formats are read here because each takes a dozen lines, and the libraries that read them silently drop what is not a
rectangle (CVAT's polygons, LabelMe's circles), or names without suffixes (Open Images).
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from xml.etree import ElementTree

from data.image_io.verify import check_image
from data.labels.coco import load_json
from data.labels.image_names import loose
from tools.convert.annotations import (
    AnnotatedBox,
    Annotations,
    around,
    around_polygon,
    files_below,
    is_set,
    number,
    parse_row,
)
from tools.convert.hugging_face import read_image_folder, read_parquet
from utils.errors import UserError, one_line
from utils.files.encoding import decode_loosely
from utils.files.safe_io import open_regular, read_regular, read_text
from utils.files.schema import check
from utils.files.xml_files import XmlError, parse_xml

KITTI_FIELDS = 15  # a detection has one more, its score
MAX_FRACTION = 2.0  # boxes may end outside the image, but not by more than its size
_HEAD = 1 << 16  # bytes that suffice to recognize a format
_PARQUET = "PAR1"  # first bytes of a parquet file


class Format(NamedTuple):
    """A format of annotations, and how it is read."""

    title: str
    suffixes: tuple[str, ...]
    fits: Callable[[str], bool]  # whether a file with this beginning has the format
    read: Callable[[Path, Annotations], None]  # adds the objects of a file; raises UserError
    is_per_image: bool = False  # each image has a file of its name


def read_cvat(file: Path, into: Annotations) -> None:
    """Reads CVAT for images 1.1 and for video 1.1: rectangles, and the boxes around polygons, ellipses and masks."""
    try:
        root = parse_xml(read_regular(file, most=1 << 32))
    except XmlError as error:
        raise UserError(f"{file}:{error}") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None
    for image in root.iter("image"):
        name = image.get("name", "")
        location = f"{file}: image {one_line(name)[:100]!r}"
        boxes = [_cvat_box(shape, location, into) for shape in image if _is_cvat_shape(shape)]
        into.add(
            name, boxes, location=location, near=file, split=image.get("subset", ""), size=_size(image.attrib, location)
        )
    frames: dict[int, list[AnnotatedBox | None]] = {}
    for track in root.iter("track"):
        location = f"{file}: track {track.get('id', '')}"
        for shape in track:
            if shape.get("outside") != "1":
                shape.set("label", track.get("label", ""))
                frames.setdefault(int(number(shape.get("frame"), location)), []).append(
                    _cvat_box(shape, location, into)
                )
    for frame, boxes in sorted(frames.items()):
        into.add(f"frame_{frame:06}", boxes, location=f"{file}: frame {frame}", near=file)


_CVAT_WITHOUT_AREA = ("polyline", "points", "skeleton")
_CVAT_CUBOID = tuple(f"{corner}{face}" for face in (1, 2) for corner in ("tl", "bl", "tr", "br"))


def _is_cvat_shape(element: ElementTree.Element) -> bool:
    """Returns whether an element of an image is an object; a ``tag`` is a class of the whole image."""
    return element.tag != "tag" and (element.get("label") is not None or element.tag in ("box", "polygon", "ellipse"))


def _cvat_box(shape: ElementTree.Element, location: str, into: Annotations) -> AnnotatedBox | None:
    """Returns the box around a shape; None for one without area."""
    name = shape.get("label", "")

    def value(key: str) -> float:
        return number(shape.get(key, "0" if key == "rotation" else None), f"{location}: {shape.tag}: {key}")

    if shape.tag == "box":
        x1, y1, x2, y2 = map(value, ("xtl", "ytl", "xbr", "ybr"))
        return _turned(name, (x1 + x2) / 2, (y1 + y2) / 2, (x2 - x1) / 2, (y2 - y1) / 2, value("rotation"))
    if shape.tag == "ellipse":
        cx, cy, rx, ry, degrees = map(value, ("cx", "cy", "rx", "ry", "rotation"))
        return _turned(name, cx, cy, rx, ry, degrees, is_round=True)
    if shape.tag == "mask":
        left, top, width, height = map(value, ("left", "top", "width", "height"))
        return AnnotatedBox(name, left, top, left + width, top + height)
    if shape.tag == "cuboid" and shape.get("points") is None:
        return around(name, [(value(f"x{corner}"), value(f"y{corner}")) for corner in _CVAT_CUBOID])
    if shape.tag in _CVAT_WITHOUT_AREA:
        return into.skip(shape.tag, location)
    pairs = [pair.partition(",") for pair in shape.get("points", "").split(";") if pair]
    return around_polygon(name, [(number(x, location), number(y, location)) for x, _, y in pairs], shape.tag, location)


def _turned(
    name: str, cx: float, cy: float, half_w: float, half_h: float, degrees: float, *, is_round: bool = False
) -> AnnotatedBox:
    """Returns the box around a rectangle, or an ellipse, that is turned about its center."""
    if degrees == 0:
        return AnnotatedBox(name, cx - half_w, cy - half_h, cx + half_w, cy + half_h)
    c = abs(math.cos(math.radians(degrees)))
    s = abs(math.sin(math.radians(degrees)))
    if is_round:
        w = math.hypot(half_w * c, half_h * s)
        h = math.hypot(half_w * s, half_h * c)
    else:
        w = half_w * c + half_h * s
        h = half_w * s + half_h * c
    return AnnotatedBox(name, cx - w, cy - h, cx + w, cy + h)


_LABELME_WITHOUT_AREA = ("point", "points", "line", "linestrip")
_LABELME_IGNORE = "__ignore__"  # the class of regions without a class
_LABELME_OF_TWO_POINTS = ("rectangle", "mask")  # opposite corners


def read_labelme(file: Path, into: Annotations) -> None:
    """Reads LabelMe and X-AnyLabeling: a JSON per image; rectangles, and the boxes around circles, masks and all shapes
    of three points or more (polygons, turned rectangles, quadrilaterals, cuboids)."""
    content = check(load_json(file, "a LabelMe JSON"), dict, str(file))
    image = into.find(str(content.get("imagePath")), str(file), file)
    if loose(image.stem) != loose(file.stem) and into.has(file.stem):  # as after a copy or a renaming
        raise UserError(f"{file}: its 'imagePath' is {image.name}, but an image is called like the file")
    boxes: list[AnnotatedBox | None] = []
    for position, entry in enumerate(_list(content, "shapes", str(file))):
        location = f"{file}: shape {position}"
        shape = check(entry, dict, location)
        name = str(shape.get("label") or "")
        kind = one_line(str(shape.get("shape_type") or "polygon"))[:60]
        points = [(number(x, location), number(y, location)) for x, y in _pairs(shape.get("points"), location)]
        if kind in _LABELME_WITHOUT_AREA:
            boxes.append(into.skip(kind, location))
        elif kind == "circle" and len(points) == 2:
            (cx, cy), (x, y) = points
            radius = math.hypot(x - cx, y - cy)
            boxes.append(AnnotatedBox(name, cx - radius, cy - radius, cx + radius, cy + radius))
        elif kind in _LABELME_OF_TWO_POINTS and len(points) == 2:
            boxes.append(around(name, points))
        else:
            boxes.append(around_polygon(name, points, kind, location))
    size = _size({"width": content.get("imageWidth"), "height": content.get("imageHeight")}, str(file))
    into.ignored |= {_LABELME_IGNORE} & {box.name for box in boxes if box is not None}
    into.add(image, boxes, location=str(file), near=file, size=size, is_whole=True)


def read_createml(file: Path, into: Annotations) -> None:
    """Reads Apple's CreateML: centers and sizes in pixels."""
    for position, item in enumerate(check(load_json(file, "a CreateML JSON"), list, str(file))):
        location = f"{file}: entry {position}"
        entry = check(item, dict, location)
        boxes = []
        for annotation in _list(entry, "annotation" if "annotation" in entry else "annotations", location):
            box = check(check(annotation, dict, location).get("coordinates"), dict, location)
            x, y, w, h = (number(box.get(key), f"{location}: {key}") for key in ("x", "y", "width", "height"))
            boxes.append(AnnotatedBox(str(annotation.get("label") or ""), x - w / 2, y - h / 2, x + w / 2, y + h / 2))
        image = entry.get("image", entry.get("imagefilename"))
        into.add(str(image), boxes, location=location, near=file, is_whole=True)


def read_vott(file: Path, into: Annotations) -> None:
    """Reads VoTT: one JSON per export, or per image in a project; a region with several tags is an object of each. An
    image that nobody has looked at is left out."""
    content = check(load_json(file, "a VoTT JSON"), dict, str(file))
    assets = {file.stem: content} if "asset" in content else check(content.get("assets"), dict, f"{file}: assets")
    for key, item in assets.items():
        location = f"{file}: asset {one_line(key)[:60]}"
        entry = check(item, dict, location)
        boxes: list[AnnotatedBox | None] = []
        for position, region in enumerate(_list(entry, "regions", location)):
            boxes += _vott_boxes(check(region, dict, location), f"{location}: region {position}", into)
        asset = check(entry.get("asset"), dict, location)
        if not boxes and asset.get("state") == _VOTT_NOT_VISITED:
            continue
        size = _size(asset["size"], location) if isinstance(asset.get("size"), dict) else None
        into.add(str(asset.get("name")), boxes, location=location, near=file, size=size, is_whole=True)


_VOTT_NOT_VISITED = 0
_VOTT_WITHOUT_AREA = ("point", "polyline")


def _vott_boxes(region: dict[str, Any], location: str, into: Annotations) -> list[AnnotatedBox | None]:
    """Returns a box for each tag of a region."""
    tags = _list(region, "tags", location)
    if not tags:
        raise UserError(f"{location}: has no tag, which would be its class")
    kind = str(region.get("type") or "").lower()
    if kind in _VOTT_WITHOUT_AREA:
        return [into.skip(kind, location)]
    box = check(region.get("boundingBox"), dict, location)
    x, y, w, h = (number(box.get(key), f"{location}: {key}") for key in ("left", "top", "width", "height"))
    return [AnnotatedBox(str(tag), x, y, x + w, y + h) for tag in tags]


_LABELBOX_WITHOUT_AREA = {"point": "point", "line": "polyline"}  # keys of objects


def read_labelbox(file: Path, into: Annotations) -> None:
    """Reads Labelbox: a row per image in NDJSON, or in a list; boxes, and the boxes around polygons. Rows without a
    label, or with one that was skipped, are of images that nobody has labeled."""
    for location, row in _labelbox_rows(file):
        data, media = (check(row.get(key), dict, f"{location}: {key}") for key in ("data_row", "media_attributes"))
        projects = check(row.get("projects"), dict, f"{location}: projects")
        labels = [
            check(label, dict, location)
            for project in projects.values()
            for label in _list(check(project, dict, location), "labels", location)
        ]
        labels = [label for label in labels if not _is_skipped(label)]
        if not labels:
            continue
        if len(labels) > 1:
            raise UserError(f"{location}: was labeled {len(labels)} times; export one project, with one label an image")
        annotations = check(labels[0].get("annotations"), dict, f"{location}: annotations")
        boxes = [
            _labelbox_box(check(each, dict, location), location, into)
            for each in _list(annotations, "objects", location)
        ]
        address = urlsplit(str(data.get("row_data") or "")).path
        image = str(data.get("external_id") or data.get("global_key") or address)
        into.add(image, boxes, location=location, near=file, size=_size(media, location), is_whole=True)


def _is_skipped(label: dict[str, Any]) -> bool:
    """Returns whether whoever was to label an image has skipped it."""
    details = label.get("performance_details")
    return isinstance(details, dict) and details.get("skipped") is True


def _labelbox_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the rows of an export, each after its location for messages."""
    text = read_text(file, most=1 << 32)
    if text.lstrip().startswith("["):
        for position, row in enumerate(check(load_json(file, "Labelbox's JSON"), list, str(file))):
            location = f"{file}: row {position}"
            yield location, check(row, dict, location)
        return
    for line, row in enumerate(text.split("\n"), 1):
        if row.strip():
            location = f"{file}:{line}"
            yield location, check(parse_row(row, location), dict, location)


def _labelbox_box(shape: dict[str, Any], location: str, into: Annotations) -> AnnotatedBox | None:
    name = str(shape.get("name") or shape.get("value") or "")
    if "bounding_box" in shape:
        box = check(shape["bounding_box"], dict, f"{location}: bounding_box")
        x, y, w, h = (number(box.get(key), f"{location}: {key}") for key in ("left", "top", "width", "height"))
        return AnnotatedBox(name, x, y, x + w, y + h)
    if "polygon" in shape:
        corners = [check(corner, dict, location) for corner in _list(shape, "polygon", location)]
        points = [(number(corner.get("x"), location), number(corner.get("y"), location)) for corner in corners]
        return around_polygon(name, points, "polygon", location)
    for key, kind in _LABELBOX_WITHOUT_AREA.items():
        if key in shape:
            return into.skip(kind, location)
    kind = one_line(str(shape.get("annotation_kind")))[:60]
    raise UserError(f"{location}: {kind} of '{one_line(name)}' is stored at an address, and nothing is downloaded")


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


def read_csv(file: Path, into: Annotations) -> None:
    """Reads a CSV with a row per object: Roboflow's and TensorFlow's ``_annotations.csv`` (corners in pixels), and Open
    Images (``ImageID``; corners as fractions; ``LabelName``, an id whose name is in a ``class-descriptions`` file next
    to the CSV; ``IsGroupOf`` 1 makes a region to ignore)."""
    text = read_text(file, most=1 << 32)
    rows = csv.DictReader(io.StringIO(text, newline=None), delimiter=_delimiter(text))
    try:
        _read_rows(rows, file, into)
    except csv.Error as error:
        raise UserError(f"{file}:{rows.line_num + 1}: malformed CSV ({error})") from None


def _read_rows(rows: csv.DictReader, file: Path, into: Annotations) -> None:
    """Adds the objects of all rows. Raises UserError that names the row."""
    columns = _columns(rows.fieldnames or ())
    missing = [name for name in ("image", "name", "xmin", "ymin", "xmax", "ymax") if name not in columns]
    if missing:
        raise UserError(f"{file}:1: no column for {', '.join(missing)}; expected a row per object with a header")
    is_relative = columns["image"].lower() == "imageid"
    names = _class_descriptions(file) if is_relative else {}
    corners = ("xmin", "ymin", "xmax", "ymax")
    sizes: dict[Path, tuple[int, int]] = {}  # an image has many rows
    largest = 0.0
    for row in rows:
        location = f"{file}:{rows.line_num}"
        if None in row or None in row.values():
            num_fields = sum(value is not None for value in row.values())
            raise UserError(f"{location}: {num_fields} fields, expected {len(rows.fieldnames or ())}")
        image = row[columns["image"]]
        if not row[columns["name"]] and not row[columns["xmin"]]:  # an image without objects
            into.add(image, (), location=location, near=file)
            continue
        x1, y1, x2, y2 = (number(row[columns[name]], f"{location}: {name}") for name in corners)
        largest = max(largest, x2, y2)
        name = names.get(row[columns["name"]], row[columns["name"]])
        size = None
        if is_relative:
            image = into.find(image, location, file)
            if image not in sizes:
                sizes[image] = image_size(image)
            size = sizes[image]
            width, height = size
            x1 *= width
            x2 *= width
            y1 *= height
            y2 *= height
        elif "width" in columns and "height" in columns:
            size = _size({"width": row[columns["width"]], "height": row[columns["height"]]}, location)
        crowd = "crowd" in columns and is_set(row[columns["crowd"]], f"{location}: {columns['crowd']}")
        into.add(image, [AnnotatedBox(name, x1, y1, x2, y2, crowd)], location=location, near=file, size=size)
    if is_relative and largest > MAX_FRACTION:
        reason = "with a column ImageID, corners are fractions of the image's size; call it filename if they are pixels"
        raise UserError(f"{file}: has a corner at {largest:g}; {reason}")
    if not is_relative and 0 < largest <= 1:
        raise UserError(f"{file}: no corner is above 1; fractions of the image's size are read with a column ImageID")


def _columns(header: Iterable[str]) -> dict[str, str]:
    known = {name.strip().lower().replace("_", ""): name for name in header}
    return {key: known[name] for key, names in _COLUMNS.items() for name in reversed(names) if name in known}


def other_columns(files: Iterable[Path]) -> str:
    """Returns a message about the first CSV of ``files``, whose columns `read_csv` does not know; "" without a CSV."""
    for file in files:
        if file.suffix.lower() == ".csv":
            with open_regular(file) as opened:
                header = _header(decode_loosely(opened.read(_HEAD)))
            expected = "filename, class, xmin, ymin, xmax, ymax, and a row per object"
            return f"{file}: begins with {header[:100]!r}; a CSV is read if it has a header with {expected}"
    return ""


def _delimiter(text: str) -> str:
    return max(",;\t", key=_header(text).count)


def _header(text: str) -> str:
    return (text[:_HEAD].splitlines() or [""])[0].strip()


def _class_descriptions(file: Path) -> dict[str, str]:
    """Reads the names of Open Images' classes, by ids such as /m/01g317; FiftyOne has a folder for them."""
    names: dict[str, str] = {}
    for path in (*file.parent.glob("*class-descriptions*.csv"), *file.parent.parent.glob("metadata/classes.csv")):
        try:
            rows = list(csv.reader(io.StringIO(read_text(path))))
        except csv.Error as error:
            raise UserError(f"{path}: malformed CSV ({error})") from None
        names |= {row[0]: row[1] for row in rows if len(row) == 2}
    return names


def read_kitti(file: Path, into: Annotations) -> None:
    """Reads KITTI's object benchmark: a text file per image, whose fields 5 to 8 are corners in pixels; ``DontCare`` is
    a region to ignore."""
    boxes = []
    for line, row in enumerate(read_text(file).splitlines(), 1):
        fields = row.split()
        location = f"{file}:{line}"
        if not fields:
            continue
        if len(fields) not in (KITTI_FIELDS, KITTI_FIELDS + 1):  # those of KITTI's tracks stand elsewhere
            raise UserError(f"{location}: {len(fields)} fields, expected {KITTI_FIELDS} of KITTI, or one more, a score")
        for value in fields[1:4]:  # a class with a space would move all fields
            number(value, f"{location}: fields 2 to 4")
        x1, y1, x2, y2 = (number(value, location) for value in fields[4:8])
        boxes.append(AnnotatedBox(fields[0], x1, y1, x2, y2))
    into.ignored |= {box.name for box in boxes if box.name.lower() == "dontcare"}
    into.add(file.stem, boxes, location=str(file), near=file, is_whole=True)


def image_size(path: Path) -> tuple[int, int]:
    """Returns width and height of an image."""
    height, width = check_image(path)
    return width, height


def _size(values: Any, location: str) -> tuple[int, int] | None:
    """Returns width and height; None unless both are present."""
    width, height = values.get("width"), values.get("height")
    if width in (None, "") or height in (None, ""):
        return None
    return int(number(width, f"{location}: width")), int(number(height, f"{location}: height"))


def _list(content: dict, key: str, location: str) -> list:
    return check(content.get(key), list, f"{location}: {key}")


def _pairs(value: Any, location: str) -> Iterator[tuple[Any, Any]]:
    for pair in check(value, list, location):
        if not isinstance(pair, list) or len(pair) != 2:
            raise UserError(f"{location}: expected points of two numbers, got {one_line(str(pair))[:60]!r}")
        yield pair[0], pair[1]


def _is_csv(head: str) -> bool:
    header = csv.reader([_header(head).replace("\0", "")], delimiter=_delimiter(head))
    return {"image", "name", "xmin"} <= _columns(next(header, ())).keys()


def _is_kitti(head: str) -> bool:
    return len(head.split("\n")[0].split()) >= KITTI_FIELDS


def _has_key(names: str) -> Callable[[str], bool]:
    """Makes a function that finds one of the keys ``names``, separated by |, in JSON."""
    key = re.compile(rf'"({names})"\s*:')
    return lambda head: key.search(head) is not None


FORMATS = {
    "cvat": Format("CVAT", (".xml",), lambda head: "<annotations>" in head, read_cvat),
    "labelbox": Format("Labelbox", (".ndjson", ".json"), _has_key("data_row"), read_labelbox),
    "labelme": Format("LabelMe", (".json",), _has_key("shapes"), read_labelme, is_per_image=True),
    "vott": Format("VoTT", (".json",), _has_key("assets?"), read_vott),
    "createml": Format("CreateML", (".json",), _has_key("coordinates"), read_createml),
    "csv": Format("CSV", (".csv",), _is_csv, read_csv),
    "kitti": Format("KITTI", (".txt",), _is_kitti, read_kitti, is_per_image=True),
    "huggingface": Format("Hugging Face parquet", (".parquet",), lambda head: head.startswith(_PARQUET), read_parquet),
    "imagefolder": Format("Hugging Face image folder", (".jsonl",), _has_key("file_name"), read_image_folder),
}


def detect(source: Path) -> dict[str, list[Path]]:
    """Returns the annotation files at ``source``, a file or a folder, by format."""
    suffixes = {suffix for each in FORMATS.values() for suffix in each.suffixes}
    files_of: dict[str, list[Path]] = {}
    for file in files_below(source, suffixes) if source.is_dir() else [source]:
        try:
            with open_regular(file) as opened:
                head = _text_of(opened.read(_HEAD))
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror})") from None
        for name, each in FORMATS.items():
            if file.suffix.lower() in each.suffixes and each.fits(head):
                files_of.setdefault(name, []).append(file)
                break
    return files_of


def _text_of(head: bytes) -> str:
    """Decodes the beginning of a file. The content of a parquet file has no encoding, and may look like UTF-16."""
    if head.startswith(_PARQUET.encode()):
        return head.decode("latin-1")
    return decode_loosely(head).lstrip()
