"""Defines label formats, and reads the labels of formats with one file per image (`per_split`: one file per split).

A format is a module of this package with a `LabelFormat`, which `data.labels.formats` lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from data.labels.categories import Category
from data.labels.findings import Finding
from data.labels.rows import LabelFileError, RawLabels
from data.split_files import ImageFile, LabelFile, NamesOfImage, OtherImages
from utils.files.paths import path_of
from utils.files.safe_io import open_regular, read_regular
from utils.process.limits import explain_limit

MAX_BYTES = 1 << 26  # largest label file of one image
_FIRST_BYTES = 4096  # suffice to recognize a file with labels
# What the four numbers of a box mean.
CENTERS = "cx cy w h"
TOP_LEFT = "x y w h"
CORNERS = "x1 y1 x2 y2"


class LabelSource(Protocol):
    """Reads the labels of a split, image by image."""

    normalized: bool  # coordinates are fractions of the image size, not pixels
    images: list[ImageFile]  # those that have labels in this source, or may have
    categories: tuple[Category, ...]  # of the label file; empty if the format has none
    findings: list[Finding]

    @property
    def image_ids(self) -> list[int | str] | None:
        """The ids of ``images``; None if the format has none."""

    def read(self, i: int) -> RawLabels | None:
        """Reads the labels of ``images[i]``; None if there is no file. Raises LabelFileError."""

    def where(self, i: int, row_number: int | None = None) -> str:
        """Returns the label file of ``images[i]``, for the report, and where in it a row is that `read` has
        returned."""


@dataclass(frozen=True, slots=True)
class LabelRequest:
    """Says what is to be read: the labels of a split."""

    images: list[ImageFile]
    files: list[LabelFile]  # one per image, or one for all
    root: Path  # the data set's folder
    names: tuple[str, ...] | None  # of the classes; None: every object is of class 0
    others: OtherImages = OtherImages()
    aliases: Mapping[str, NamesOfImage] = field(default_factory=dict)  # images under their other names, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelFiles:
    """Says how to recognize the label files of a format."""

    suffix: str  # lower case
    is_labels: Callable[[bytes], bool]  # whether a file that begins like this has labels
    # What to do with such files in a place where no labels are read. {entry} is the file, or the folder of files with
    # the names of images, as an entry of the YAML; {move} says where YOLO txt should be.
    advice: str = "if they are labels, add 'annotations: {entry}' to the YAML"


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesPerImage(LabelFiles):
    """Says how to find the label files of a format with one file per image."""

    # (folder of images, the part of it below the split's folder, annotations): the folders in which the label files of
    # these images may be, the usual one first; absolute paths.
    label_folders: Callable[[str, str, Path | None], list[str]]
    num_objects: Callable[[bytes], int]  # number of objects in the content of a whole file
    in_annotations: bool = False  # whether 'annotations' of the YAML names the folder of the files
    named_image: Callable[[bytes], str] | None = None  # the image that a file that begins like this names, or ""


@dataclass(frozen=True, slots=True)
class LabelFormat:
    """A label format. All functions are module-level functions, so that a format can be pickled; they raise UserError
    for labels that cannot be used."""

    name: str  # part of the fingerprint of an index
    notation: str  # what the numbers of a box mean: `CENTERS`, `TOP_LEFT` or `CORNERS`
    read: Callable[[LabelRequest], LabelSource]
    files: LabelFiles  # `FilesPerImage`, or else a split has one label file
    # The class names, by id, of the annotations of the splits. None: they define none.
    class_names: Callable[[Sequence[Path]], tuple[str, ...]] | None = None

    @property
    def per_image(self) -> FilesPerImage | None:
        """How to find the label file of each image; None: a split has one label file."""
        return self.files if isinstance(self.files, FilesPerImage) else None


def first_bytes(path: str | Path) -> bytes:
    """Returns the beginning of a file, by which `LabelFiles.is_labels` recognizes it; nothing if it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(_FIRST_BYTES)
    except OSError:
        return b""


class LabelPerImage:
    """Reads labels from one file per image; a `LabelSource`."""

    image_ids: list[int | str] | None = None
    categories: tuple[Category, ...] = ()

    def __init__(self, request: LabelRequest, parse: Callable[[bytes], RawLabels], *, normalized: bool) -> None:
        self.images = request.images
        self.normalized = normalized
        self.findings: list[Finding] = []
        self._files = request.files
        self._root = request.root
        self._parse = parse
        self._without_lines: set[int] = set()  # images, see `RawLabels.is_by_line`

    def read(self, i: int) -> RawLabels | None:
        if self._files[i].stamp is None:
            return None
        path = path_of(self._files[i].name, self._root)
        try:
            data = read_regular(path, max_bytes=MAX_BYTES)
        except OSError as error:
            if explain_limit(error):  # the disk has failed; the file itself may be correct
                error.filename = path
                raise
            raise LabelFileError(f"cannot be read ({error.strerror})") from None
        labels = self._parse(data)
        if not labels.is_by_line:
            self._without_lines.add(i)
        return labels

    def where(self, i: int, row_number: int | None = None) -> str:
        name = self._files[i].name
        if row_number is None:
            return name
        return f"{name}: object {row_number}" if i in self._without_lines else f"{name}:{row_number}"
