"""A scanned split: its index, where its boxes are in the label files, and what the scan found."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from data.check.issues import Box, Issue
from data.index.index import DatasetIndex
from data.index.load import ScannedPart, load_index
from data.labels.findings import UNKNOWN_CLASS, Finding, relative_name
from data.spec.dataset_spec import IGNORED, DatasetSpec
from utils.boxes import xywh_to_xyxy


class CheckedSplit(NamedTuple):
    """A split of N usable images and M boxes, as training reads it."""

    name: str
    index: DatasetIndex
    parts: tuple[ScannedPart, ...] = ()  # in the order of the images; empty: not at hand

    def box(self, row: int) -> Box:
        """Box ``row`` of the index."""
        index = self.index
        image = self.image_of(row)
        return Box(
            index.names[index.classes[row]],
            int(index.classes[row]),
            tuple(xywh_to_xyxy(index.boxes_xywh_px[row]).tolist()),
            int(row - index.offsets[image]),
            self._where(row, image),
        )

    def image_of(self, row: int) -> int:
        """The image of box ``row``."""
        return int(np.searchsorted(self.index.offsets, row, side="right")) - 1

    def part_of(self, image: int) -> tuple[ScannedPart, int] | None:
        """The part that ``image`` is from, and its number in the label files; None if these are not at hand."""
        for part in self.parts:
            if image < len(part.index):
                return part.scan and (part, int(part.scan.numbers[image]))
            image -= len(part.index)
        return None

    def issue(self, kind: str, text: str, rows: tuple[int, ...]) -> Issue:
        """An issue about boxes of one image."""
        boxes = tuple(map(self.box, rows))
        image = self.index.paths[self.image_of(rows[0])]
        return Issue(kind, text, self.name, (image,), boxes[-1].where or "", boxes)

    def relative(self, part: ScannedPart, name: str) -> str:
        """``name``, relative to the folder of ``part``, relative to that of the data set."""
        return name if part.index.root == self.index.root else relative_name(part.index.root / name, self.index.root)

    def _where(self, row: int, image: int) -> str | None:
        line, found = int(self.index.line[row]), self.part_of(image)
        if line < 0 or found is None:
            return None
        part, number = found
        return self.relative(part, part.scan.source.where(number, line))


def learned_names(part: ScannedPart) -> list[str | None]:
    """What the classes of the labels are called for the model; None: they are ignored."""
    names = {IGNORED: None} | dict(enumerate(part.spec.names))
    return [names[number] for number in part.spec.class_of or range(len(part.spec.names))]


def scan_dataset(spec: DatasetSpec, splits: tuple[str, ...], *, workers: int) -> list[CheckedSplit]:
    """Scans ``splits`` and decodes all images; nothing is cached. Arguments and errors are those of `load_index`."""
    scanned = []
    for split in splits:
        parts: list[ScannedPart] = []
        index = load_index(spec, split, workers=workers, checked=parts)
        scanned.append(CheckedSplit(split, index, tuple(parts)))
    return scanned


def scan_issues(split: CheckedSplit) -> list[Issue]:
    """The findings of the scan, by kind."""
    issues = [issue for part in split.parts for issue in _issues_of(split, part)]
    return sorted(issues, key=lambda issue: issue.kind)


def _issues_of(split: CheckedSplit, part: ScannedPart) -> list[Issue]:
    if part.scan is None:
        lines = (line.split(": ", 2) for line in part.index.report.lines if line.count(": ") > 1)
        return [Issue(kind, text, split.name, (), split.relative(part, where)) for where, kind, text in lines]

    def issue(found: Finding, images: tuple[str, ...] = (), boxes: tuple[Box, ...] = ()) -> Issue:
        return Issue(found.kind, found.text, split.name, images, split.relative(part, found.where), boxes)

    issues = [issue(finding) for finding in part.scan.general]
    images = part.scan.source.images
    for p in part.scan.found:
        boxes = ()
        if p.xyxy_px and np.isfinite(p.xyxy_px).all():
            name = p.finding.text.partition(" is not ")[0].strip("'")  # of an unknown class
            if p.finding.kind != UNKNOWN_CLASS:
                name = learned_names(part)[p.class_id] or part.index.names[p.class_id]
            number = split.index.names.index(name) if name in split.index.names else IGNORED
            boxes = (Box(name, number, p.xyxy_px, where=split.relative(part, p.finding.where)),)
        issues.append(issue(p.finding, (split.relative(part, images[p.image].name),), boxes))
    return issues
