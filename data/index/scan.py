"""Reads and checks all images and labels of a split in parallel, and returns flat arrays and a report.

The scan uses threads, not processes: reading and decoding (OpenCV) are nearly all of the work, and release the GIL.
Threads start quickly, share the listing, and are safe in a process that uses a GPU or communicates with other ranks.
Boxes are checked afterwards for the whole split at once.
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
from data.labels.clean import CLASS, Boxes, LabelFileError, RawLabels, clean_rows, row_table
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
from data.labels.readings import ids_from_1, other_notation, too_dark
from data.spec.dataset_spec import DatasetSpec
from utils.errors import UserError
from utils.logger import get_logger, progress
from utils.machine.resources import available_cores
from utils.strings import FlatStrings

SAMPLED = 128  # images: if 2 % of a data set are damaged, the sample has a damaged one with a probability of 92 %
_CHUNK = 32  # images per task: enough to hide its overhead, few enough to keep the progress bar moving
_UNUSABLE = frozenset({BAD_ROW, OUTSIDE, UNKNOWN_CLASS})  # rows of objects that cannot be used


class LocatedFinding(NamedTuple):
    """A finding and its position in the data set, by which the report is sorted."""

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
    hidden: int  # images whose damage only decoding showed
    largest: int  # sample of the 16-bit images; 0 without

    def __len__(self) -> int:
        return len(self.image_hw)


class ScannedSplit(NamedTuple):
    """N usable images and their M boxes. The fields are those of `data.index.index.DatasetIndex`."""

    paths: FlatStrings
    image_ids: FlatStrings | None
    category_ids: tuple[int, ...]
    image_hw: np.ndarray
    offsets: np.ndarray
    boxes_xywh_px: np.ndarray
    classes: np.ndarray
    crowd: np.ndarray
    area_px: np.ndarray
    repeated: np.ndarray
    line: np.ndarray
    report: ScanReport


class Scan(NamedTuple):
    """A scanned split, and where in the files its images and findings are."""

    split: ScannedSplit
    source: LabelSource
    numbers: np.ndarray  # int64 (N,) of the usable images in ``source.images``
    found: list[LocatedFinding]  # findings about an image in ``source.images``
    general: list[Finding]  # all others


def scan_split(
    spec: DatasetSpec,
    split: str,
    listing: Listing,
    *,
    workers: int,
    single_cls: bool,
    show_progress: bool,
    verify: str = "sample",
) -> Scan:
    """Reads a listed split. The result does not depend on ``workers``.

    Args:
        workers: threads; 0: the calling thread only, else at least one thread per CPU.
        verify: "full" decodes all images. "sample" decodes suspicious images, images of unusual kinds, and `SAMPLED`
            others; if one of the latter is damaged, it decodes all.

    Raises UserError if the labels do not match the names.
    """
    names = None if single_cls else spec.names
    source = listing.label_format.read(listing.images, listing.labels, spec.root, names)
    count = len(source.images)
    decoded = np.ones(count, bool) if verify == "full" else _sample(count)

    chunks = _read_all(spec, source, decoded, workers, f"scanning {split}", show_progress)
    hidden = sum(chunk.hidden for chunk in chunks)
    if hidden and not decoded.all():
        get_logger().warning(
            "%s: decoding shows that %d of %d sampled images are damaged; decoding all images",
            split, hidden, decoded.sum(),
        )  # fmt: skip
        decoded[:] = True
        chunks = _read_all(spec, source, decoded, workers, f"decoding {split}", show_progress)
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
    found += [
        _finding(source, image, p.kind, p.text, p.line)._replace(class_id=p.class_id, xyxy_px=p.xyxy)
        for image, p in row_problems
    ]
    found += _unusable_labels(found, boxes, source)
    found.sort(key=lambda p: (p.image, p.line))
    _check_labels_fit(unknown, found, len(boxes.image), spec, split, advice[0])
    return _assemble(source, image_hw, boxes, found, [*listing.findings, *source.findings, *misread])


def _sample(count: int) -> np.ndarray:
    """Which of ``count`` images are always decoded, bool (count,). Deterministic."""
    chosen = np.zeros(count, bool)
    chosen[np.random.Generator(np.random.Philox(key=count)).permutation(count)[:SAMPLED]] = True
    return chosen


def _read_all(
    spec: DatasetSpec, source: LabelSource, decoded: np.ndarray, workers: int, title: str, show_progress: bool
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

    def drain(results: Iterator[ScannedChunk]) -> None:
        for _ in progress(images_done(results), desc=title, total=count, enabled=show_progress):
            pass

    if workers == 0:
        drain(map(read, starts))
        return chunks
    with ThreadPoolExecutor(min(32, max(workers, available_cores()))) as pool:
        try:
            drain(pool.map(read, starts))
        except BaseException:  # such as KeyboardInterrupt: cancel queued tasks
            pool.shutdown(wait=False, cancel_futures=True)
            raise
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
    """Upright size, labels (None if there are none), findings, and whether only decoding showed damage. ``largest``: as
    for `check_image`."""
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
        return size, None, [_finding(source, i, BAD_LABEL, f"{error}; image left out")], False
    if raw is None:
        return size, None, [_finding(source, i, NO_LABEL, f"{name} is taken as background")], False
    scale = (size[1], size[0]) * 2 if source.normalized else (1, 1, 1, 1)
    problems = [
        _finding(source, i, p.kind, p.text, p.line)._replace(
            class_id=p.class_id, xyxy_px=tuple(v * side for v, side in zip(p.xyxy, scale))
        )
        for p in raw.problems
    ]
    if raw.size_hw not in (None, size):
        (height, width), (h, w) = size, raw.size_hw
        text = f"labels are for {w}x{h}, the image is {width}x{height} upright; boxes are not rescaled"
        problems.append(_finding(source, i, SIZE, text))
    return size, raw, problems, False


def _finding(source: LabelSource, image: int, kind: str, text: str, line: int | None = None) -> LocatedFinding:
    return LocatedFinding(image, -1 if line is None else line, Finding(source.where(image, line), kind, text))


def _unusable_labels(found: list[LocatedFinding], boxes: Boxes, source: LabelSource) -> list[LocatedFinding]:
    """Findings for images whose labels have a number that is not finite, or whose objects are all unusable. As
    background images they would teach the model to ignore their objects."""
    with_boxes = set(np.unique(boxes.image).tolist())
    first = {p.image: p for p in reversed(found) if p.finding.kind in _UNUSABLE and p.image not in with_boxes}
    first |= {p.image: p for p in reversed(found) if p.finding.kind == NOT_FINITE}
    lost = []
    for i, p in first.items():
        why = "a number is not finite" if p.finding.kind == NOT_FINITE else f"no row can be used: {_cause(p, source)}"
        finding = Finding(source.where(i, p.line), BAD_LABEL, f"{why}; image left out")
        lost.append(LocatedFinding(i, -1, finding))
    return lost


def _cause(row: LocatedFinding, source: LabelSource) -> str:
    """Why a row cannot be used, without what differs from row to row, so that equal causes can be counted."""
    if row.finding.kind == OUTSIDE:
        return "the boxes are outside the image" + ("; coordinates in pixels?" if source.normalized else "")
    return re.split(": |, got ", row.finding.text.removesuffix("; left out"))[0]


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


def _assemble(
    source: LabelSource,
    image_hw: np.ndarray,
    boxes: Boxes,
    found: list[LocatedFinding],
    general: list[Finding],
) -> Scan:
    """Removes unusable images and renumbers the others."""
    keep = np.ones(len(image_hw), bool)
    keep[[p.image for p in found if p.finding.kind in IMAGE_LOST]] = False
    of_kept = keep[boxes.image]
    boxes = Boxes(*(column[of_kept] for column in boxes))
    new_number = np.cumsum(keep) - 1
    boxes = boxes._replace(image=new_number[boxes.image])
    kept = np.flatnonzero(keep).tolist()
    per_image = np.bincount(boxes.image, minlength=len(kept))
    crowd = int(boxes.crowd.sum())
    ids = source.image_ids
    totals = {
        "images": len(kept),
        "backgrounds": int((per_image == 0).sum()),
        "boxes": len(boxes.image) - crowd,
        "crowd": crowd,
    }
    split = ScannedSplit(
        paths=FlatStrings.of(source.images[i].name for i in kept),
        image_ids=None if ids is None else FlatStrings.of(json.dumps(ids[i]) for i in kept),
        category_ids=source.category_ids,
        image_hw=image_hw[keep],
        offsets=np.concatenate([[0], np.cumsum(per_image)]).astype(np.int64),
        boxes_xywh_px=boxes.boxes_xywh_px,
        classes=boxes.classes,
        crowd=boxes.crowd,
        area_px=boxes.area_px,
        repeated=boxes.repeated,
        line=boxes.line,
        report=ScanReport.of([*general, *(p.finding for p in found)], totals),
    )
    return Scan(split, source, np.array(kept, np.int64), found, general)
