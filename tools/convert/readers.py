"""Readers of annotation tools' exports: one function per format, and how its files are recognized.

The formats are read here because each takes a dozen lines, and the libraries that read them leave out in silence what
is not a rectangle (polygons of CVAT, circles of LabelMe) or the suffix-less names of Open Images.
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
from tools.convert.annotations import AnnotatedBox, Annotations, around, around_polygon, files_below, number, parse_row
from tools.convert.hugging_face import read_image_folder, read_parquet
from utils.errors import UserError, one_line
from utils.files.encoding import decode_loosely
from utils.files.safe_io import open_regular, read_regular, read_text
from utils.files.schema import check
from utils.files.xml_files import XmlError, parse_xml

KITTI_FIELDS = 15
_HEAD = 1 << 16  # bytes by which formats are recognized
_PARQUET = "PAR1"  # first bytes of a parquet file


class Format(NamedTuple):
    title: str
    suffixes: tuple[str, ...]
    fits: Callable[[str], bool]  # whether a file with this beginning has the format
    read: Callable[[Path, Annotations], None]  # adds the objects of a file; raises UserError
    is_per_image: bool = False  # each image has a file of its name


def read_cvat(file: Path, into: Annotations) -> None:
    """CVAT for images 1.1, and for video 1.1: rectangles, and the boxes around polygons, ellipses and masks."""
    try:
        root = parse_xml(read_regular(file, most=1 << 32))
    except XmlError as error:
        raise UserError(f"{file}:{error}") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None
    for image in root.iter("image"):
        name = image.get("name", "")
        where = f"{file}: image {one_line(name)[:100]!r}"
        boxes = [_cvat_box(shape, where, into) for shape in image if _is_cvat_shape(shape)]
        into.add(name, boxes, where=where, near=file, split=image.get("subset", ""), size=_size(image.attrib, where))
    frames: dict[int, list[AnnotatedBox | None]] = {}
    for track in root.iter("track"):
        where = f"{file}: track {track.get('id', '')}"
        for shape in track:
            if shape.get("outside") != "1":
                shape.set("label", track.get("label", ""))
                frames.setdefault(int(number(shape.get("frame"), where)), []).append(_cvat_box(shape, where, into))
    for frame, boxes in sorted(frames.items()):
        into.add(f"frame_{frame:06}", boxes, where=f"{file}: frame {frame}", near=file)


_CVAT_WITHOUT_AREA = ("polyline", "points", "skeleton")
_CVAT_CUBOID = tuple(f"{corner}{face}" for face in (1, 2) for corner in ("tl", "bl", "tr", "br"))


def _is_cvat_shape(element: ElementTree.Element) -> bool:
    """Whether an element of an image is an object; a ``tag`` is a class of the whole image."""
    return element.tag != "tag" and (element.get("label") is not None or element.tag in ("box", "polygon", "ellipse"))


def _cvat_box(shape: ElementTree.Element, where: str, into: Annotations) -> AnnotatedBox | None:
    name = shape.get("label", "")

    def value(key: str) -> float:
        return number(shape.get(key, "0" if key == "rotation" else None), f"{where}: {shape.tag}: {key}")

    if shape.tag == "box":
        x1, y1, x2, y2 = map(value, ("xtl", "ytl", "xbr", "ybr"))
        return _turned(name, (x1 + x2) / 2, (y1 + y2) / 2, (x2 - x1) / 2, (y2 - y1) / 2, value("rotation"))
    if shape.tag == "ellipse":
        return _turned(name, *map(value, ("cx", "cy", "rx", "ry", "rotation")), is_round=True)
    if shape.tag == "mask":
        left, top, width, height = map(value, ("left", "top", "width", "height"))
        return AnnotatedBox(name, left, top, left + width, top + height)
    if shape.tag == "cuboid" and shape.get("points") is None:
        return around(name, [(value(f"x{corner}"), value(f"y{corner}")) for corner in _CVAT_CUBOID])
    if shape.tag in _CVAT_WITHOUT_AREA:
        return into.skip(shape.tag, where)
    pairs = [pair.partition(",") for pair in shape.get("points", "").split(";") if pair]
    return around_polygon(name, [(number(x, where), number(y, where)) for x, _, y in pairs], shape.tag, where)


def _turned(
    name: str, cx: float, cy: float, half_w: float, half_h: float, degrees: float, *, is_round: bool = False
) -> AnnotatedBox:
    """The box around a rectangle, or an ellipse, that is turned about its center."""
    if degrees == 0:
        return AnnotatedBox(name, cx - half_w, cy - half_h, cx + half_w, cy + half_h)
    c, s = abs(math.cos(math.radians(degrees))), abs(math.sin(math.radians(degrees)))
    w, h = (math.hypot(half_w * c, half_h * s), math.hypot(half_w * s, half_h * c)) if is_round else (
        half_w * c + half_h * s, half_w * s + half_h * c
    )  # fmt: skip
    return AnnotatedBox(name, cx - w, cy - h, cx + w, cy + h)


_LABELME_WITHOUT_AREA = ("point", "points", "line", "linestrip")
_LABELME_OF_TWO_POINTS = ("rectangle", "mask")  # opposite corners


def read_labelme(file: Path, into: Annotations) -> None:
    """LabelMe and X-AnyLabeling: a JSON per image; rectangles, and the boxes around circles, masks and all shapes of
    three points or more (polygons, turned rectangles, quadrilaterals, cuboids)."""
    content = check(load_json(file, "a LabelMe JSON"), dict, str(file))
    boxes = []
    for position, entry in enumerate(_list(content, "shapes", str(file))):
        where = f"{file}: shape {position}"
        shape = check(entry, dict, where)
        name, kind = str(shape.get("label") or ""), one_line(str(shape.get("shape_type") or "polygon"))[:60]
        points = [(number(x, where), number(y, where)) for x, y in _pairs(shape.get("points"), where)]
        if kind in _LABELME_WITHOUT_AREA:
            boxes.append(into.skip(kind, where))
        elif kind == "circle" and len(points) == 2:
            (cx, cy), (x, y) = points
            radius = math.hypot(x - cx, y - cy)
            boxes.append(AnnotatedBox(name, cx - radius, cy - radius, cx + radius, cy + radius))
        elif kind in _LABELME_OF_TWO_POINTS and len(points) == 2:
            boxes.append(around(name, points))
        else:
            boxes.append(around_polygon(name, points, kind, where))
    size = _size({"width": content.get("imageWidth"), "height": content.get("imageHeight")}, str(file))
    into.add(str(content.get("imagePath")), boxes, where=str(file), near=file, size=size)


def read_createml(file: Path, into: Annotations) -> None:
    """Apple's CreateML: centers and sizes in pixels."""
    for position, item in enumerate(check(load_json(file, "a CreateML JSON"), list, str(file))):
        where = f"{file}: entry {position}"
        entry, boxes = check(item, dict, where), []
        for annotation in _list(entry, "annotation" if "annotation" in entry else "annotations", where):
            at = check(check(annotation, dict, where).get("coordinates"), dict, where)
            x, y, w, h = (number(at.get(key), f"{where}: {key}") for key in ("x", "y", "width", "height"))
            boxes.append(AnnotatedBox(str(annotation.get("label") or ""), x - w / 2, y - h / 2, x + w / 2, y + h / 2))
        image = entry.get("image", entry.get("imagefilename"))
        into.add(str(image), boxes, where=where, near=file)


def read_vott(file: Path, into: Annotations) -> None:
    """VoTT: one JSON per export, or per image in a project; a region with several tags is an object of each."""
    content = check(load_json(file, "a VoTT JSON"), dict, str(file))
    assets = {file.stem: content} if "asset" in content else check(content.get("assets"), dict, f"{file}: assets")
    for key, item in assets.items():
        where = f"{file}: asset {one_line(key)[:60]}"
        entry, boxes = check(item, dict, where), []
        for position, item in enumerate(_list(entry, "regions", where)):
            boxes += _vott_boxes(check(item, dict, where), f"{where}: region {position}", into)
        asset = check(entry.get("asset"), dict, where)
        size = _size(asset["size"], where) if isinstance(asset.get("size"), dict) else None
        into.add(str(asset.get("name")), boxes, where=where, near=file, size=size)


_VOTT_WITHOUT_AREA = ("point", "polyline")


def _vott_boxes(region: dict[str, Any], where: str, into: Annotations) -> list[AnnotatedBox | None]:
    """A box for each tag of a region."""
    tags = _list(region, "tags", where)
    if not tags:
        raise UserError(f"{where}: has no tag, which would be its class")
    kind = str(region.get("type") or "").lower()
    if kind in _VOTT_WITHOUT_AREA:
        return [into.skip(kind, where)]
    at = check(region.get("boundingBox"), dict, where)
    x, y, w, h = (number(at.get(name), f"{where}: {name}") for name in ("left", "top", "width", "height"))
    return [AnnotatedBox(str(tag), x, y, x + w, y + h) for tag in tags]


_LABELBOX_WITHOUT_AREA = {"point": "point", "line": "polyline"}  # keys of objects


def read_labelbox(file: Path, into: Annotations) -> None:
    """Labelbox: a row per image in NDJSON, or in a list; boxes, and the boxes around polygons. Rows without a label are
    images that nobody has labeled."""
    for where, row in _labelbox_rows(file):
        data, media = (check(row.get(key), dict, f"{where}: {key}") for key in ("data_row", "media_attributes"))
        projects = check(row.get("projects"), dict, f"{where}: projects")
        labels = [
            check(label, dict, where)
            for project in projects.values()
            for label in _list(check(project, dict, where), "labels", where)
        ]
        if not labels:
            continue
        if len(labels) > 1:
            raise UserError(f"{where}: was labeled {len(labels)} times; export one project, with one label an image")
        annotations = check(labels[0].get("annotations"), dict, f"{where}: annotations")
        boxes = [_labelbox_box(check(each, dict, where), where, into) for each in _list(annotations, "objects", where)]
        address = urlsplit(str(data.get("row_data") or "")).path
        image = str(data.get("external_id") or data.get("global_key") or address)
        into.add(image, boxes, where=where, near=file, size=_size(media, where))


def _labelbox_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    text = read_text(file, most=1 << 32)
    if text.lstrip().startswith("["):
        for position, row in enumerate(check(load_json(file, "Labelbox's JSON"), list, str(file))):
            where = f"{file}: row {position}"
            yield where, check(row, dict, where)
        return
    for line, row in enumerate(text.split("\n"), 1):
        if row.strip():
            where = f"{file}:{line}"
            yield where, check(parse_row(row, where), dict, where)


def _labelbox_box(shape: dict[str, Any], where: str, into: Annotations) -> AnnotatedBox | None:
    name = str(shape.get("name") or shape.get("value") or "")
    if "bounding_box" in shape:
        at = check(shape["bounding_box"], dict, f"{where}: bounding_box")
        x, y, w, h = (number(at.get(key), f"{where}: {key}") for key in ("left", "top", "width", "height"))
        return AnnotatedBox(name, x, y, x + w, y + h)
    if "polygon" in shape:
        corners = [check(corner, dict, where) for corner in _list(shape, "polygon", where)]
        points = [(number(corner.get("x"), where), number(corner.get("y"), where)) for corner in corners]
        return around_polygon(name, points, "polygon", where)
    for key, kind in _LABELBOX_WITHOUT_AREA.items():
        if key in shape:
            return into.skip(kind, where)
    kind = one_line(str(shape.get("annotation_kind")))[:60]
    raise UserError(f"{where}: {kind} of '{one_line(name)}' is stored at an address, and nothing is downloaded")


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
    """A row per object: Roboflow's and TensorFlow's ``_annotations.csv`` (corners in pixels), Open Images (``ImageID``,
    corners as fractions; ``LabelName``, for which a ``class-descriptions`` file next to it has the text; ``IsGroupOf``
    1 makes a region to ignore)."""
    text = read_text(file, most=1 << 32)
    rows = csv.DictReader(io.StringIO(text, newline=None), delimiter=_delimiter(text))
    try:
        _read_rows(rows, file, into)
    except csv.Error as error:
        raise UserError(f"{file}:{rows.line_num + 1}: malformed CSV ({error})") from None


def _read_rows(rows: csv.DictReader, file: Path, into: Annotations) -> None:
    columns = _columns(rows.fieldnames or ())
    if missing := [name for name in ("image", "name", "xmin", "ymin", "xmax", "ymax") if name not in columns]:
        raise UserError(f"{file}:1: no column for {', '.join(missing)}; expected a row per object with a header")
    is_relative = columns["image"].lower() == "imageid"
    texts = _class_descriptions(file) if is_relative else {}
    corners = ("xmin", "ymin", "xmax", "ymax")
    sizes: dict[Path, tuple[int, int]] = {}  # an image has many rows
    largest = 0.0
    for row in rows:
        where = f"{file}:{rows.line_num}"
        if None in row or None in row.values():
            raise UserError(f"{where}: {len([v for v in row.values() if v is not None])} fields, expected "
                            f"{len(rows.fieldnames or ())}")  # fmt: skip
        image = row[columns["image"]]
        if not row[columns["name"]] and not row[columns["xmin"]]:  # an image without objects
            into.add(image, (), where=where, near=file)
            continue
        x1, y1, x2, y2 = (number(row[columns[name]], f"{where}: {name}") for name in corners)
        largest = max(largest, x2, y2)
        name = texts.get(row[columns["name"]], row[columns["name"]])
        size = None
        if is_relative:
            image = into.find(image, where, file)
            if image not in sizes:
                sizes[image] = image_size(image)
            width, height = size = sizes[image]
            x1, y1, x2, y2 = x1 * width, y1 * height, x2 * width, y2 * height
        elif "width" in columns and "height" in columns:
            size = _size({"width": row[columns["width"]], "height": row[columns["height"]]}, where)
        crowd = "crowd" in columns and row[columns["crowd"]].strip() == "1"
        into.add(image, [AnnotatedBox(name, x1, y1, x2, y2, crowd)], where=where, near=file, size=size)
    if not is_relative and 0 < largest <= 1:
        raise UserError(f"{file}: no corner is above 1; fractions of the image's size are read with a column ImageID")


def _columns(header: Iterable[str]) -> dict[str, str]:
    known = {name.strip().lower().replace("_", ""): name for name in header}
    return {key: known[name] for key, names in _COLUMNS.items() for name in reversed(names) if name in known}


def other_columns(files: Iterable[Path]) -> str:
    """A message about the first CSV of ``files``, whose columns are not those of `read_csv`; "" if there is none."""
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
    """Names of Open Images' classes, by their ids such as /m/01g317; FiftyOne has a folder for them."""
    texts: dict[str, str] = {}
    for path in (*file.parent.glob("*class-descriptions*.csv"), *file.parent.parent.glob("metadata/classes.csv")):
        try:
            rows = list(csv.reader(io.StringIO(read_text(path))))
        except csv.Error as error:
            raise UserError(f"{path}: malformed CSV ({error})") from None
        texts |= {row[0]: row[1] for row in rows if len(row) == 2}
    return texts


def read_kitti(file: Path, into: Annotations) -> None:
    """KITTI's object benchmark: a text file per image, whose fields 5 to 8 are corners in pixels; ``DontCare`` is a
    region to ignore."""
    boxes = []
    for line, row in enumerate(read_text(file).splitlines(), 1):
        fields, where = row.split(), f"{file}:{line}"
        if not fields:
            continue
        if len(fields) < KITTI_FIELDS:
            raise UserError(f"{where}: {len(fields)} fields, expected at least {KITTI_FIELDS} of KITTI")
        boxes.append(AnnotatedBox(fields[0], *(number(value, where) for value in fields[4:8])))
    into.ignored |= {"DontCare"} & {box.name for box in boxes}
    into.add(file.stem, boxes, where=str(file), near=file)


def image_size(path: Path) -> tuple[int, int]:
    height, width = check_image(path)
    return width, height


def _size(values: Any, where: str) -> tuple[int, int] | None:
    """Width and height; None unless both are given."""
    width, height = values.get("width"), values.get("height")
    if width in (None, "") or height in (None, ""):
        return None
    return int(number(width, f"{where}: width")), int(number(height, f"{where}: height"))


def _list(content: dict, key: str, where: str) -> list:
    return check(content.get(key), list, f"{where}: {key}")


def _pairs(value: Any, where: str) -> Iterator[tuple[Any, Any]]:
    for pair in check(value, list, where):
        if not isinstance(pair, list) or len(pair) != 2:
            raise UserError(f"{where}: expected points of two numbers, got {one_line(str(pair))[:60]!r}")
        yield pair[0], pair[1]


def _is_csv(head: str) -> bool:
    header = csv.reader([_header(head).replace("\0", "")], delimiter=_delimiter(head))
    return {"image", "name", "xmin"} <= _columns(next(header, ())).keys()


def _is_kitti(head: str) -> bool:
    return len(head.split("\n")[0].split()) >= KITTI_FIELDS


def _has_key(names: str) -> Callable[[str], bool]:
    """Whether JSON has one of the keys ``names``, separated by |."""
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
    """The annotation files at ``source``, a file or a folder, by format."""
    suffixes = {suffix for each in FORMATS.values() for suffix in each.suffixes}
    found: dict[str, list[Path]] = {}
    for file in files_below(source, suffixes) if source.is_dir() else [source]:
        try:
            with open_regular(file) as opened:
                head = _text_of(opened.read(_HEAD))
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror})") from None
        for name, each in FORMATS.items():
            if file.suffix.lower() in each.suffixes and each.fits(head):
                found.setdefault(name, []).append(file)
                break
    return found


def _text_of(head: bytes) -> str:
    """The beginning of a file as text. What follows in a parquet file is in no encoding, and may look like UTF-16."""
    if head.startswith(_PARQUET.encode()):
        return head.decode("latin-1")
    return decode_loosely(head).lstrip()
