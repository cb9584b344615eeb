"""Reads all images and label files of a split: in one thread while that is fast, else in several.

Threads speed up what releases the GIL, waiting for a disk and decoding (OpenCV). For JPEGs in the page cache they
would slow down the scan: the Python code takes most of the time, and passing the GIL on at each read takes longer than
the read.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data.images.verify import HiddenDamageError, check_image
from data.index.index_settings import IndexSettings
from data.labels import findings as kinds
from data.labels.findings import Finding
from data.labels.label_format import LabelSource
from data.labels.rows import LabelFileError, RawLabels, RowProblem, row_table
from data.source.dataset_spec import DatasetSpec
from data.source.listing.listing import Listing
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


class ImageContent(NamedTuple):
    """The size, labels and findings of an image, as read from its files."""

    size_hw: tuple[int, int]  # upright; (0, 0) if the image is unreadable
    table: np.ndarray  # float64 (R, 10), see data.labels.rows
    findings: list[Finding]
    orientation: int = 1  # EXIF's, see `CheckedImage`
    num_labeled: int | None = None  # number of labeled rows, usable or not; None without a readable label file
    stated_hw: tuple[int, int] | None = None  # image size according to the labels, if it differs
    is_hidden: bool = False  # whether only decoding reveals the image's damage
    max_value: int = 0  # largest value of a 16-bit image; 0 for other images
    named_image: str = ""  # the image named in the label file


@dataclass(frozen=True, slots=True)
class SplitContent:
    """The content of a split's files: N images and R rows of labels."""

    listing: Listing
    source: LabelSource
    images: list[ImageContent]  # N
    image_hw: np.ndarray  # int32 (N, 2), upright
    table: np.ndarray  # float64 (R, 10), see data.labels.rows, converted to the images' actual sizes
    findings: list[Finding]  # about images, label files, and rows

    def findings_of(self, kind: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind == kind]


def read_images(spec: DatasetSpec, split: str, source: LabelSource, settings: IndexSettings) -> list[ImageContent]:
    """Reads the images of ``source`` and their labels. Suspicious images, images of unusual kinds, and `SAMPLED` random
    ones are decoded. If decoding reveals damage, or with ``settings.decode_all``, all images are."""
    count = len(source.images)
    decoded = np.full(count, settings.decode_all)
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


def finding_of(source: LabelSource, image: int, problem: RowProblem, scale: tuple[int, ...] = (1, 1, 1, 1)) -> Finding:
    """Converts a problem in the labels of ``source.images[image]`` to a finding. ``scale``: factors from the units of
    its corners to pixels."""
    return Finding(
        where=source.where(image, None if problem.row_number < 0 else problem.row_number),
        kind=problem.kind,
        text=problem.text,
        consequence=problem.consequence,
        cause=problem.cause,
        image=image,
        row_number=problem.row_number,
        class_id=problem.class_id,
        class_name=problem.class_name,
        xyxy_px=tuple(value * side for value, side in zip(problem.xyxy, scale)),
    )


def _read_all(
    spec: DatasetSpec, source: LabelSource, decoded: np.ndarray, title: str, settings: IndexSettings
) -> list[ImageContent]:
    """Reads all images. ``decoded``: mask of the images to decode in any case, bool (N,)."""
    count = len(source.images)
    threads = 1
    if settings.workers:  # threads wait for the disk or decode, so fewer than one per CPU are never faster
        threads = min(_MAX_THREADS, max(settings.workers, available_cores()))

    def read(i: int) -> ImageContent:
        return _read_one(i, spec, source, decode=bool(decoded[i]))

    def read_chunk(first: int) -> list[ImageContent]:
        return [read(i) for i in range(first, min(first + _CHUNK, count))]

    def read_all() -> Iterator[ImageContent]:
        done = 0
        started = time.monotonic()
        while done < count and time.monotonic() - started < _GRACE_S + done * _FAST_S:
            yield read(done)
            done += 1
        chunks = map_ahead(read_chunk, range(done, count, _CHUNK), threads=threads)
        yield from itertools.chain.from_iterable(chunks)

    return list(progress(read_all(), desc=title, total=count, enabled=settings.progress))


def _read_one(i: int, spec: DatasetSpec, source: LabelSource, *, decode: bool) -> ImageContent:
    """Reads an image and its labels."""
    name = source.images[i].name
    path = path_of(name, spec.root)
    raw, problems = _read_labels(i, source)
    num_labeled = None if raw is None else raw.num_labeled
    try:
        checked = check_image(path, decode=decode, pixels=spec.pixels)
    except UserError as error:
        reason = str(error).removeprefix(f"{path}: ")
        finding = Finding(name, kinds.BAD_IMAGE, reason, image=i, consequence="left out")
        is_hidden = isinstance(error, HiddenDamageError)
        return ImageContent((0, 0), row_table(i, []), [finding], num_labeled=num_labeled, is_hidden=is_hidden)
    size_hw = checked.size_hw
    scale = (size_hw[1], size_hw[0]) * 2 if source.normalized else (1, 1, 1, 1)
    return ImageContent(
        size_hw=size_hw,
        table=row_table(i, raw.rows if raw else []),
        findings=[finding_of(source, i, problem, scale) for problem in problems],
        orientation=checked.orientation,
        num_labeled=num_labeled,
        stated_hw=None if raw is None or raw.size_hw == size_hw else raw.size_hw,
        max_value=checked.max_value,
        named_image="" if raw is None else raw.named_image,
    )


def _read_labels(i: int, source: LabelSource) -> tuple[RawLabels | None, list[RowProblem]]:
    """Returns the labels of an image, or None if there are none, and their problems."""
    try:
        raw = source.read(i)
    except LabelFileError as error:
        return None, [RowProblem(error.line, kinds.BAD_LABEL, error.reason, consequence="image left out")]
    if raw is None:
        return None, [RowProblem(-1, kinds.NO_LABEL, f"{source.images[i].name} is taken as background")]
    return raw, raw.problems
