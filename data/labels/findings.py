"""The report of a scan: totals, and a line for everything that was left out or changed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from utils.errors import one_line
from utils.files.safe_io import write_whole
from utils.strings import FlatStrings, counted

# Kinds of findings. The image is left out:
BAD_IMAGE = "unreadable image"
MISSING_IMAGE = "missing image"
BAD_LABEL = "unusable label file"
# The row is left out, and the image with it if none of its rows can be used:
BAD_ROW = "bad row"
UNKNOWN_CLASS = "unknown class"
NO_AREA = "box without area"
NOT_FINITE = "number not finite"  # the image is left out, too: the rest of the file cannot be trusted
OUTSIDE = "box outside the image"
DUPLICATE = "duplicate box"
# Corrected or only reported:
CLIPPED = "box clipped"
SIZE = "size mismatch"
REPEATED_IMAGE = "image listed twice"
UNLISTED = "image without annotations entry"
ABSENT = "annotated image not in the split"
UNSUPPORTED = "file of an unsupported kind"
UNUSED_LABEL = "unused label file"
SHARED_LABEL = "label file of several images"
NO_LABEL = "missing label file"
MISREAD = "probably misread"  # of the split as a whole

IMAGE_LOST = (BAD_IMAGE, MISSING_IMAGE, BAD_LABEL)
_NO_PROBLEM = frozenset({"images", "backgrounds", "boxes", "crowd", NO_LABEL})


class Finding(NamedTuple):
    """One line of the report."""

    where: str  # file, or file:line, relative to the data set
    kind: str  # one of the kinds above
    text: str
    image: int = -1  # number in `LabelSource.images`; -1: about none of these
    line: int = -1  # as `LabelSource.where` takes it; -1: the image or the label file itself
    class_id: int = -1  # of a box whose geometry is the problem, and
    xyxy_px: tuple[float, ...] = ()  # its corners as labeled, original pixels; empty: there is no such box

    def __str__(self) -> str:
        return f"{self.where}: {self.kind}: {self.text}"


@dataclass(frozen=True, slots=True)
class ScanReport:
    """Totals (``images``, ``backgrounds``, ``boxes``, ``crowd``, and a count per kind) and lines of text."""

    totals: dict[str, int]
    lines: FlatStrings  # "file:line: kind: what", paths relative to the data set's folder
    bad_lines: tuple[str, ...] = ()  # why images were left out: the commonest three reasons
    advice: tuple[str, ...] = ()  # what is probably misread, and what to do

    @classmethod
    def of(cls, findings: Sequence[Finding]) -> ScanReport:
        """The report of all ``findings``, without the numbers of images and boxes."""
        alike: dict[tuple[str, str], list[Finding]] = {}
        for f in findings:
            if f.kind in IMAGE_LOST:
                alike.setdefault((f.kind, "" if f.kind == MISSING_IMAGE else f.text), []).append(f)
        bad = []
        for group in sorted(alike.values(), key=len, reverse=True)[:3]:
            first = group[0]
            text = first.text.removesuffix("; image left out").removesuffix("; left out")
            bad.append(f"{len(group):,} {first.kind}s, first {first.where}: {text}" if len(group) > 1 else str(first))
        advice = tuple(f.text for f in findings if f.kind == MISREAD)
        totals = dict(Counter(f.kind for f in findings))
        return cls(totals, FlatStrings.of(map(str, findings)), tuple(bad), advice)

    @property
    def problems(self) -> int:
        """Number of findings that the user may want to correct."""
        return sum(self._problem_kinds.values())

    @property
    def _problem_kinds(self) -> dict[str, int]:
        return {kind: n for kind, n in self.totals.items() if kind not in _NO_PROBLEM}

    @property
    def bad_images(self) -> int:
        """Number of images that were left out."""
        return sum(self.totals.get(kind, 0) for kind in IMAGE_LOST)

    def summary(self) -> str:
        t = self.totals
        unlabeled = f" ({t[NO_LABEL]:,} without a label file)" if t.get(NO_LABEL) else ""
        text = f"{counted(t['images'], 'image')}, {counted(t['backgrounds'], 'background')}{unlabeled}, "
        text += counted(t["boxes"], "box") + (f" and {counted(t['crowd'], 'crowd region')}" if t.get("crowd") else "")
        detail = ", ".join(f"{n:,} {k}" for k, n in sorted(self._problem_kinds.items(), key=lambda item: -item[1]))
        return f"{text}, {counted(self.problems, 'problem')}" + (f" ({detail})" if detail else "")

    def write(self, path: str | os.PathLike) -> None:
        write_whole(path, "".join(f"{line}\n" for line in (self.summary(), *map(one_line, self.lines))))
