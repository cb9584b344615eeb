"""Reads and checks all images and labels of a split in parallel, and returns flat arrays and a report.

Threads suffice: reading and decoding (OpenCV) are nearly all of the work, and release the GIL.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import NamedTuple

import numpy as np

from data.image_io.verify import HiddenDamageError, check_image
from data.index.files import Listing
from data.index.index import DatasetIndex, Scan
from data.index.views import IndexSettings
from data.labels import findings as kinds
from data.labels.clean import (
    CLASS,
    IMAGE,
    Boxes,
    LabelFileError,
    RawLabels,
    RowProblem,
    clean_rows,
    ids_from_1,
    other_notation,
    row_table,
    too_dark,
)
from data.labels.findings import Finding
from data.labels.label_format import LabelSource
from data.labels.ledger import Ledger
from data.labels.report import ScanReport
from data.spec.dataset_spec import DatasetSpec, class_names
from utils.errors import UserError
from utils.files.paths import path_of
from utils.logger import get_logger, progress
from utils.machine.resources import available_cores
from utils.machine.threads import map_ahead
from utils.strings import FlatStrings

SAMPLED = 128  # images: if 2 % of a data set are damaged, one of these is with a probability of 92 %
_CHUNK = 32  # images per task: enough to hide its overhead, few enough to keep the progress bar moving


class ScannedImage(NamedTuple):
    """The size, labels and findings of an image."""

    size_hw: tuple[int, int]  # upright; (0, 0) if the image is unreadable
    table: np.ndarray  # float64 (R, 9), see data.labels.clean
    findings: list[Finding]
    is_hidden: bool = False  # only decoding shows its damage
    largest: int = 0  # value of a 16-bit image; 0 for other images


def scan_split(
    spec: DatasetSpec, split: str, listing: Listing, settings: IndexSettings, *, decode_all: bool = False
) -> Scan:
    """Reads a listed split. Suspicious images, images of unusual kinds, and `SAMPLED` others are decoded; if one of the
    latter is damaged, or with ``decode_all``, all are. Raises UserError if the labels do not match the names."""
    names = None if settings.single_cls else spec.names
    images = [*listing.images, *listing.others]
    source = listing.label_format.read(images, listing.labels, spec.root, names)
    count = len(source.images)
    decoded = np.full(count, decode_all)
    decoded[np.random.Generator(np.random.Philox(key=count)).permutation(count)[:SAMPLED]] = True
    images = _read_all(spec, source, decoded, f"scanning {split}", settings)
    hidden = sum(image.is_hidden for image in images)
    if hidden and not decoded.all():
        get_logger().warning(
            "%s: decoding shows that %d of %d sampled images are damaged; decoding all images",
            split, hidden, decoded.sum(),
        )  # fmt: skip
        decoded[:] = True
        images = _read_all(spec, source, decoded, f"decoding {split}", settings)
    image_hw = np.array([image.size_hw for image in images], np.int32)
    table = np.concatenate([image.table for image in images])
    boxes, row_problems = clean_rows(table, image_hw, source.normalized)
    found = [finding for image in images for finding in image.findings]
    unknown = [f for f in found if f.kind == kinds.UNKNOWN_CLASS]
    advice = [
        ids_from_1([f.class_id for f in unknown], table[:, CLASS], len(spec.names)),
        other_notation(table, image_hw, listing.label_format.notation, normalized=source.normalized),
        too_dark(max(image.largest for image in images), spec.pixels.bits),
    ]
    misread = [Finding(split, kinds.MISREAD, text) for text in advice if text]
    found += [_finding(source, image, problem) for image, problem in row_problems]
    found += _unusable_labels(found, boxes, source)
    found.sort(key=lambda f: (f.image, f.line))
    _check_labels_fit(unknown, found, len(boxes.image), spec, split, advice[0])
    found = _with_costs(found, _labeled_rows(table, found, count))
    findings = [*listing.findings, *source.findings, *misread, *found]
    numbers, arrays = _usable(image_hw, boxes, found)
    ledger = Ledger.of(findings, len(numbers), len(arrays["classes"]))
    ids = source.image_ids
    index = DatasetIndex(
        names=class_names(spec, settings.single_cls),
        root=spec.root,
        paths=FlatStrings.of(source.images[i].name for i in numbers),
        **arrays,
        report=ScanReport.of(findings, ledger),
        image_ids=None if ids is None else FlatStrings.of(json.dumps(ids[i]) for i in numbers),
        category_ids=source.category_ids,
    )
    return Scan(spec, index.recounted(), source, np.array(numbers, np.int64), findings)


def _read_all(
    spec: DatasetSpec, source: LabelSource, decoded: np.ndarray, title: str, settings: IndexSettings
) -> list[ScannedImage]:
    count = len(source.images)

    def read(first: int) -> list[ScannedImage]:
        return [_read_one(i, spec, source, bool(decoded[i])) for i in range(first, min(first + _CHUNK, count))]

    threads = min(32, max(settings.workers, available_cores())) if settings.workers else 1
    images = itertools.chain.from_iterable(map_ahead(read, range(0, count, _CHUNK), threads=threads))
    return list(progress(images, desc=title, total=count, enabled=settings.progress))


def _read_one(i: int, spec: DatasetSpec, source: LabelSource, decode: bool) -> ScannedImage:
    name, largest, empty = source.images[i].name, [0], row_table(i, [])
    path = path_of(name, spec.root)
    try:
        size = check_image(path, decode=decode, pixels=spec.pixels, largest=largest)
    except UserError as error:
        finding = Finding(name, kinds.BAD_IMAGE, f"{str(error).removeprefix(path + ': ')}; left out", i)
        return ScannedImage((0, 0), empty, [finding], isinstance(error, HiddenDamageError), max(largest))
    try:
        raw = source.read(i)
    except LabelFileError as error:
        raw = RawLabels([], [RowProblem(-1, kinds.BAD_LABEL, f"{error}; image left out")])
    if raw is None:
        raw = RawLabels([], [RowProblem(-1, kinds.NO_LABEL, f"{name} is taken as background")])
    problems = raw.problems
    if raw.size_hw not in (None, size):
        (height, width), (h, w) = size, raw.size_hw
        text = f"labels are for {w}x{h}, the image is {width}x{height} upright; boxes are not rescaled"
        problems = [*problems, RowProblem(-1, kinds.SIZE, text)]
    scale = (size[1], size[0]) * 2 if source.normalized else (1, 1, 1, 1)
    findings = [_finding(source, i, problem, scale) for problem in problems]
    return ScannedImage(size, row_table(i, raw.rows), findings, largest=max(largest))


def _finding(source: LabelSource, image: int, p: RowProblem, scale: tuple[int, ...] = (1, 1, 1, 1)) -> Finding:
    """A problem of a row, or with line -1 of the whole file. ``scale``: from the units of its corners to pixels."""
    where = source.where(image, None if p.line < 0 else p.line)
    return Finding(where, p.kind, p.text, image, p.line, p.class_id, tuple(v * side for v, side in zip(p.xyxy, scale)))


def _unusable_labels(found: list[Finding], boxes: Boxes, source: LabelSource) -> list[Finding]:
    """Findings for images whose labels have a number that is not finite, or whose objects are all unusable. As
    backgrounds these images would teach the model to ignore their objects."""
    with_boxes = set(np.unique(boxes.image).tolist())
    first = {f.image: f for f in reversed(found) if f.kind in kinds.ROW_LOST and f.image not in with_boxes}
    first |= {f.image: f for f in reversed(found) if f.kind == kinds.NOT_FINITE}
    lost = []
    for i, f in first.items():
        # Without what differs from row to row, so that equal causes can be counted.
        why = f"no row can be used: {re.split(': |, got ', f.text.removesuffix('; left out'))[0]}"
        if f.kind == kinds.NOT_FINITE:
            why = "a number is not finite"
        elif f.kind == kinds.OUTSIDE:
            pixels = "; coordinates in pixels?" if source.normalized else ""
            why = f"no row can be used: the boxes are outside the image{pixels}"
        lost.append(Finding(source.where(i, f.line), kinds.BAD_LABEL, f"{why}; image left out", i))
    return lost


def _labeled_rows(table: np.ndarray, found: list[Finding], count: int) -> np.ndarray:
    """The number of labeled objects of each image, int64 (N,): rows of the table, and rows that no parser could use."""
    in_table = {(f.image, f.line) for f in found if f.kind in (kinds.NO_AREA, kinds.OUTSIDE)}
    unparsed = [f.image for f in found if f.kind in kinds.ROW_LOST and (f.image, f.line) not in in_table]
    rows = np.bincount(table[:, IMAGE].astype(np.int64), minlength=count)
    return rows + np.bincount(np.array(unparsed, np.int64), minlength=count)


def _with_costs(found: list[Finding], rows: np.ndarray) -> list[Finding]:
    """``found`` with what is lost with each. Of an image that is left out, one finding has all of the ``rows``."""
    first = {f.image: position for position, f in reversed(list(enumerate(found))) if f.kind in kinds.IMAGE_LOST}
    costed = []
    for position, f in enumerate(found):
        if first.get(f.image) == position:
            costed.append(f._replace(lost_images=1, lost_objects=int(rows[f.image])))
        elif f.kind in kinds.ROW_LOST and f.image not in first:
            costed.append(f._replace(lost_objects=1))
        else:
            costed.append(f)
    return costed


def _check_labels_fit(
    unknown: list[Finding], found: list[Finding], boxes: int, spec: DatasetSpec, split: str, advice: str
) -> None:
    others = boxes + sum(f.kind in kinds.ROW_LOST for f in found) - len(unknown)
    if len(unknown) > others:
        first = unknown[0]
        raise UserError(
            f"{spec.source}: the names don't match the labels: {len(unknown):,} of {len(unknown) + others:,} objects "
            f"in '{split}' have a class that is not in 'names' (first: {first.where}: {first.text})"
            f"{advice and '; '}{advice}"
        )


def _usable(image_hw: np.ndarray, boxes: Boxes, found: list[Finding]) -> tuple[list[int], dict[str, np.ndarray]]:
    """The numbers of the usable images, and the arrays of an index that has these."""
    keep = np.ones(len(image_hw), bool)
    keep[[f.image for f in found if f.kind in kinds.IMAGE_LOST]] = False
    boxes = Boxes(*(column[keep[boxes.image]] for column in boxes))
    columns = boxes._asdict()
    per_image = np.bincount(columns.pop("image"), minlength=len(keep))[keep]
    offsets = np.concatenate([[0], np.cumsum(per_image)]).astype(np.int64)
    return np.flatnonzero(keep).tolist(), columns | {"image_hw": image_hw[keep], "offsets": offsets}
