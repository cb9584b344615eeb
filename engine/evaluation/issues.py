"""What is wrong with a data set: an `Issue` names the boxes of a `CheckedSplit`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from data.index.index import DatasetIndex, Scan
from data.source.dataset_spec import IGNORED
from utils.boxes import xywh_to_xyxy
from utils.files.paths import path_of, relative_name

# Kinds of label errors, which need a model.
MISSED = "missing label"
SPURIOUS = "spurious label"
SWAPPED = "wrong class"
MOVED = "badly placed box"
LABEL_ERRORS = (MISSED, SPURIOUS, SWAPPED, MOVED)


@dataclass(frozen=True, slots=True)
class LabelBox:
    """A labeled or suggested box."""

    class_name: str
    class_id: int
    xyxy_px: tuple[float, ...]  # original pixels
    number: int | None = None  # in the image, from 0, without the rows that the scan left out; None: not one of these
    where: str | None = None  # label file and line (COCO: and annotation id)

    @property
    def line(self) -> int | None:
        """The line in ``where``; None if that does not end in a number."""
        tail = (self.where or "").rpartition(":")[2]
        return int(tail) if tail.isdecimal() else None


@dataclass(frozen=True, slots=True)
class Issue:
    """One thing that is wrong, or probably wrong, with a data set. Files are relative to the data set's folder."""

    kind: str
    text: str  # what is wrong, in words
    split: str = ""  # empty: of the whole data set
    images: tuple[str, ...] = ()
    where: str = ""  # the file to correct, and the line in it; empty: the first image
    boxes: tuple[LabelBox, ...] = ()  # as labeled, all in the first image
    score: float | None = None  # of label errors: how sure it is, 0 to 1
    suggestion: LabelBox | None = None  # of label errors, unless the label should go
    splits: tuple[str, ...] = ()  # of ``images``, if they are in several

    def __str__(self) -> str:
        where = self.where or (self.images[0] if self.images else self.split)
        score = "" if self.score is None else f"{self.score:.2f} "
        return f"{score}{where}: {self.text}" if where else f"{score}{self.text}"

    def content(self) -> dict[str, Any]:
        """Plain data for JSON, without empty values."""
        values = asdict(self) | {"boxes": [_box_content(b) for b in self.boxes]}
        if self.suggestion is not None:
            values["suggestion"] = _box_content(self.suggestion)
        return {key: value for key, value in values.items() if value not in (None, "", (), [])}


def _box_content(box: LabelBox) -> dict[str, Any]:
    values = asdict(box) | {"line": box.line, "xyxy_px": [round(v, 2) for v in box.xyxy_px]}
    return {key: value for key, value in values.items() if value is not None}


def by_kind(issues: Iterable[Issue]) -> dict[str, list[Issue]]:
    """Issues by kind; kinds and issues keep their order."""
    groups: dict[str, list[Issue]] = {}
    for issue in issues:
        groups.setdefault(issue.kind, []).append(issue)
    return groups


class CheckedSplit(NamedTuple):
    """A split of N usable images and M boxes, as training reads it."""

    name: str
    index: DatasetIndex
    parts: tuple[Scan, ...] = ()  # in the order of the images; empty: not known

    def box(self, row: int) -> LabelBox:
        index = self.index
        image = self.image_of(row)
        return LabelBox(
            index.names[index.classes[row]],
            int(index.classes[row]),
            tuple(xywh_to_xyxy(index.boxes_xywh_px[row]).tolist()),
            int(row - index.offsets[image]),
            self._where(row, image),
        )

    def image_of(self, row: int) -> int:
        return int(np.searchsorted(self.index.offsets, row, side="right")) - 1

    def part_of(self, image: int) -> tuple[Scan, int] | None:
        """The part that ``image`` is from, and its number in the label files; None if these are not known."""
        for part in self.parts:
            if image < len(part.index):
                return part.source and (part, int(part.numbers[image]))
            image -= len(part.index)
        return None

    def issue(self, kind: str, text: str, rows: tuple[int, ...]) -> Issue:
        """An issue about boxes of one image."""
        return self.issue_of(kind, text, self.image_of(rows[0]), tuple(map(self.box, rows)))

    def issue_of(self, kind: str, text: str, image: int, boxes: tuple[LabelBox, ...]) -> Issue:
        """An issue about ``boxes`` of the image with this number."""
        return Issue(kind, text, self.name, (self.index.paths[image],), boxes[-1].where or "", boxes)

    def relative(self, part: Scan, name: str) -> str:
        """``name``, relative to the folder of ``part``, relative to that of the data set."""
        if part.index.root == self.index.root:
            return name
        return relative_name(path_of(name, part.index.root), self.index.root)

    def _where(self, row: int, image: int) -> str | None:
        line, found = int(self.index.line[row]), self.part_of(image)
        if line < 0 or found is None:
            return None
        part, number = found
        return self.relative(part, part.source.where(number, line))


def learned_names(part: Scan) -> list[str | None]:
    """What the classes of the labels are called for the model; None: they are ignored."""
    names = {IGNORED: None} | dict(enumerate(part.spec.names))
    return [names[number] for number in part.spec.class_of or range(len(part.spec.names))]
