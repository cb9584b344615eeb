"""Defines the findings of a split: whatever is labeled or named and is not used as written is one `Finding`.

`KINDS` is the only table of their kinds: messages, `tools.check` and docs/checks.md take their texts from it.
`ScanReport` adds them up, and decides how they are reported: a split's images and labeled objects are used or lost, and
each lost one belongs to one finding. What a user leaves out (``--classes``, ``ignore:``, ``--fraction``) is not lost.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from utils.errors import one_line
from utils.files.safe_io import write_whole
from utils.strings import counted

MISSING_IMAGE = "missing image"
BAD_IMAGE = "unreadable image"
BAD_LABEL = "unusable labels"
BAD_ROW = "bad row"
UNKNOWN_CLASS = "unknown class"
BAD_BOX = "bad box"
ORPHAN = "labels without an image"
NO_LABEL = "image without labels"
UNDECLARED = "labels of undeclared images"
FITTED = "box fitted to its image"
DUPLICATE = "repeated row"
UNSUPPORTED = "unsupported file"


class Kind(NamedTuple):
    """A kind of finding."""

    meaning: str
    remedy: str
    costs: str  # what is lost: "image" (with its objects), "object", or "" for nothing
    unit: str  # what is counted, "image" or "object": their share of the split's decides whether it is a warning


KINDS: dict[str, Kind] = {
    MISSING_IMAGE: Kind(
        "a row of a list names no image, or several", "correct the row, or restore the file", "image", "image"
    ),
    BAD_IMAGE: Kind("it cannot be read", "get a better copy, or delete image and label", "image", "image"),
    BAD_LABEL: Kind(
        "the file cannot be read, has no usable row, or is for another shape", "correct it", "image", "image"
    ),
    BAD_ROW: Kind("the row is not as in its format", "correct the row", "object", "object"),
    UNKNOWN_CLASS: Kind(
        "the class is not in 'names', whose ids begin at 0", "correct it, or add it to 'names'", "object", "object"
    ),
    BAD_BOX: Kind(
        "corners in the wrong order, less than a pixel, or outside", "delete or draw it again", "object", "object"
    ),
    ORPHAN: Kind(
        "a label file or an entry of no image, or of several",
        "name it like its image, or delete it",
        "object",
        "object",
    ),
    NO_LABEL: Kind(
        "trained and scored as showing no object; left out if a file of all labels does not name it",
        "label it, or add an empty file",
        "",
        "image",
    ),
    UNDECLARED: Kind(
        "entries of images of no split, or of a missing split", "nothing, or declare the split", "", "object"
    ),
    FITTED: Kind("clipped to the image, or scaled or turned to its size", "draw it again if cut off", "", "object"),
    DUPLICATE: Kind("trained on once, scored each time, as in pycocotools", "delete the second row", "", "object"),
    UNSUPPORTED: Kind("an image format that is not read", "convert it, or delete it", "", "image"),
}
ROW_LOST = frozenset({BAD_ROW, UNKNOWN_CLASS, BAD_BOX})  # a row that is no box
WARNED_SHARE = 0.01  # what concerns at least this fraction of the images or objects is a warning, else information


class Finding(NamedTuple):
    """One line of the report. Parsers of rows leave out where it is, which the scan adds."""

    kind: str  # one of `KINDS`
    text: str  # what is wrong there
    where: str = ""  # file, or file:line, relative to the data set's folder
    image: int = -1  # position in `Labels.images`; -1 if it is about none of these
    row_number: int = -1  # see `data.formats.label_format`; -1 for the image or the label file itself
    class_id: int = -1  # class index of the box, if it is known
    xyxy_px: tuple[float, ...] = ()  # labeled corners of the box, in original pixels; empty without a box
    number: int = 1  # images or objects, see `Kind.unit`, that it is about
    lost_images: int = 0  # images, or entries of missing images, that are not used because of this
    lost_objects: int = 0  # labeled objects that are not used because of this
    image_name: str = ""  # of ``image``, relative to the data set's folder

    def __str__(self) -> str:
        return f"{self.where}: {self.kind}: {self.text}"


def findings_of_json(rows: Iterable[Sequence[Any]]) -> list[Finding]:
    """Restores findings from their JSON, in which each is a list."""
    findings = itertools.starmap(Finding, rows)
    return [finding._replace(xyxy_px=tuple(finding.xyxy_px)) for finding in findings]


@dataclass(frozen=True, slots=True, eq=False)
class ScanReport:
    """The findings of a whole split, whatever part of it a run uses."""

    content: np.ndarray  # uint8: the findings as JSON, which a start maps but does not parse
    num_findings: int
    kinds: tuple[Finding, ...]  # the first finding of each kind, with the numbers of all; in the order of `KINDS`
    used_images: int
    used_objects: int  # including crowd regions and repeated boxes

    @classmethod
    def of(cls, findings: Sequence[Finding], used_images: int = 0, used_objects: int = 0) -> ScanReport:
        """Adds up all ``findings`` of a split."""
        groups: dict[str, list[Finding]] = {kind: [] for kind in KINDS}
        for finding in findings:
            groups[finding.kind].append(finding)
        kinds = [
            group[0]._replace(
                number=sum(finding.number for finding in group),
                lost_images=sum(finding.lost_images for finding in group),
                lost_objects=sum(finding.lost_objects for finding in group),
            )
            for group in groups.values()
            if group
        ]
        content = np.frombuffer(json.dumps(findings).encode(), np.uint8)
        return cls(content, len(findings), tuple(kinds), used_images, used_objects)

    @property
    def findings(self) -> list[Finding]:
        return findings_of_json(json.loads(self.content.tobytes()))

    @property
    def lost_images(self) -> int:
        return sum(total.lost_images for total in self.kinds)

    @property
    def lost_objects(self) -> int:
        return sum(total.lost_objects for total in self.kinds)

    @property
    def images(self) -> int:
        """Number of images of the split, including labeled images that it does not contain."""
        return self.used_images + self.lost_images

    @property
    def objects(self) -> int:
        """Number of labeled objects, without those in label files that cannot be parsed."""
        return self.used_objects + self.lost_objects

    @property
    def lost_share(self) -> float:
        """The lost fraction, 0 to 1, of the images or of the objects, whichever is larger: one image may have most of
        the objects, and a lost label file none that can be counted."""
        return max(self.lost_images / max(self.images, 1), self.lost_objects / max(self.objects, 1))

    def has_lost_too_much(self, max_bad: float) -> bool:
        """Returns whether more than the fraction ``max_bad`` is lost, or no image is left."""
        return not self.used_images or self.lost_share > max_bad

    def loss_summary(self) -> str:
        """Returns what is lost and why, such as ``3 of 20 images and 45 of 100 objects can't be used: ...``."""
        parts = []
        if self.lost_images:
            parts.append(f"{self.lost_images:,} of {counted(self.images, 'image')}")
        if self.lost_objects:
            parts.append(f"{self.lost_objects:,} of {counted(self.objects, 'object')}")
        lossy = [total for total in self.kinds if total.lost_images or total.lost_objects]
        return f"{' and '.join(parts)} can't be used: {'; '.join(map(_with_number, lossy))}"

    def lines(self) -> list[tuple[int, str]]:
        """Returns the level and text of a line for the log about each kind of finding. Images without
        labels and labels without an image share a line (rule D3)."""
        lines = []
        is_loss_large = self.lost_share >= WARNED_SHARE
        unmatched = [total for total in self.kinds if total.kind in (NO_LABEL, ORPHAN)]
        if len(unmatched) == 2:
            lines.append((logging.WARNING, "; ".join(map(_with_number, unmatched))))
        for total in self.kinds:
            if len(unmatched) == 2 and total in unmatched:
                continue
            kind = KINDS[total.kind]
            share = total.number / max(self.images if kind.unit == "image" else self.objects, 1)
            is_warning = is_loss_large if kind.costs else share >= WARNED_SHARE
            level = logging.WARNING if is_warning else logging.INFO
            consequence = "left out: " if kind.costs else ""
            lines.append((level, f"{_with_number(total)} ({consequence}{kind.meaning})"))
        return lines

    def write(self, path: str | Path) -> None:
        """Writes all findings to a text file."""
        write_whole(path, "".join(f"{one_line(str(finding))}\n" for finding in self.findings))


def _with_number(total: Finding) -> str:
    first = one_line(f"{total.where}: {total.text}")
    return f"{total.kind}: {counted(total.number, KINDS[total.kind].unit)}, first {first}"
