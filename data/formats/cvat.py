"""Reads CVAT's XML: "CVAT for images 1.1" and "CVAT for video 1.1". The row number is the line of a shape."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from xml.etree.ElementTree import Element

import numpy as np

from data.findings import Finding
from data.formats.label_format import (
    ANY_SUFFIX,
    Box,
    Classes,
    Entry,
    Format,
    Row,
    box_around,
    half_sides_of_rotated,
    rows_of,
    stated_size,
)
from data.formats.voc import read_xml
from utils.files.xml_files import LINE


def read_cvat(data: bytes, classes: Classes) -> Iterator[Entry]:
    """Yields the images, or the frames of a video, whose images are called ``frame_000000.jpg``: those that its task
    states, or else those of its tracks. Raises LabelFileError for other XML."""
    root = read_xml(data, "annotations")
    for image in root.iter("image"):
        shapes = [shape for shape in image if shape.tag != "tag"]  # a tag labels the whole image
        objects = [(int(shape.attrib[LINE]), shape) for shape in shapes]
        rows = rows_of(objects, lambda shape: _box(shape, shape.attrib["label"]), classes)
        size_hw = stated_size(image.get("height"), image.get("width"))
        yield Entry(rows, image.get("name", ""), size_hw, image.get("id"))
    frames: dict[str, list[Row | Finding]] = {}
    if root.find("image") is None:
        for task in (*root.iterfind("meta/task"), *root.iterfind("meta/job")):
            frames.update((str(frame), []) for frame in _stated_frames(task))
    for track in root.iter("track"):
        parse = partial(_box, name=track.get("label", ""))
        for shape in track:
            rows = frames.setdefault(shape.get("frame", ""), [])
            if shape.get("outside") != "1":  # else the object is not visible
                rows += rows_of([(int(shape.attrib[LINE]), shape)], parse, classes)
    for frame, rows in frames.items():
        yield Entry(rows, f"frame_{frame:>06}{ANY_SUFFIX}", image_id=frame)


def _stated_frames(task: Element) -> range:
    """Returns the frames of a task's or a job's description; none if it has no numbers."""
    try:
        first = int(task.findtext("start_frame") or 0)
        last = int(task.findtext("stop_frame") or first + int(task.findtext("size") or 0) - 1)
        step = int((task.findtext("frame_filter") or "").strip().removeprefix("step=") or 1)
        return range(first, last + 1, step)
    except ValueError:
        return range(0)


def _box(shape: Element, name: str) -> Box:
    """Returns the box around a shape. Raises ValueError for a shape without area."""

    def numbers(*keys: str) -> list[float]:
        return [float(shape.attrib[key]) for key in keys]

    if shape.tag in ("box", "ellipse"):
        if shape.tag == "box":
            x1, y1, x2, y2 = numbers("xtl", "ytl", "xbr", "ybr")
            cx, cy, half_w, half_h = (x1 + x2) / 2, (y1 + y2) / 2, (x2 - x1) / 2, (y2 - y1) / 2
        else:
            cx, cy, half_w, half_h = numbers("cx", "cy", "rx", "ry")
        angle = math.radians(float(shape.get("rotation", 0)))
        if angle:
            half_w, half_h = half_sides_of_rotated(half_w, half_h, angle, is_round=shape.tag == "ellipse")
        return Box(name, cx - half_w, cy - half_h, cx + half_w, cy + half_h)
    if shape.tag == "mask":
        left, top, width, height = map(int, numbers("left", "top", "width", "height"))
        return _box_of_mask(name, left, top, width, height, shape.attrib["rle"])
    if shape.tag == "cuboid" and "points" not in shape.attrib:
        corners = [f"{corner}{face}" for face in (1, 2) for corner in ("tl", "bl", "tr", "br")]
        return box_around(name, [numbers(f"x{corner}", f"y{corner}") for corner in corners])
    if shape.tag in ("polyline", "points", "skeleton"):
        raise ValueError(f"{shape.tag}: has no area")
    return box_around(name, [pair.split(",") for pair in shape.attrib["points"].split(";")])


def _box_of_mask(name: str, left: int, top: int, width: int, height: int, rle: str) -> Box:
    """Returns the box around the pixels of a mask. ``rle``: lengths of runs, row by row in the stated box, of pixels
    outside and inside in turn. Raises ValueError for a mask without a pixel, or of another size."""
    lengths = np.array([int(length) for length in rle.split(",")])
    ends = np.cumsum(lengths)
    start = ends[:-1:2][lengths[1::2] > 0]  # of the runs inside
    last = ends[1::2][lengths[1::2] > 0] - 1
    if not len(start) or (lengths < 0).any() or ends[-1] != width * height:
        raise ValueError(f"mask: has no pixel, or not {width} x {height}")
    # A run that goes on in the next row reaches both sides.
    is_one_row = start // width == last // width
    x1 = np.where(is_one_row, start % width, 0).min()
    x2 = np.where(is_one_row, last % width, width - 1).max() + 1
    y1 = start[0] // width
    y2 = last[-1] // width + 1
    return Box(name, float(left + x1), float(top + y1), float(left + x2), float(top + y2))


CVAT = Format(
    name="cvat", title="CVAT XML", suffix=".xml", is_per_image=False, read=read_cvat, signature="<annotations>"
)
