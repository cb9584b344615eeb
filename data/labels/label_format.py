"""Defines label formats, and reads the labels of formats with one file per image. For one file per split, see
`per_split`.

Each format is a module of this package with a `LabelFormat`, listed in `data.labels.formats`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from data.labels.categories import Category
from data.labels.findings import Finding
from data.labels.rows import LabelFileError, RawLabels
from data.split_files import FilesOfImage, ImageFile, LabelFile, OtherImages
from utils.files.paths import path_of
from utils.files.safe_io import open_regular, read_regular
from utils.machine.limits import explain_limit

MAX_BYTES = 1 << 26  # largest label file of one image
_FIRST_BYTES = 4096  # enough to recognize a file with labels
# Meanings of the four numbers of a box.
CENTERS = "cx cy w h"
TOP_LEFT = "x y w h"
CORNERS = "x1 y1 x2 y2"


class LabelSource(Protocol):
    """Reads the labels of a split, image by image."""

    normalized: bool  # whether coordinates are fractions of the image size, not pixels
    images: list[ImageFile]  # images that have or may have labels in this source
    categories: tuple[Category, ...]  # categories of the label file; empty if the format has none
    findings: list[Finding]

    @property
    def image_ids(self) -> list[int | str] | None:
        """The ids of ``images``, or None if the format has none."""

    def read(self, i: int) -> RawLabels | None:
        """Reads the labels of ``images[i]``, None without a label file. Raises LabelFileError if it is unusable."""

    def where(self, i: int, row_number: int | None = None) -> str:
        """Returns, for the report, the label file of ``images[i]``, with the location of a row that `read` returned."""


@dataclass(frozen=True, slots=True)
class LabelRequest:
    """A request to read the labels of a split."""

    images: list[ImageFile]
    files: list[LabelFile]  # one per image, or one for all
    root: Path  # the data set's folder
    names: tuple[str, ...] | None  # class names; None if every object is of class 0
    others: OtherImages = OtherImages()
    aliases: Mapping[str, FilesOfImage] = field(default_factory=dict)  # images under their other names, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelFiles:
    """Defines how to recognize the label files of a format."""

    suffix: str  # lower case
    is_labels: Callable[[bytes], bool]  # whether a file that begins with these bytes contains labels
    # Advice about such files in a folder where no labels are read. {entry} is the file, or the folder of files with
    # the names of images, as an entry of the YAML; {move} is the advice to move YOLO txt to the right folder.
    advice: str = "if they are labels, add 'annotations: {entry}' to the YAML"


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesPerImage(LabelFiles):
    """Defines how to find the label files of a format with one file per image."""

    # Takes an image folder, its part below the split's folder, and the annotations. Returns the absolute paths of the
    # folders that may contain the label files of these images, the usual one first.
    label_folders: Callable[[str, str, Path | None], list[str]]
    num_objects: Callable[[bytes], int]  # number of objects in the content of a whole file
    in_annotations: bool = False  # whether 'annotations' in the YAML names the folder of the files
    named_image: Callable[[bytes], str] | None = None  # image named in a file that begins with these bytes, or ""
    without_image_name: Callable[[bytes], bytes] = bytes  # a whole file's content without the name of its image


@dataclass(frozen=True, slots=True)
class LabelFormat:
    """A label format. All functions are module-level functions, so that a format can be pickled. They raise UserError
    for unusable labels."""

    name: str  # part of the fingerprint of an index
    notation: str  # meaning of the numbers of a box: `CENTERS`, `TOP_LEFT` or `CORNERS`
    read: Callable[[LabelRequest], LabelSource]
    files: LabelFiles  # `FilesPerImage`, unless a split has one label file
    # Returns the class names, ordered by id, in the annotations of the splits. None if annotations define no classes.
    class_names: Callable[[Sequence[Path]], tuple[str, ...]] | None = None

    @property
    def per_image(self) -> FilesPerImage | None:
        """Defines how to find the label file of each image. None if a split has one label file."""
        return self.files if isinstance(self.files, FilesPerImage) else None


def first_bytes(path: str | Path) -> bytes:
    """Returns the beginning of a file, for `LabelFiles.is_labels`, or b"" if it cannot be read. Raises OSError if the
    machine fails, because the labels in the file would be ignored."""
    try:
        with open_regular(path) as file:
            return file.read(_FIRST_BYTES)
    except OSError as error:
        if explain_limit(error):
            raise
        return b""


class LabelPerImage:
    """A `LabelSource` that reads labels from one file per image."""

    image_ids: list[int | str] | None = None
    categories: tuple[Category, ...] = ()

    def __init__(self, request: LabelRequest, parse: Callable[[bytes], RawLabels], *, normalized: bool) -> None:
        self.images = request.images
        self.normalized = normalized
        self.findings: list[Finding] = []
        self._files = request.files
        self._root = request.root
        self._parse = parse
        self._without_lines: set[int] = set()  # images whose row numbers are not lines, see `RawLabels.is_by_line`

    def read(self, i: int) -> RawLabels | None:
        if self._files[i].stamp is None:
            return None
        path = path_of(self._files[i].name, self._root)
        try:
            data = read_regular(path, max_bytes=MAX_BYTES)
        except OSError as error:
            if explain_limit(error):  # a failure of the machine; the file itself may be correct
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
