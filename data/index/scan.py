"""Reads and checks all images and labels of a split in parallel, and returns flat arrays and a report.

Threads suffice: reading and decoding (OpenCV) are nearly all of the work, and release the GIL.
"""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np

from data.image_io.decode import orientation_of
from data.image_io.verify import HiddenDamageError, check_image
from data.index.index import DatasetIndex, IndexArrays, Scan, select_arrays
from data.index.index_settings import IndexSettings
from data.index.outcomes import Outcomes, decide_outcomes
from data.labels import findings as kinds
from data.labels.clean import CleanBoxes, clean_rows
from data.labels.findings import Finding
from data.labels.image_names import loose
from data.labels.label_format import LabelRequest, LabelSource
from data.labels.ledger import Ledger
from data.labels.misread import beyond_images, ids_from_1, other_notation, too_dark
from data.labels.report import ScanReport
from data.labels.rows import CLASS, LabelFileError, RawLabels, RowProblem, row_table
from data.labels.sizes import fit_to_images
from data.source.dataset_spec import DatasetSpec, class_names
from data.source.files import Listing
from utils.errors import UserError, one_line
from utils.files.paths import path_of
from utils.logger import get_logger, progress
from utils.machine.resources import available_cores
from utils.machine.threads import map_ahead
from utils.strings import FlatStrings, counted

SAMPLED = 128  # images that are decoded: if 2 % of a data set are damaged, one of these is, with a probability of 92 %
_MAX_EMPTY_FRACTION = 0.5  # if more of the labeled images have no object, a note asks whether that is intended
# Notes about labels that are corrected, by kind of finding.
_CORRECTIONS = {
    kinds.REVERSED: "boxes with corners in the wrong order, or negative sides, which are used",
    kinds.SCALED: "images with labels for another size, which are scaled",
    kinds.TURNED: "images with labels of the unturned photo, which are turned",
}
_MAX_NAMED_OTHERWISE_FRACTION = 0.1  # if more label files name another image, a warning says so
_CHUNK = 32  # images per task: enough to hide its overhead, few enough to keep the progress bar moving


class ScannedImage(NamedTuple):
    """Holds the size, labels and findings of an image."""

    size_hw: tuple[int, int]  # upright; (0, 0) if the image is unreadable
    table: np.ndarray  # float64 (R, 10), see data.labels.clean
    findings: list[Finding]
    num_labeled: int | None = None  # rows of its labels, whether they can be used or not; None: it has no label file
    stated_hw: tuple[int, int] | None = None  # size that the labels state, if it is another one
    is_hidden: bool = False  # only decoding shows its damage
    largest: int = 0  # largest value of a 16-bit image; 0 for other images
    named_image: str = ""  # the image that the label file itself names


def scan_split(
    spec: DatasetSpec, split: str, listing: Listing, settings: IndexSettings, *, decode_all: bool = False
) -> Scan:
    """Reads a listed split. Suspicious images, images of unusual kinds, and `SAMPLED` others are decoded; if one of the
    latter is damaged, or with ``decode_all``, all are. Raises UserError if the labels do not match the names."""
    names = None if settings.single_cls else spec.names
    request = LabelRequest(listing.images, listing.labels, spec.root, names, listing.others)
    source = listing.label_format.read(request)
    images = _read_images(spec, split, source, settings, decode_all=decode_all)
    image_hw = np.array([image.size_hw for image in images], np.int32)
    table, found = _labels_for_sizes(images, image_hw, spec, source)
    named_otherwise = _named_otherwise(source, images)
    found += named_otherwise

    unknown = [finding for finding in found if finding.kind == kinds.UNKNOWN_CLASS]
    ids_advice = ids_from_1([finding.class_id for finding in unknown], table[:, CLASS], len(spec.names))
    box_advice = other_notation(table, image_hw, listing.label_format.notation, normalized=source.normalized)
    box_advice = box_advice or beyond_images(table, image_hw, normalized=source.normalized)
    boxes, problems = clean_rows(table, image_hw, source.normalized, is_misread=bool(box_advice))
    found += [_finding(source, image, problem) for image, problem in problems]
    outcomes = decide_outcomes(found, boxes, source, [image.num_labeled or 0 for image in images])
    _check_labels_fit(unknown, outcomes.findings, len(boxes.image), spec, split, ids_advice)

    advice = [ids_advice, box_advice, too_dark(max(image.largest for image in images), spec.pixels.bits)]
    advice.append(_advice_if_named_otherwise(named_otherwise, images))
    notes = _notes(outcomes.findings, images)
    unlisted = _unlisted_images(source, listing)
    if unlisted and len(source.images) < len(listing.images) / 2 and not _shares_folders(spec, split):
        advice.append(f"{unlisted}: is it the label file of these images?")
    elif unlisted:
        notes.append(unlisted)
    misread = [Finding(split, kinds.MISREAD, text) for text in advice if text]
    findings = [*listing.findings, *source.findings, *misread, *outcomes.findings]
    arrays = _used_arrays(image_hw, boxes, outcomes)
    numbers = np.flatnonzero(outcomes.is_used)
    ledger = Ledger.of(findings, used_images=len(numbers), used_objects=len(arrays["classes"]))
    report = ScanReport.of(findings, ledger, notes)
    ids = source.image_ids
    index = DatasetIndex(
        names=class_names(spec, settings.single_cls),
        root=spec.root,
        paths=FlatStrings.of(source.images[i].name for i in numbers),
        **arrays,
        report=report,
        image_ids=None if ids is None else FlatStrings.of(json.dumps(ids[i]) for i in numbers),
        category_ids=source.category_ids,
    )
    return Scan(spec, index.recounted(), source, numbers, findings)


def _labels_for_sizes(
    images: list[ScannedImage], image_hw: np.ndarray, spec: DatasetSpec, source: LabelSource
) -> tuple[np.ndarray, list[Finding]]:
    """Returns the rows of all images, float64 (R, 10), computed for the images' own sizes where the labels state other
    ones; and what has been found so far."""
    table = np.concatenate([image.table for image in images])
    found = [finding for image in images for finding in image.findings]
    stated_hw = {i: image.stated_hw for i, image in enumerate(images) if image.stated_hw}
    if not stated_hw:
        return table, found
    table, problems = fit_to_images(table, image_hw, stated_hw, partial(_orientation, spec, source))
    found += [_finding(source, image, problem) for image, problem in problems]
    return table, found


def _advice_if_named_otherwise(named_otherwise: list[Finding], images: list[ScannedImage]) -> str:
    """Returns a message if many label files name another image than they are called like; else ""."""
    if len(named_otherwise) <= _MAX_NAMED_OTHERWISE_FRACTION * len(images):
        return ""
    count = f"{len(named_otherwise):,} of {counted(len(images), 'label file')}"
    first = f"{named_otherwise[0].where}: {named_otherwise[0].text}"
    return f"{count} name another image than they are called like, which decides; first {first}"


def _unlisted_images(source: LabelSource, listing: Listing) -> str:
    """Returns which images the one label file of a split does not name: they are not labeled; "" if there are none."""
    unlisted = [finding.where for finding in source.findings if finding.kind == kinds.UNLISTED]
    if not unlisted:
        return ""
    count = f"{len(unlisted):,} of {counted(len(listing.images), 'image')}"
    return f"{listing.labels[0].name} doesn't name {count}, which are left out, first {unlisted[0]}"


def _shares_folders(spec: DatasetSpec, split: str) -> bool:
    """Returns whether a split with another label file has images in the same folder: that file may name the others."""
    this = spec.split(split)
    others = [source.images for source in spec.splits.values() if source.annotations != this.annotations]
    pairs = itertools.product(this.images, itertools.chain.from_iterable(others))
    return any(a.is_relative_to(b) or b.is_relative_to(a) for a, b in pairs)


def _named_otherwise(source: LabelSource, images: list[ScannedImage]) -> list[Finding]:
    """Returns findings about label files that have the name of one image of the split and name another one inside."""
    named = {i: image.named_image for i, image in enumerate(images) if image.named_image}
    if not named:
        return []
    stem_of = [loose(PurePosixPath(image.name).stem) for image in source.images]
    stems = set(stem_of)
    found = []
    for i, name in named.items():
        stem = loose(PurePosixPath(name.replace("\\", "/")).stem)
        if stem != stem_of[i] and stem in stems:
            message = f"it names {one_line(name)[:200]}, its own name is that of {source.images[i].name}"
            found.append(Finding(source.where(i), kinds.NAMED_OTHERWISE, message, i))
    return found


def _read_images(
    spec: DatasetSpec, split: str, source: LabelSource, settings: IndexSettings, *, decode_all: bool
) -> list[ScannedImage]:
    """Reads all images and their labels. If a decoded sample shows hidden damage, decodes all images."""
    count = len(source.images)
    decoded = np.full(count, decode_all)
    decoded[np.random.Generator(np.random.Philox(key=count)).permutation(count)[:SAMPLED]] = True
    images = _read_all(spec, source, decoded, f"scanning {split}", settings)
    hidden = sum(image.is_hidden for image in images)
    if hidden and not decoded.all():
        get_logger().warning(
            "%s: decoding shows that %d of %d sampled images are damaged; decoding all images",
            split,
            hidden,
            decoded.sum(),
        )
        decoded[:] = True
        images = _read_all(spec, source, decoded, f"decoding {split}", settings)
    return images


def _read_all(
    spec: DatasetSpec, source: LabelSource, decoded: np.ndarray, title: str, settings: IndexSettings
) -> list[ScannedImage]:
    """Reads all images in parallel. ``decoded``: bool (N,), those that are decoded in any case."""
    count = len(source.images)

    def read(first: int) -> list[ScannedImage]:
        return [_read_one(i, spec, source, bool(decoded[i])) for i in range(first, min(first + _CHUNK, count))]

    threads = min(32, max(settings.workers, available_cores())) if settings.workers else 1
    images = itertools.chain.from_iterable(map_ahead(read, range(0, count, _CHUNK), threads=threads))
    return list(progress(images, desc=title, total=count, enabled=settings.progress))


def _read_one(i: int, spec: DatasetSpec, source: LabelSource, decode: bool) -> ScannedImage:
    """Reads an image and its labels."""
    name = source.images[i].name
    largest = [0]
    path = path_of(name, spec.root)
    raw, problems = _read_labels(i, source)
    num_labeled = None if raw is None else raw.num_labeled
    try:
        size = check_image(path, decode=decode, pixels=spec.pixels, largest=largest)
    except UserError as error:
        reason = str(error).removeprefix(f"{path}: ")
        finding = Finding(name, kinds.BAD_IMAGE, reason, image=i, consequence="left out")
        is_hidden = isinstance(error, HiddenDamageError)
        return ScannedImage((0, 0), row_table(i, []), [finding], num_labeled, is_hidden=is_hidden, largest=max(largest))
    scale = (size[1], size[0]) * 2 if source.normalized else (1, 1, 1, 1)
    return ScannedImage(
        size_hw=size,
        table=row_table(i, raw.rows if raw else []),
        findings=[_finding(source, i, problem, scale) for problem in problems],
        num_labeled=num_labeled,
        stated_hw=None if raw is None or raw.size_hw == size else raw.size_hw,
        largest=max(largest),
        named_image="" if raw is None else raw.named_image,
    )


def _read_labels(i: int, source: LabelSource) -> tuple[RawLabels | None, list[RowProblem]]:
    """Returns the labels of an image, None if there are none; and what is wrong with them."""
    try:
        raw = source.read(i)
    except LabelFileError as error:
        return None, [RowProblem(error.line, kinds.BAD_LABEL, error.reason, consequence="image left out")]
    if raw is None:
        return None, [RowProblem(-1, kinds.NO_LABEL, f"{source.images[i].name} is taken as background")]
    return raw, raw.problems


def _orientation(spec: DatasetSpec, source: LabelSource, i: int) -> int:
    return orientation_of(path_of(source.images[i].name, spec.root))


def _finding(source: LabelSource, image: int, problem: RowProblem, scale: tuple[int, ...] = (1, 1, 1, 1)) -> Finding:
    """Makes a finding of a problem of a row, or with line -1 of the whole file. ``scale``: from the units of its
    corners to pixels."""
    return Finding(
        where=source.where(image, None if problem.line < 0 else problem.line),
        kind=problem.kind,
        text=problem.text,
        consequence=problem.consequence,
        cause=problem.cause,
        image=image,
        line=problem.line,
        class_id=problem.class_id,
        class_name=problem.class_name,
        xyxy_px=tuple(value * side for value, side in zip(problem.xyxy, scale)),
    )


def _notes(findings: list[Finding], images: list[ScannedImage]) -> list[str]:
    """Returns what a user should know about labels that are used: corrections, and label files without an object."""
    notes = []
    for kind, description in _CORRECTIONS.items():
        noted = [finding for finding in findings if finding.kind == kind]
        if noted:
            notes.append(f"{description}: {len(noted):,}, first {noted[0].where}: {noted[0].message}")
    labeled = [image.num_labeled for image in images if image.num_labeled is not None]
    empty = labeled.count(0)
    if any(labeled) and empty > _MAX_EMPTY_FRACTION * len(labeled):
        notes.append(
            f"{empty:,} of {counted(len(labeled), 'labeled image')} have no object: an empty label file, or no "
            "annotation; if that is not meant, write the labels again"
        )
    return notes


def _check_labels_fit(
    unknown: list[Finding], found: list[Finding], boxes: int, spec: DatasetSpec, split: str, advice: str
) -> None:
    """Raises UserError if most objects have a class that is not among the names. ``unknown``: findings about these."""
    others = boxes + sum(f.kind in kinds.ROW_LOST for f in found) - len(unknown)
    if len(unknown) > others:
        first = unknown[0]
        raise UserError(
            f"{spec.source}: the names don't match the labels: {len(unknown):,} of {len(unknown) + others:,} objects "
            f"in '{split}' have a class that is not in 'names' (first: {first.where}: {first.text})"
            f"{advice and '; '}{advice}"
        )


def _used_arrays(image_hw: np.ndarray, boxes: CleanBoxes, outcomes: Outcomes) -> IndexArrays:
    """Returns the arrays of the index of the used images."""
    used = outcomes.is_used
    columns = CleanBoxes(*(column[used[boxes.image]] for column in boxes))._asdict()
    per_image = np.bincount(columns.pop("image"), minlength=len(used))[used]
    image_arrays = {
        "image_hw": image_hw[used],
        "incomplete": outcomes.is_incomplete[used],
        "offsets": np.concatenate([[0], np.cumsum(per_image)]).astype(np.int64),
    }
    return select_arrays(columns | image_arrays)
