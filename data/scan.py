"""Scans a split: reads all images and labels, decides for each image whether it is used, and returns the index.

Images are read in one thread while that is fast, else in several. Threads speed up what releases the GIL, waiting for a
disk and decoding (OpenCV). For JPEGs in the page cache they would slow down the scan: the Python code takes most of the
time, and passing the GIL on at each read takes longer than the read.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from data.findings import BAD_IMAGE, BAD_LABEL, FITTED, NO_LABEL, ROW_LOST, Finding, ScanReport
from data.flat_strings import FlatStrings
from data.formats.label_format import AREA, X1, Y2, Entry, LabelFileError, row_table
from data.geometry import CleanBoxes, clean_rows, fit_corners
from data.images.verify import HiddenDamageError, check_image
from data.index import DatasetIndex, IndexSettings, ids_of_classes, offsets_of
from data.labels import Labels
from data.listing import Listing
from data.spec import DatasetSpec, class_names
from utils.address import with_short_addresses
from utils.errors import UserError
from utils.files.paths import path_of
from utils.logger import get_logger, progress
from utils.machine.resources import available_cores
from utils.machine.threads import map_ahead

SAMPLED = 128  # images to decode: if 2 % of a data set are damaged, the sample contains one with probability 92 %
_MAX_THREADS = 32
_CHUNK = 32  # images per task: enough to hide the task's overhead, few enough to keep the progress bar moving
# A JPEG in the page cache takes 0.1 to 0.2 ms, one on a disk takes longer. One thread reads as long as the mean is
# below this time per image, after a grace for the first ones.
_FAST_S = 0.0002
_GRACE_S = 0.02


class _ImageContent(NamedTuple):
    """The size, labels and findings of an image, as read from its files."""

    size_hw: tuple[int, int]  # upright; (0, 0) if the image is unreadable
    table: np.ndarray  # float64 (R, 9), see `data.formats.label_format`
    findings: list[Finding]  # without a location: in the label file
    num_labeled: int  # number of labeled rows, usable or not
    is_normalized: bool = False  # see `Entry`
    is_hidden: bool = False  # whether only decoding reveals the image's damage


def scan_split(spec: DatasetSpec, split: str, listing: Listing, settings: IndexSettings) -> tuple[DatasetIndex, Labels]:
    """Reads a listed split, decoding images as `_read_images` does. ``spec``: with the classes of the labels.

    Returns the index of all usable images, and the labels. Raises UserError if a label file for all images is
    unusable.
    """
    labels = Labels(listing, None if settings.single_cls else spec.names)
    images = _read_images(spec, split, labels, settings)
    image_hw = np.array([image.size_hw for image in images], np.int32)
    table = np.concatenate([image.table for image in images])
    boxes, problems = clean_rows(table, image_hw, np.array([image.is_normalized for image in images]))
    findings = [
        finding._replace(where=finding.where or labels.where(finding.image, finding.row_number))
        for finding in itertools.chain(*(image.findings for image in images), problems)
    ]
    findings, is_used = _attribute_losses(findings, boxes, labels, [image.num_labeled for image in images])
    is_incomplete = np.zeros(len(images), bool)
    is_incomplete[[finding.image for finding in findings if finding.kind in ROW_LOST]] = True
    image_ids = labels.image_ids
    id_of_category = labels.classes.id_of_category
    category_ids = ids_of_classes(id_of_category, spec.names) if id_of_category else ()
    if settings.single_cls:  # merges all categories
        category_ids = tuple(id_of_category.values())[:1]
    index = DatasetIndex(
        names=class_names(spec, settings.single_cls),
        root=spec.root,
        paths=FlatStrings.of(labels.images),
        offsets=offsets_of(np.bincount(boxes.image, minlength=len(images))),
        image_hw=image_hw,
        incomplete=is_incomplete,
        boxes_xywh_px=boxes.boxes_xywh_px,
        classes=boxes.classes,
        crowd=boxes.crowd,
        area_px=boxes.area_px,
        repeated=boxes.repeated,
        row_number=boxes.row_number,
        report=ScanReport.of(()),
        image_ids=None if image_ids is None else FlatStrings.of(map(json.dumps, image_ids)),
        id_of_category=id_of_category,
        category_ids=category_ids,
    )
    if not is_used.all():
        index = index.take(np.flatnonzero(is_used))
    # They are stored, and may quote rows of a list that are URLs.
    findings = [
        finding._replace(
            text=with_short_addresses(finding.text),
            image_name=labels.images[finding.image] if finding.image >= 0 else "",
        )
        for finding in (*listing.findings, *labels.findings, *findings)
    ]
    report = ScanReport.of(findings, used_images=len(index), used_objects=len(index.classes))
    return replace(index, report=report), labels


def _read_images(spec: DatasetSpec, split: str, labels: Labels, settings: IndexSettings) -> list[_ImageContent]:
    """Reads the images of ``labels``. Suspicious images, images of unusual kinds, and `SAMPLED` random ones are
    decoded. If decoding reveals damage, or with ``settings.decode_all``, all images are."""
    count = len(labels.images)
    decoded = np.full(count, settings.decode_all)
    decoded[np.random.Generator(np.random.Philox(key=count)).permutation(count)[:SAMPLED]] = True
    images = _read_all(spec, labels, decoded, f"scanning {split}", settings)
    hidden = sum(image.is_hidden for image in images)
    if hidden and not decoded.all():
        message = "%s: decoding shows that %d of %d sampled images are damaged; decoding all images"
        get_logger().warning(message, split, hidden, decoded.sum())
        decoded[:] = True
        images = _read_all(spec, labels, decoded, f"decoding {split}", settings)
    return images


def _read_all(
    spec: DatasetSpec, labels: Labels, decoded: np.ndarray, title: str, settings: IndexSettings
) -> list[_ImageContent]:
    """Reads all images. ``decoded``: mask of the images to decode in any case, bool (N,)."""
    count = len(labels.images)
    threads = 1
    if settings.workers:  # threads wait for the disk or decode, so fewer than one per CPU are never faster
        threads = min(_MAX_THREADS, max(settings.workers, available_cores()))

    def read(i: int) -> _ImageContent:
        return _read_one(i, spec, labels, decode=bool(decoded[i]))

    def read_chunk(first: int) -> list[_ImageContent]:
        return [read(i) for i in range(first, min(first + _CHUNK, count))]

    def read_all() -> Iterator[_ImageContent]:
        done = 0
        started = time.monotonic()
        while done < count and time.monotonic() - started < _GRACE_S + done * _FAST_S:
            yield read(done)
            done += 1
        chunks = map_ahead(read_chunk, range(done, count, _CHUNK), threads=threads)
        yield from itertools.chain.from_iterable(chunks)

    return list(progress(read_all(), desc=title, total=count, enabled=settings.progress))


def _read_one(i: int, spec: DatasetSpec, labels: Labels, *, decode: bool) -> _ImageContent:
    """Reads an image and its labels, converted to its actual size."""
    name = labels.images[i]
    path = path_of(name, spec.root)
    problems: list[Finding] = []
    entry: Entry | None = None
    try:
        entry = labels.read(i)
    except LabelFileError as error:
        problems = [Finding(BAD_LABEL, error.reason, row_number=error.line)]
    else:
        if entry is None:
            problems = [Finding(NO_LABEL, f"no label file (expected {labels.where(i)})", name)]
    rows = [] if entry is None else entry.rows
    try:
        checked = check_image(path, decode=decode, pixels=spec.pixels)
    except UserError as error:
        finding = Finding(BAD_IMAGE, str(error).removeprefix(f"{path}: "), name, image=i)
        is_hidden = isinstance(error, HiddenDamageError)
        return _ImageContent((0, 0), row_table(i, []), [finding], len(rows), is_hidden=is_hidden)
    size_hw = checked.size_hw
    problems += [row for row in rows if isinstance(row, Finding)]
    table = row_table(i, [row for row in rows if not isinstance(row, Finding)])
    is_normalized = entry is not None and entry.is_normalized
    boxes = np.array([row.xyxy_px for row in problems if row.xyxy_px], np.float64).reshape(-1, 4)
    if is_normalized:
        boxes *= [size_hw[1], size_hw[0]] * 2
    elif entry is not None and entry.size_hw is not None and entry.size_hw != size_hw:
        corners = np.concatenate([boxes, table[:, X1 : Y2 + 1]])
        fitted = fit_corners(corners, entry.size_hw, size_hw, checked.orientation)
        (stated_h, stated_w), (height, width) = entry.size_hw, size_hw
        text = f"labels are for {stated_w}x{stated_h}, the image is {width}x{height} upright"
        if fitted is None:
            problems.insert(0, Finding(BAD_LABEL, text))
            table = table[:0]
        elif fitted[0] is not corners:
            if rows:
                problems.insert(0, Finding(FITTED, text, number=len(rows)))
            boxes, table[:, X1 : Y2 + 1] = np.split(fitted[0], [len(boxes)])
            table[:, AREA] *= fitted[1]
    xyxy_px = iter(boxes.tolist())
    findings = [problem._replace(image=i, xyxy_px=problem.xyxy_px and tuple(next(xyxy_px))) for problem in problems]
    return _ImageContent(size_hw, table, findings, len(rows), is_normalized)


def _attribute_losses(
    findings: Sequence[Finding], boxes: CleanBoxes, labels: Labels, num_labeled: Sequence[int]
) -> tuple[list[Finding], np.ndarray]:
    """Attributes each loss to one of ``findings``, which are returned by image and row, and returns which of N images
    are used, bool (N,). ``num_labeled``: number of labeled rows of each image, usable or not.

    An image is left out if it or its label file is unusable, or if it has lost rows and no usable object: as a
    background, it would teach the model to ignore its objects. The reason gets all labeled objects of the image. In
    other images, each lost row is one object, since no row is lost for two reasons.
    """
    is_used = np.ones(len(num_labeled), bool)
    is_used[[finding.image for finding in findings if finding.kind in (BAD_IMAGE, BAD_LABEL)]] = False
    with_object = set(boxes.image[~boxes.crowd].tolist())
    reasons = []  # of images without a usable row
    for row in sorted(findings, key=_position):
        if row.kind in ROW_LOST and row.image not in with_object and is_used[row.image]:
            is_used[row.image] = False
            text = f"no row can be used, first {row.kind}: {row.text}"
            reasons.append(Finding(BAD_LABEL, text, labels.where(row.image), row.image))
    result = []
    for finding in sorted([*findings, *reasons], key=_position):
        if finding.kind in (BAD_IMAGE, BAD_LABEL):
            finding = finding._replace(lost_images=1, lost_objects=num_labeled[finding.image])
        elif finding.kind in ROW_LOST and is_used[finding.image]:
            finding = finding._replace(lost_objects=1)
        result.append(finding)
    return result, is_used


def _position(finding: Finding) -> tuple[int, int]:
    return finding.image, finding.row_number
