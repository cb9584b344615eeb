"""Collects the boxes of an export by image. What cannot be used becomes a finding, of the kinds of the scan."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from data.dataset.folder import split_of
from data.images.kinds import IMAGE_SUFFIXES
from data.images.verify import check_image
from data.labels.clean import MIN_SIDE_PX
from data.labels.findings import BAD_BOX, BAD_IMAGE, BAD_LABEL, BAD_ROW, ORPHAN, Finding
from data.labels.match import AMBIGUOUS, match_entries
from utils.errors import UserError, one_line
from utils.files.paths import relative_name

_MAX_TEXT = 200  # characters of a value in a message


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
    """The labels of an image, or some of them, as a reader of a format finds them."""

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


@dataclass(slots=True)
class AnnotatedImage:
    """An image, and its boxes in pixels."""

    path: Path
    split: str
    where: str  # its first entry
    size_wh: tuple[int, int] | None = None
    boxes: list[Box] = field(default_factory=list)
    num_lost: int = 0  # boxes


def parse_boxes(objects: Iterable[Any], parse: Callable[[Any], Box]) -> list[Box | str]:
    """Returns the box of each object, or the reason why ``parse`` cannot make one of it."""
    boxes: list[Box | str] = []
    for item in objects:
        try:
            boxes.append(parse(item))
        except ValueError as error:
            boxes.append(one_line(str(error))[:_MAX_TEXT])
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            boxes.append(one_line(f"malformed object ({error!r})")[:_MAX_TEXT])
    return boxes


def box_around(name: Any, points: Iterable[Sequence[Any]], *, is_group: bool = False) -> Box:
    """Returns the box around two opposite corners, or around the points of a shape."""
    xs, ys = zip(*((float(x), float(y)) for x, y in points))
    if len(xs) < 2:
        raise ValueError("a point has no area")
    return Box(name, min(xs), min(ys), max(xs), max(ys), is_group)


def files_below(folder: Path) -> Iterator[Path]:
    """Yields the files of a folder, sorted, except hidden ones and those in hidden folders."""
    for path in sorted(folder.rglob("*")):
        if not any(part.startswith(".") for part in path.relative_to(folder).parts) and path.is_file():
            yield path


def collect(entries: Sequence[Entry], root: Path) -> tuple[list[AnnotatedImage], list[Finding]]:
    """Finds the images of ``entries`` below the folder ``root``. Returns the images with labels and the backgrounds,
    sorted by path, and what is lost. Raises UserError for an image in two splits."""
    annotated: dict[Path, AnnotatedImage] = {}
    findings: list[Finding] = []
    unknown: set[str] = set()  # names of images that are not found
    for entry, path in zip(entries, _find_images(entries, root)):
        if isinstance(path, str):
            text = f"image {one_line(entry.image)[:_MAX_TEXT]!r} {path}"
            num_images = 0 if entry.image in unknown else 1
            unknown.add(entry.image)
            findings.append(Finding(entry.where, ORPHAN, text, lost_images=num_images, lost_objects=len(entry.boxes)))
            continue
        split = split_of(entry.split) or _split_of_paths(path, entry.file, root)
        image = annotated.setdefault(path, AnnotatedImage(path, split, entry.where))
        if image.split != split:
            raise UserError(
                f"{entry.where}: {path.name} is in '{split}' here, and in '{image.split}' in {image.where}; remove one"
            )
        findings += _add(entry, image)
    for path, image in list(annotated.items()):
        if image.num_lost and not image.boxes:  # as a background, it would teach the model to ignore its objects
            del annotated[path]
            findings.append(Finding(image.where, BAD_LABEL, f"{path.name} has no usable box", lost_images=1))
    return [annotated[path] for path in sorted(annotated)], findings


def _find_images(entries: Sequence[Entry], root: Path) -> Iterator[Path | str]:
    """Yields the image of each entry, or why there is none. It is the file that the name denotes in the folder of the
    annotation file, or else the one whose path ends with the name."""
    paths = [path for path in files_below(root) if path.suffix.lower() in IMAGE_SUFFIXES]
    for_names = {True: [relative_name(path, root) for path in paths]}
    for_names[False] = [os.path.splitext(name)[0] for name in for_names[True]]
    matches = {
        has_suffix: match_entries([entry.image if entry.has_suffix == has_suffix else "" for entry in entries], names)
        for has_suffix, names in for_names.items()
    }
    beside = {name: number for number, name in enumerate(for_names[True])}
    for position, entry in enumerate(entries):
        name = relative_name(entry.file.parent / entry.image.replace("\\", "/"), root)
        number = beside.get(name, int(matches[entry.has_suffix][position]))
        if entry.path is not None:
            yield entry.path
        elif number >= 0:
            yield paths[number]
        else:
            yield "fits several files" if number == AMBIGUOUS else f"is not found below {root}"


def _split_of_paths(image: Path, file: Path, root: Path) -> str:
    """Returns the split that a folder of the image or of its annotation file is named after, or the beginning of the
    name of a file with several images, such as ``train-00000-of-00001.parquet``; "train" if there is none."""
    names = [*image.parent.relative_to(root).parts] if image.is_relative_to(root) else []
    names += file.parent.relative_to(root).parts
    if file.suffix.lower() != ".json":  # LabelMe's file is called like its image
        names.append(file.name.lstrip("_").replace(".", "-").partition("-")[0])
    return next(filter(None, map(split_of, names)), "train")


def _add(entry: Entry, image: AnnotatedImage) -> Iterator[Finding]:
    """Adds the boxes of an entry to its image, and yields those that are lost."""
    scale_x = scale_y = 1.0
    problem = ""
    kind = BAD_LABEL
    size_wh = entry.size_wh
    if entry.is_normalized and not image.size_wh:
        try:
            height, width = check_image(image.path).size_hw
            size_wh = (width, height)
        except UserError as error:
            kind = BAD_IMAGE
            problem = str(error)
    if size_wh and image.size_wh and size_wh != image.size_wh:
        problem = f"states the size {size_wh}, and {image.where} the size {image.size_wh} of {image.path.name}"
    image.size_wh = image.size_wh or size_wh
    if problem:
        image.num_lost += len(entry.boxes)
        yield Finding(entry.where, kind, problem, lost_objects=len(entry.boxes))
        return
    if entry.is_normalized and image.size_wh:
        scale_x, scale_y = image.size_wh
    for number, box in enumerate(entry.boxes):
        where = f"{entry.where}: object {number}" if len(entry.boxes) > 1 else entry.where
        if isinstance(box, str):
            image.num_lost += 1
            yield Finding(where, BAD_ROW, box, lost_objects=1)
            continue
        name = str(box.name).strip() if isinstance(box.name, str | int) else ""
        x1, y1, x2, y2 = box.x1 * scale_x, box.y1 * scale_y, box.x2 * scale_x, box.y2 * scale_y
        if not name or name != one_line(name):
            image.num_lost += 1
            yield Finding(where, BAD_ROW, f"{str(box.name)[:_MAX_TEXT]!r} is not the name of a class", lost_objects=1)
        elif not (x2 - x1 >= MIN_SIDE_PX and y2 - y1 >= MIN_SIDE_PX and math.isfinite(x1 + y1 + x2 + y2)):
            image.num_lost += 1
            yield Finding(where, BAD_BOX, f"x1 y1 x2 y2: {x1:g} {y1:g} {x2:g} {y2:g}", lost_objects=1)
        else:
            image.boxes.append(Box(name, x1, y1, x2, y2, box.is_group))
