"""Labels by image, whatever the format: what the scan asks, answered for YOLO txt, VOC XML and COCO JSON."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Protocol

from data.index.dataset_yaml import DatasetSpec
from data.index.files import ImageFile, LabelFile, Listing
from data.labels.clean import LabelFileError, RawLabels
from data.labels.coco import CocoImage, read_coco
from data.labels.findings import ABSENT, BAD_ROW, UNLISTED, Finding
from data.labels.voc import parse_voc
from data.labels.yolo import parse_yolo
from utils.errors import UserError
from utils.files.safe_io import read_regular
from utils.machine.limits import explanation

MOST_BYTES = 1 << 26  # of a label file of one image


class LabelSource(Protocol):
    """Labels by image, whatever the format."""

    normalised: bool
    images: list[ImageFile]  # those that the source speaks of
    image_ids: list[int | str] | None
    category_ids: tuple[int, ...]
    findings: list[Finding]

    def read(self, i: int) -> RawLabels | None:
        """Labels of ``images[i]``, None when there is no file. Raises LabelFileError."""

    def where(self, i: int, line: int | None = None) -> str:
        """The place for the report."""


class _LabelFiles:
    """One file an image: YOLO txt or VOC XML."""

    def __init__(
        self,
        listing: Listing,
        spec: DatasetSpec,
        parse: Callable[[bytes], RawLabels],
        *,
        normalised: bool,
        single_cls: bool,
    ):
        self.images, self.normalised, self.findings = listing.images, normalised, []
        self.image_ids, self.category_ids = None, (0,) if single_cls else tuple(range(len(spec.names)))
        self._labels: list[LabelFile] = listing.labels
        self._root, self._parse = spec.root, parse

    def read(self, i: int) -> RawLabels | None:
        if self._labels[i].stamp is None:
            return None
        path = os.path.join(self._root, self._labels[i].name)
        try:
            data = read_regular(path, most=MOST_BYTES)
        except OSError as error:
            if explanation(error):  # no fault of the file's
                error.filename = path
                raise
            raise LabelFileError(f"cannot be read ({error.strerror})") from None
        return self._parse(data)

    def where(self, i: int, line: int | None = None) -> str:
        return self._labels[i].name if line is None else f"{self._labels[i].name}:{line}"


class _CocoLabels:
    """One JSON for all images."""

    normalised = False

    def __init__(self, listing: Listing, spec: DatasetSpec, names: tuple[str, ...] | None):
        self._name = listing.labels[0].name
        coco = read_coco(spec.root / self._name, names)
        self._annotation_ids, self.category_ids = coco.annotation_ids, coco.category_ids
        self.findings = [
            Finding(f"{self._name}: annotation {coco.annotation_ids[p]}", BAD_ROW, t) for p, t in coco.strays
        ]
        self.images, entries = self._match(listing.images, coco.images)
        self.image_ids = [e.image_id for e in entries]
        self._labels = [e.labels for e in entries]

    def _match(self, images: list[ImageFile], entries: list[CocoImage]) -> tuple[list[ImageFile], list[CocoImage]]:
        """Images by file_name in the split's folder; by the bare name where only one image has it."""
        by_key = {image.key: i for i, image in enumerate(images)}
        by_base: dict[str, list[int]] = {}
        for i, image in enumerate(images):
            by_base.setdefault(os.path.basename(image.name), []).append(i)
        entry_of: dict[int, CocoImage] = {}
        for entry in entries:
            alike = by_base.get(os.path.basename(entry.file_name), [])
            i = by_key.get(os.path.normpath(entry.file_name), alike[0] if len(alike) == 1 else None)
            if i is None or i in entry_of:
                why = "is not among the split's images" if i is None else "is listed already"
                self.findings.append(
                    Finding(f"{self._name}: image {entry.image_id}", ABSENT, f"{entry.file_name} {why}")
                )
            else:
                entry_of[i] = entry
        for i, image in enumerate(images):
            if i not in entry_of:
                self.findings.append(Finding(image.name, UNLISTED, f"left out: {self._name} doesn't name it"))
        kept = sorted(entry_of)
        if not kept:
            raise UserError(
                f"{self._name}: names none of the split's {len(images)} images (first: {images[0].key}); "
                "check 'annotations' against the split's folder"
            )
        return [images[i] for i in kept], [entry_of[i] for i in kept]

    def read(self, i: int) -> RawLabels | None:
        return self._labels[i]

    def where(self, i: int, line: int | None = None) -> str:
        if line is None:
            return f"{self._name}: image {self.image_ids[i]}"
        return f"{self._name}: annotation {self._annotation_ids[line]}"


def label_source(spec: DatasetSpec, split: str, listing: Listing, single_cls: bool) -> LabelSource:
    """The source that the data set's YAML asks for. Raises UserError when a COCO JSON can't be used."""
    annotations = spec.split(split).annotations
    if annotations is None:
        parse = partial(parse_yolo, num_classes=None if single_cls else len(spec.names))
        return _LabelFiles(listing, spec, parse, normalised=True, single_cls=single_cls)
    if annotations.is_dir():
        class_ids = None if single_cls else {name: i for i, name in enumerate(spec.names)}
        parse = partial(parse_voc, class_ids=class_ids)
        return _LabelFiles(listing, spec, parse, normalised=False, single_cls=single_cls)
    return _CocoLabels(listing, spec, None if single_cls else spec.names)
