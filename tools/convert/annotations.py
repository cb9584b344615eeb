"""Collects the boxes of an annotation tool's export by image."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from data.dataset.folder import split_of
from data.dataset.spec import SPLITS
from data.labels.clean import MIN_SIDE_PX
from tools.convert.extracted_images import ExtractedImages
from tools.convert.source_images import SourceImages
from tools.convert.split_names import split_of_file, split_of_folders
from utils.errors import UserError, one_line
from utils.strings import counted


class AnnotatedBox(NamedTuple):
    """A labeled box: its class, and its corners in pixels."""

    name: str  # class name
    x1: float
    y1: float
    x2: float
    y2: float
    crowd: bool = False  # whether the box is around a group, which is a region to ignore

    @classmethod
    def of_xywh(cls, name: str, x: float, y: float, w: float, h: float, *, crowd: bool = False) -> AnnotatedBox:
        """Makes a box from its top-left corner and its size."""
        return cls(name, x, y, x + w, y + h, crowd)


@dataclass
class AnnotatedImage:
    """The split, the boxes and the size of an image according to the annotations."""

    path: Path
    split: str
    location: str  # of its first entry
    boxes: list[AnnotatedBox] = field(default_factory=list)
    size: tuple[int, int] | None = None  # width and height
    has_skipped_shape: bool = False  # in any of its entries
    _files: dict[AnnotatedBox, Path] = field(default_factory=dict)  # the annotation file of each box

    def set_size(self, entry: Entry) -> None:
        """Sets the size of the image, if ``entry`` contains it. Raises UserError if another entry has another size,
        because the boxes of one of them would be wrong."""
        if entry.size and self.size and entry.size != self.size:
            raise UserError(
                f"{entry.location}: {self.path.name} has {_shown(entry.size)} pixels here, and {_shown(self.size)} in "
                "another entry; remove one of them"
            )
        self.size = entry.size or self.size

    def add(self, box: AnnotatedBox, entry: Entry) -> None:
        """Adds a box of ``entry``. Raises UserError if another annotation file has the same box."""
        other_file = self._files.setdefault(box, entry.file)
        if other_file != entry.file:
            raise UserError(
                f"{entry.location}: {self.path.name} has the same box of '{box.name}' in {other_file}; remove one file"
            )
        self.boxes.append(box)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The annotations of an image in one place of an annotation file.

    Args:
        image: path of the image in the annotations, with or without suffix; a `Path` if the image is known to exist.
        boxes: the boxes; None for a skipped shape.
        location: the file, and the line or entry, for messages.
        file: the annotation file; an image in its folder is preferred.
        split: name of the split in the annotations; empty: derived from the names of folders and files.
        size: width and height, if the annotations contain them.
        is_complete: whether ``boxes`` are all objects of the image. A second entry for the image is then an error: it
            is about another image of this name, or an older version.
    """

    image: str | Path
    boxes: Sequence[AnnotatedBox | None]
    location: str
    file: Path
    split: str = ""
    size: tuple[int, int] | None = None
    is_complete: bool = False


class SkippedShapes:
    """Shapes without an area, which are left out."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()  # by the tool's name of their kind
        self._first_location = ""

    def add(self, kind: str, location: str) -> None:
        """Counts a shape. ``kind``: the tool's name for it."""
        self._first_location = self._first_location or location
        self._counts[kind] += 1

    def summary(self) -> str:
        """Returns a message about the shapes; "" if there are none."""
        if not self._counts:
            return ""
        kinds = ", ".join(f"{kind} ({count:,})" for kind, count in self._counts.most_common())
        return f"left out because they have no area: {kinds}; the first in {self._first_location}"


class Annotations:
    """Collects boxes by image, and counts the objects of the source."""

    def __init__(self, source_images: SourceImages, extracted: ExtractedImages, *, is_per_image: bool) -> None:
        """``is_per_image``: whether an annotation file is named after its image. Its name then never denotes a
        split."""
        self.source_images = source_images
        self.extracted = extracted
        self.num_objects: Counter[str] = Counter()  # in the source, of any shape, by class
        self.ignored_names: set[str] = set()  # names of boxes that are regions to ignore, even if none has an area
        self.skipped = SkippedShapes()
        self._is_per_image = is_per_image
        self._images: dict[Path, AnnotatedImage] = {}
        self._complete: dict[Path, str] = {}  # location of the complete entry of an image, if there is one

    def add(self, entry: Entry) -> None:
        """Adds the objects of an image. Raises UserError if it cannot be found, or a box is not valid."""
        checked = [None if box is None else self._checked(box, entry.location) for box in entry.boxes]
        boxes = [box for box in checked if box is not None]
        annotated = self._annotated_image(entry)
        annotated.set_size(entry)
        annotated.has_skipped_shape |= None in checked
        for box in boxes:
            annotated.add(box, entry)
        self.num_objects.update(box.name for box in boxes)

    def _annotated_image(self, entry: Entry) -> AnnotatedImage:
        """Returns the annotations so far of an entry's image. Raises UserError if the image cannot be found, is in
        another split, or has another complete entry."""
        path = entry.image
        if not isinstance(path, Path):
            path = self.source_images.find(path, entry.location, entry.file, entry.split)
        if entry.is_complete:
            other_location = self._complete.setdefault(path, entry.location)
            if other_location != entry.location:
                raise UserError(
                    f"{entry.location}: {path.name} is also labeled in {other_location}; remove one of them"
                )
        split = split_of(entry.split) or self._split_of_paths(path, entry.file) or "train"
        annotated = self._images.setdefault(path, AnnotatedImage(path, split, entry.location))
        if annotated.split != split:
            raise UserError(
                f"{entry.location}: {path.name} is in '{split}' here, and in '{annotated.split}' in "
                f"{annotated.location}; remove one of them"
            )
        return annotated

    def _split_of_paths(self, image: Path, file: Path) -> str:
        """Returns the split that a folder of the image or its annotation file is named after, or a file that annotates
        several images; "" if there is none."""
        root = self.source_images.root
        if self._is_per_image:
            return split_of_folders(image, root) or split_of_folders(file, root)
        return split_of_folders(image, root) or split_of_file(file, root)

    def _checked(self, box: AnnotatedBox, location: str) -> AnnotatedBox | None:
        """Returns ``box`` with a trimmed name; skips a box without area. Raises UserError unless it has a class name,
        and corners that are in order and have a finite area."""
        box = box._replace(name=box.name.strip())
        if not box.name or one_line(box.name) != box.name:
            raise UserError(f"{location}: {box.name!r} is not the name of a class, which is one line of text")
        w = box.x2 - box.x1
        h = box.y2 - box.y1
        corners = " ".join(f"{value:g}" for value in box[1:5])
        if w < 0 or h < 0:
            raise UserError(f"{location}: '{box.name}' has x2 < x1 or y2 < y1 (x1 y1 x2 y2: {corners})")
        if not math.isfinite(w * h):
            raise UserError(f"{location}: '{box.name}' is larger than any image (x1 y1 x2 y2: {corners})")
        if min(w, h) < MIN_SIDE_PX:
            self.skipped.add("box", location)
            return None
        return box

    def drop_left_out(self) -> None:
        """Drops the images whose shapes were all skipped. Call it after all entries. As backgrounds, these images would
        teach the model to ignore their objects."""
        for path, annotated in list(self._images.items()):
            if annotated.boxes or not annotated.has_skipped_shape:
                continue
            del self._images[path]
            self.extracted.remove(path)

    def images_by_split(self) -> dict[str, list[AnnotatedImage]]:
        """Returns the images of each split that has any, sorted by path."""
        images_by_split: dict[str, list[AnnotatedImage]] = {split: [] for split in SPLITS}
        for _, annotated in sorted(self._images.items()):
            images_by_split[annotated.split].append(annotated)
        return {split: images for split, images in images_by_split.items() if images}

    def num_left_out(self) -> int:
        """Counts the images, below the source and in its files, without usable labels: the annotations say nothing
        about them, or they were dropped."""
        return len(set(self.source_images.paths) - self._images.keys()) + self.extracted.num_unused

    def class_names(self) -> list[str]:
        """Returns the classes of the objects, sorted."""
        return sorted(self.num_objects)

    def ignored_classes(self) -> list[str]:
        """Returns the classes whose boxes are regions to ignore, sorted."""
        return sorted(self.ignored_names & self.num_objects.keys())


def bounding_box(name: str, points: Sequence[tuple[float, float]]) -> AnnotatedBox:
    """Returns the box around points."""
    xs, ys = zip(*points)
    return AnnotatedBox(name, min(xs), min(ys), max(xs), max(ys))


def around_polygon(name: str, points: Sequence[tuple[float, float]], kind: str, location: str) -> AnnotatedBox:
    """Returns the box around a shape of three or more points. ``kind``: the tool's name for it. Raises UserError for
    fewer points, whose meaning is unknown."""
    if len(points) < 3:
        raise UserError(f"{location}: a {kind} of '{one_line(name)}' with {counted(len(points), 'point')}")
    return bounding_box(name, points)


def _shown(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"
