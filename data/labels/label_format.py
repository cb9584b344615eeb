"""What a label format is, and the labels of formats with one file per image (data.labels.coco: one file per split).

A format is a module of this package with a `LabelFormat`, imported by `data.source.dataset_yaml.format_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from data.labels.clean import LabelFileError, RawLabels
from data.labels.findings import Finding
from utils.files.paths import path_of
from utils.files.safe_io import read_regular
from utils.machine.limits import explanation

MAX_BYTES = 1 << 26  # of a label file of one image


class FileStamp(NamedTuple):
    """What changes when a file is edited."""

    size: int  # bytes
    mtime_ns: int


class ImageFile(NamedTuple):
    name: str  # relative to the data set's folder, with /
    # Relative to the split's folder, with /; the bare name for images of a .txt list; "" for an image of no split.
    key: str
    stamp: FileStamp | None  # None: not of this split, but its labels may be in the same file


class LabelFile(NamedTuple):
    name: str  # relative to the data set's folder, with /
    stamp: FileStamp | None  # None: there is no such file


class LabelSource(Protocol):
    """The labels of a split by image."""

    normalized: bool  # coordinates are fractions of the image size, not pixels
    images: list[ImageFile]  # those that have labels in this source, or may have
    image_ids: list[int | str] | None  # None: the source has none
    category_ids: tuple[int, ...]  # by class
    findings: list[Finding]

    def read(self, i: int) -> RawLabels | None:
        """Labels of ``images[i]``; None if there is no file. Raises LabelFileError."""

    def where(self, i: int, line: int | None = None) -> str:
        """The label file of ``images[i]``, and the line in it, for the report."""


@dataclass(frozen=True, slots=True)
class FilesPerImage:
    """How the label files of a format that has one per image are found, and told from other files."""

    suffix: str  # lower case
    # (folder of images, the part of it below the split's folder, annotations): the folders in which the label files of
    # these images may be, the usual one first; absolute paths.
    folders: Callable[[str, str, Path | None], list[str]]
    is_labels: Callable[[bytes], bool]  # whether a file that begins like this has labels
    num_objects: Callable[[bytes], int]  # of a whole file
    named_image: Callable[[bytes], str] | None = None  # the image that a file that begins like this names, or ""


@dataclass(frozen=True, slots=True)
class LabelFormat:
    """A label format. All functions are module-level functions, so that a format can be pickled; they raise UserError
    for labels that cannot be used."""

    name: str  # part of the fingerprint of an index
    notation: str  # what the numbers of a box mean: `CENTERS`, `TOP_LEFT` or `CORNERS`
    # (images, label files, root, class names): the labels of a split. With names None every object is of class 0.
    read: Callable[[list[ImageFile], list[LabelFile], Path, tuple[str, ...] | None], LabelSource]
    per_image: FilesPerImage | None = None  # None: a split has one label file
    # The class names, by id, of the annotations of the splits. None: they define none.
    class_names: Callable[[Sequence[Path]], tuple[str, ...]] | None = None


class LabelPerImage:
    """A `LabelSource` of one file per image."""

    image_ids = None

    def __init__(
        self,
        images: list[ImageFile],
        files: list[LabelFile],
        root: Path,
        names: tuple[str, ...] | None,
        parse: Callable[[bytes], RawLabels],
        *,
        normalized: bool,
    ) -> None:
        self.images, self.normalized, self.findings = images, normalized, []
        self.category_ids = (0,) if names is None else tuple(range(len(names)))
        self._files, self._root, self._parse = files, root, parse

    def read(self, i: int) -> RawLabels | None:
        if self._files[i].stamp is None:
            return None
        path = path_of(self._files[i].name, self._root)
        try:
            data = read_regular(path, most=MAX_BYTES)
        except OSError as error:
            if explanation(error):  # the disk has failed, the file may be correct
                error.filename = path
                raise
            raise LabelFileError(f"cannot be read ({error.strerror})") from None
        return self._parse(data)

    def where(self, i: int, line: int | None = None) -> str:
        return self._files[i].name if line is None else f"{self._files[i].name}:{line}"
