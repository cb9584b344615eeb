"""What the reader of a format yields: the labels of an image (`Entry`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from utils.errors import one_line

MAX_TEXT = 200  # characters of a value in a message


class Box(NamedTuple):
    """A labeled box: its class, and its corners in pixels, or as fractions of the image's size."""

    name: str  # of the class
    x1: float
    y1: float
    x2: float
    y2: float
    is_group: bool = False  # around several objects, and so a region to ignore


@dataclass(slots=True)
class Entry:
    """The labels of an image, or some of them."""

    image: str  # name of the image in the annotations
    boxes: Sequence[Box | str]  # or, instead of a box, why an object has none
    where: str  # file, and line or entry, for messages
    file: Path
    split: str = ""  # as the annotations call it; empty: by the names of folders and files
    size_wh: tuple[int, int] | None = None  # that the annotations state
    has_suffix: bool = True  # whether the name of the image has its suffix
    is_normalized: bool = False  # whether corners are fractions
    content: bytes = b""  # image in the annotation file
    path: Path | None = None  # of the image, if it is known
    is_labeled: bool = True  # whether somebody has looked for objects, as far as the annotations say
    needs_image: bool = True  # False: nothing is lost without its image, such as a frame without objects


def parse_boxes(objects: Iterable[Any], parse: Callable[[Any], Box]) -> list[Box | str]:
    """Returns the box of each object, or the reason why ``parse`` cannot make one of it."""
    boxes: list[Box | str] = []
    for item in objects:
        try:
            box = parse(item)
            name = str(box.name).strip() if isinstance(box.name, str | int) else ""
            if not name or name != one_line(name):
                raise ValueError(f"{box.name!r} is not the name of a class")
            boxes.append(box._replace(name=name))
        except ValueError as error:
            boxes.append(one_line(str(error))[:MAX_TEXT])
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            boxes.append(one_line(f"malformed object ({error!r})")[:MAX_TEXT])
    return boxes


def box_around(name: Any, points: Iterable[Sequence[Any]]) -> Box:
    """Returns the box around two opposite corners, or around the points of a shape."""
    xs, ys = zip(*((float(x), float(y)) for x, y in points))
    if len(xs) < 2:
        raise ValueError("a point has no area")
    return Box(name, min(xs), min(ys), max(xs), max(ys))
