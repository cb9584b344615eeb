"""Reads and checks all images and labels of a split in parallel, and returns flat arrays and a report.

The scan uses threads, not processes: reading and decoding (OpenCV) are nearly all of the work, and release the GIL.
Threads start quickly, share the listing, and are safe in a process that uses a GPU or communicates with other ranks.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from data.image_io.verify import HiddenDamageError, check_image
from data.index.files import Listing
from data.index.index import DatasetIndex
from data.index.views import IndexSettings
from data.labels.clean import (
    CLASS,
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
from data.labels.findings import (
    BAD_IMAGE,
    BAD_LABEL,
    BAD_ROW,
    IMAGE_LOST,
    MISREAD,
    NO_LABEL,
    NOT_FINITE,
    OUTSIDE,
    SIZE,
    UNKNOWN_CLASS,
    Finding,
    ScanReport,
)
from data.labels.label_format import LabelSource
from data.spec.dataset_spec import DatasetSpec, class_names
from utils.errors import UserError
from utils.logger import get_logger, progress
from utils.machine.resources import available_cores
from utils.strings import FlatStrings

SAMPLED = 128  # images: if 2 % of a data set are damaged, one of these is with a probability of 92 %
_CHUNK = 32  # images per task: enough to hide its overhead, few enough to keep the progress bar moving
_UNUSABLE = frozenset({BAD_ROW, OUTSIDE, UNKNOWN_CLASS})  # rows of objects that cannot be used


class LocatedFinding(NamedTuple):
    """A finding, and its position in the data set, by which the report is sorted."""

    image: int
    line: int  # -1: the image or the label file itself
    finding: Finding
    class_id: int = -1  # of a box whose geometry is the problem, and
    xyxy_px: tuple[float, ...] = ()  # its corners as labeled, original pixels; empty: there is no such box


class ScannedChunk(NamedTuple):
    """Sizes, labels and findings of n consecutive images."""

    image_hw: np.ndarray  # int32 (n, 2); (0, 0) if the image is unreadable
    table: np.ndarray  # float64 (R, 9), see data.labels.clean
    found: list[LocatedFinding]
    hidden: int  # images whose damage only decoding shows
    largest: int  # value of the 16-bit images; 0 without such images

    def __len__(self) -> int:
        return len(self.image_hw)


class Scan(NamedTuple):
    """A scanned split, and the positions of its images and findings in the files."""

    index: DatasetIndex  # N usable images with the classes of the labels
    source: LabelSource
    numbers: np.ndarray  # int64 (N,) of the usable images in ``source.images``
    found: list[LocatedFinding]  # findings about an image in ``source.images``
    general: list[Finding]  # all others


def scan_split(
    spec: DatasetSpec, split: str, listing: Listing, settings: IndexSettings, *, decode_all: bool = False
) -> Scan:
    """Reads a listed split. Suspicious images, images of unusual kinds, and `SAMPLED` others are decoded; if one of the
    latter is damaged, or with ``decode_all``, all are. Raises UserError if the labels do not match the names."""
    names = None if settings.single_cls else spec.names
    source = listing.label_format.read(listing.images, listing.labels, spec.root, names)
    count = len(source.images)
    decoded = np.full(count, decode_all)
    decoded[np.random.Generator(np.random.Philox(key=count)).permutation(count)[:SAMPLED]] = True
    chunks = _read_all(spec, source, decoded, f"scanning {split}", settings)
    hidden = sum(chunk.hidden for chunk in chunks)
    if hidden and not decoded.all():
        get_logger().warning(
            "%s: decoding shows that %d of %d sampled images are damaged; decoding all images",
            split, hidden, decoded.sum(),
        )  # fmt: skip
        decoded[:] = True
        chunks = _read_all(spec, source, decoded, f"decoding {split}", settings)
    image_hw = np.concatenate([c.image_hw for c in chunks])
    table = np.concatenate([c.table for c in chunks])
    boxes, row_problems = clean_rows(table, image_hw, source.normalized)
    found = [p for c in chunks for p in c.found]
    unknown = [p for p in found if p.finding.kind == UNKNOWN_CLASS]
    advice = [
        ids_from_1([p.class_id for p in unknown], table[:, CLASS], len(spec.names)),
        other_notation(table, image_hw, listing.label_format.notation, normalized=source.normalized),
        too_dark(max((c.largest for c in chunks), default=0), spec.pixels.bits),
    ]
    misread = [Finding(split, MISREAD, text) for text in advice if text]
    found += [_located(source, image, problem) for image, problem in row_problems]
    found += _unusable_labels(found, boxes, source)
    found.sort(key=lambda p: (p.image, p.line))
    _check_labels_fit(unknown, found, len(boxes.image), spec, split, advice[0])
    general = [*listing.findings, *source.findings, *misread]
    numbers, arrays = _usable(image_hw, boxes, found)
    ids = source.image_ids
    index = DatasetIndex(
        names=class_names(spec, settings.single_cls),
        root=spec.root,
        paths=FlatStrings.of(source.images[i].name for i in numbers),
        **arrays,
        report=ScanReport.of([*general, *(p.finding for p in found)]),
        image_ids=None if ids is None else FlatStrings.of(json.dumps(ids[i]) for i in numbers),
        category_ids=source.category_ids,
    )
    return Scan(index.recounted(), source, np.array(numbers, np.int64), found, general)


def _read_all(
    spec: DatasetSpec, source: LabelSource, decoded: np.ndarray, title: str, settings: IndexSettings
) -> list[ScannedChunk]:
    count = len(source.images)
    starts = range(0, count, _CHUNK)
    chunks: list[ScannedChunk] = []

    def read(first: int) -> ScannedChunk:
        return _read_chunk(range(first, min(first + _CHUNK, count)), spec, source, decoded)

    def images_done(results: Iterator[ScannedChunk]) -> Iterator[int]:
        for chunk in results:
            chunks.append(chunk)
            yield from range(len(chunk))

    pool = ThreadPoolExecutor(min(32, max(settings.workers, available_cores()))) if settings.workers else None
    results = pool.map(read, starts) if pool else map(read, starts)
    try:
        for _ in progress(images_done(results), desc=title, total=count, enabled=settings.progress):
            pass
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)  # queued tasks, after a KeyboardInterrupt
    return chunks


def _read_chunk(images: range, spec: DatasetSpec, source: LabelSource, decoded: np.ndarray) -> ScannedChunk:
    sizes, with_rows, labels, found, hidden = [], [], [], [], 0
    largest = [0]
    for i in images:
        size, raw, problems, is_hidden = _read_one(i, spec, source, bool(decoded[i]), largest)
        hidden += is_hidden
        sizes.append(size)
        found += problems
        if raw is not None:
            with_rows.append(i)
            labels.append(raw)
    return ScannedChunk(np.array(sizes, np.int32), row_table(with_rows, labels), found, hidden, max(largest))


def _read_one(
    i: int, spec: DatasetSpec, source: LabelSource, decode: bool, largest: list[int]
) -> tuple[tuple[int, int], RawLabels | None, list[LocatedFinding], bool]:
    """Upright size, labels (None if there are none), findings, and whether only decoding shows damage. ``largest``: see
    `check_image`."""
    name = source.images[i].name
    path = os.path.join(spec.root, name)
    try:
        size = check_image(path, decode=decode, pixels=spec.pixels, largest=largest)
    except UserError as error:
        finding = Finding(name, BAD_IMAGE, f"{str(error).removeprefix(path + ': ')}; left out")
        return (0, 0), None, [LocatedFinding(i, -1, finding)], isinstance(error, HiddenDamageError)
    try:
        raw = source.read(i)
    except LabelFileError as error:
        return size, None, [_located(source, i, RowProblem(-1, BAD_LABEL, f"{error}; image left out"))], False
    if raw is None:
        return size, None, [_located(source, i, RowProblem(-1, NO_LABEL, f"{name} is taken as background"))], False
    problems = raw.problems
    if raw.size_hw not in (None, size):
        (height, width), (h, w) = size, raw.size_hw
        text = f"labels are for {w}x{h}, the image is {width}x{height} upright; boxes are not rescaled"
        problems = [*problems, RowProblem(-1, SIZE, text)]
    scale = (size[1], size[0]) * 2 if source.normalized else (1, 1, 1, 1)
    return size, raw, [_located(source, i, problem, scale) for problem in problems], False


def _located(source: LabelSource, image: int, p: RowProblem, scale: tuple[int, ...] = (1, 1, 1, 1)) -> LocatedFinding:
    """A problem of a row, or with line -1 of the whole file. ``scale``: from the units of its corners to pixels."""
    finding = Finding(source.where(image, None if p.line < 0 else p.line), p.kind, p.text)
    return LocatedFinding(image, p.line, finding, p.class_id, tuple(v * side for v, side in zip(p.xyxy, scale)))


def _unusable_labels(found: list[LocatedFinding], boxes: Boxes, source: LabelSource) -> list[LocatedFinding]:
    """Findings for images whose labels have a number that is not finite, or whose objects are all unusable. As
    backgrounds these images would teach the model to ignore their objects."""
    with_boxes = set(np.unique(boxes.image).tolist())
    first = {p.image: p for p in reversed(found) if p.finding.kind in _UNUSABLE and p.image not in with_boxes}
    first |= {p.image: p for p in reversed(found) if p.finding.kind == NOT_FINITE}
    lost = []
    for i, p in first.items():
        # Without what differs from row to row, so that equal causes can be counted.
        why = f"no row can be used: {re.split(': |, got ', p.finding.text.removesuffix('; left out'))[0]}"
        if p.finding.kind == NOT_FINITE:
            why = "a number is not finite"
        elif p.finding.kind == OUTSIDE:
            pixels = "; coordinates in pixels?" if source.normalized else ""
            why = f"no row can be used: the boxes are outside the image{pixels}"
        finding = Finding(source.where(i, p.line), BAD_LABEL, f"{why}; image left out")
        lost.append(LocatedFinding(i, -1, finding))
    return lost


def _check_labels_fit(
    unknown: list[LocatedFinding], found: list[LocatedFinding], boxes: int, spec: DatasetSpec, split: str, advice: str
) -> None:
    others = boxes + sum(p.finding.kind in _UNUSABLE for p in found) - len(unknown)
    if len(unknown) > others:
        first = unknown[0].finding
        raise UserError(
            f"{spec.source}: the names don't match the labels: {len(unknown):,} of {len(unknown) + others:,} objects "
            f"in '{split}' have a class that is not in 'names' (first: {first.where}: {first.text})"
            f"{advice and '; '}{advice}"
        )


def _usable(image_hw: np.ndarray, boxes: Boxes, found: list[LocatedFinding]) -> tuple[list[int], dict[str, np.ndarray]]:
    """The numbers of the usable images, and the arrays of an index that has these."""
    keep = np.ones(len(image_hw), bool)
    keep[[p.image for p in found if p.finding.kind in IMAGE_LOST]] = False
    boxes = Boxes(*(column[keep[boxes.image]] for column in boxes))
    columns = boxes._asdict()
    per_image = np.bincount(columns.pop("image"), minlength=len(keep))[keep]
    offsets = np.concatenate([[0], np.cumsum(per_image)]).astype(np.int64)
    return np.flatnonzero(keep).tolist(), columns | {"image_hw": image_hw[keep], "offsets": offsets}
