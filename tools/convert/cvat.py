"""Reads CVAT's XML: "CVAT for images 1.1" and "CVAT for video 1.1"."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

from tools.convert.annotations import AnnotatedBox, Annotations, Entry, around_polygon, bounding_box
from tools.convert.values import MAX_FILE_BYTES, image_name, number, parse_size
from utils.errors import UserError, one_line
from utils.files.safe_io import read_regular
from utils.files.xml_files import XmlError, parse_xml

_WITHOUT_AREA = ("polyline", "points", "skeleton")
_CUBOID_CORNERS = tuple(f"{corner}{face}" for face in (1, 2) for corner in ("tl", "bl", "tr", "br"))


def read_cvat(file: Path, annotations: Annotations) -> None:
    """Adds the rectangles, and the boxes around polygons, ellipses, masks and cuboids."""
    try:
        root = parse_xml(read_regular(file, max_bytes=MAX_FILE_BYTES))
    except XmlError as error:
        raise UserError(f"{file}:{error}") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None
    for image in root.iter("image"):
        name = image_name(image.get("name"), f"{file}: image {image.get('id', '')}")
        location = f"{file}: image {one_line(name)[:100]!r}"
        boxes = [_box(shape, shape.get("label", ""), location, annotations) for shape in image if _is_object(shape)]
        size = parse_size(image.get("width"), image.get("height"), location)
        annotations.add(
            Entry(image=name, boxes=boxes, location=location, file=file, split=image.get("subset", ""), size=size)
        )
    for frame, boxes in sorted(_boxes_by_frame(root, file, annotations).items()):
        annotations.add(Entry(image=f"frame_{frame:06}", boxes=boxes, location=f"{file}: frame {frame}", file=file))


def _boxes_by_frame(
    root: ElementTree.Element, file: Path, annotations: Annotations
) -> dict[int, list[AnnotatedBox | None]]:
    """Returns the objects of a video by frame, except where they are ``outside``, that is, not visible."""
    frames: dict[int, list[AnnotatedBox | None]] = {}
    for track in root.iter("track"):
        location = f"{file}: track {track.get('id', '')}"
        for shape in track:
            if shape.get("outside") != "1":
                frame = int(number(shape.get("frame"), location))
                frames.setdefault(frame, []).append(_box(shape, track.get("label", ""), location, annotations))
    return frames


def _is_object(element: ElementTree.Element) -> bool:
    """Returns whether an element of an image is an object; a ``tag`` labels the whole image."""
    return element.tag != "tag" and (element.get("label") is not None or element.tag in ("box", "polygon", "ellipse"))


def _box(shape: ElementTree.Element, name: str, location: str, annotations: Annotations) -> AnnotatedBox | None:
    """Returns the box around a shape of the class ``name``; None for one without area."""

    def value(key: str) -> float:
        return number(shape.get(key), f"{location}: {shape.tag}: {key}")

    def rotation() -> float:
        return value("rotation") if "rotation" in shape.attrib else 0.0

    if shape.tag == "box":
        x1, y1, x2, y2 = map(value, ("xtl", "ytl", "xbr", "ybr"))
        return _box_around_rotated(name, ((x1 + x2) / 2, (y1 + y2) / 2), ((x2 - x1) / 2, (y2 - y1) / 2), rotation())
    if shape.tag == "ellipse":
        cx, cy, rx, ry = map(value, ("cx", "cy", "rx", "ry"))
        return _box_around_rotated(name, (cx, cy), (rx, ry), rotation(), is_round=True)
    if shape.tag == "mask":
        return AnnotatedBox.of_xywh(name, *map(value, ("left", "top", "width", "height")))
    if shape.tag == "cuboid" and shape.get("points") is None:
        return bounding_box(name, [(value(f"x{corner}"), value(f"y{corner}")) for corner in _CUBOID_CORNERS])
    if shape.tag in _WITHOUT_AREA:
        annotations.skipped.add(shape.tag, location)
        return None
    pairs = [pair.partition(",") for pair in shape.get("points", "").split(";") if pair]
    points = [(number(x, location), number(y, location)) for x, _, y in pairs]
    return around_polygon(name, points, shape.tag, location)


def _box_around_rotated(
    name: str, center: tuple[float, float], half_sides: tuple[float, float], degrees: float, *, is_round: bool = False
) -> AnnotatedBox:
    """Returns the box around a rectangle or an ellipse that is rotated about its center."""
    cx, cy = center
    half_w, half_h = half_sides
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
