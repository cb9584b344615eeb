"""What a label format is, and the two ways to store labels: one file per image, or one file per split.

A format is a module of this package with a `LabelFormat`, imported by `data.spec.dataset_yaml.format_of`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from data.labels.clean import LabelFileError, RawLabels
from data.labels.findings import ABSENT, BAD_ROW, UNLISTED, Finding
from utils.errors import UserError
from utils.files.safe_io import read_regular
from utils.machine.limits import explanation

MAX_BYTES = 1 << 26  # of a label file of one image


class FileStamp(NamedTuple):
    """What changes when a file is edited."""

    size: int  # bytes
    mtime_ns: int


class ImageFile(NamedTuple):
    name: str  # relative to the data set's folder, with /
    key: str  # relative to the split's folder, with /; the bare name for images of a .txt list
    stamp: FileStamp


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
class LabelFormat:
    """A label format. All functions are module-level functions, so that a format can be pickled; they raise UserError
    for labels that cannot be used."""

    name: str  # part of the fingerprint of an index
    notation: str  # what the numbers of a box mean: `CENTERS`, `TOP_LEFT` or `CORNERS`
    # (images, label files, root, class names): the labels of a split. With names None every object is of class 0.
    read: Callable[[list[ImageFile], list[LabelFile], Path, tuple[str, ...] | None], LabelSource]
    # (image, root, annotations, whether a path exists): the path of the image's label file. None: one file for all.
    label_path: Callable[[ImageFile, Path, Path | None, Callable[[str], bool]], str] | None = None
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
        path = os.path.join(self._root, self._files[i].name)
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


class ImageEntry(NamedTuple):
    """An image in the label file of a split. Lines of its labels are positions in the list of annotations."""

    file_name: str  # with /
    image_id: int | str
    labels: RawLabels


class SplitFile(NamedTuple):
    """The content of a label file of a split, with classes matched by name."""

    images: list[ImageEntry]
    category_ids: tuple[int, ...]  # by class; an unused id for a class that the file does not have
    annotation_ids: Sequence[Any]  # by position
    strays: list[tuple[int, str]]  # positions of annotations without an image, and the reason


class LabelsPerSplit:
    """A `LabelSource` of one file per split, in pixels. Images that it does not name are left out."""

    normalized = False

    def __init__(self, name: str, images: list[ImageFile], file: SplitFile) -> None:
        """Matches by ``file_name`` in the split's folder, else by the bare name where only one image has it. ``name``:
        of the file, relative to the data set's folder. Raises UserError if the file names none of ``images``."""
        self._name, self.category_ids, self._annotation_ids = name, file.category_ids, file.annotation_ids
        self.findings = [Finding(self._annotation(p), BAD_ROW, text) for p, text in file.strays]
        by_key = {image.key: i for i, image in enumerate(images)}
        by_base: dict[str, list[int]] = {}
        for i, image in enumerate(images):
            by_base.setdefault(os.path.basename(image.name), []).append(i)
        entry_of: dict[int, ImageEntry] = {}
        for entry in file.images:
            alike = by_base.get(os.path.basename(entry.file_name), [])
            i = by_key.get(os.path.normpath(entry.file_name), alike[0] if len(alike) == 1 else None)
            if i is None or i in entry_of:
                why = "is not among the split's images" if i is None else "is listed already"
                self.findings.append(Finding(f"{name}: image {entry.image_id}", ABSENT, f"{entry.file_name} {why}"))
            else:
                entry_of[i] = entry
        unlisted = [image.name for i, image in enumerate(images) if i not in entry_of]
        self.findings += [Finding(image, UNLISTED, f"left out: {name} doesn't name it") for image in unlisted]
        if not entry_of:
            raise UserError(
                f"{name}: names none of the split's {len(images)} images (first: {images[0].key}); "
                "check 'annotations' against the split's folder"
            )
        self.images = [images[i] for i in sorted(entry_of)]
        self._entries = [entry_of[i] for i in sorted(entry_of)]
        self.image_ids = [entry.image_id for entry in self._entries]

    def read(self, i: int) -> RawLabels | None:
        return self._entries[i].labels

    def where(self, i: int, line: int | None = None) -> str:
        return f"{self._name}: image {self.image_ids[i]}" if line is None else self._annotation(line)

    def _annotation(self, position: int) -> str:
        return f"{self._name}: annotation {self._annotation_ids[position]}"
