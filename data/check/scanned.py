"""A scanned split: its index, where its boxes are in the label files, and what the scan found."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from data.check.issues import Box, Issue
from data.index.dataset_yaml import DatasetSpec
from data.index.files import list_split
from data.index.index import DatasetIndex, load_index, without_labels
from data.index.scan import Scan, scan_split
from data.index.sharded import shards_of
from utils.boxes import xywh_to_xyxy
from utils.logger import get_logger


class CheckedSplit(NamedTuple):
    """A split of N usable images and M boxes."""

    name: str
    index: DatasetIndex
    scan: Scan | None = None  # None: not at hand, so that nothing is known about the label files

    def box(self, row: int) -> Box:
        """Box ``row`` of the index."""
        index, scan = self.index, self.scan
        image = self.image_of(row)
        return Box(
            index.names[index.classes[row]],
            int(index.classes[row]),
            tuple(xywh_to_xyxy(index.boxes_xywh_px[row]).tolist()),
            int(row - index.offsets[image]),
            scan.source.where(int(scan.numbers[image]), int(scan.lines[row])) if scan else None,
        )

    def image_of(self, row: int) -> int:
        """The image of box ``row``."""
        return int(np.searchsorted(self.index.offsets, row, side="right")) - 1

    def issue(self, kind: str, text: str, rows: tuple[int, ...]) -> Issue:
        """An issue about boxes of one image."""
        boxes = tuple(map(self.box, rows))
        image = self.index.paths[self.image_of(rows[0])]
        return Issue(kind, text, self.name, (image,), boxes[-1].where or "", boxes)


def scan_dataset(spec: DatasetSpec, splits: tuple[str, ...], *, workers: int, verify: str) -> list[CheckedSplit]:
    """Scans ``splits``; nothing is cached. Arguments and errors are those of `scan_split` and `list_split`."""
    scanned = []
    for split in splits:
        if shards_of(spec, split):  # they were scanned when they were written
            scanned.append(CheckedSplit(split, load_index(spec, split, max_bad=1.0)))
            continue
        listing = list_split(spec, split)
        if what := without_labels(listing, spec, split):
            get_logger().warning("%s", what)
        scan = scan_split(spec, split, listing, workers=workers, single_cls=False, show_progress=True, verify=verify)
        index = DatasetIndex(spec.names, spec.root, **scan.split._asdict(), pixels=spec.pixels, tile=spec.tile)
        scanned.append(CheckedSplit(split, index, scan))
    return scanned


def scan_issues(split: CheckedSplit) -> list[Issue]:
    """The findings of the scan, by kind."""
    if split.scan is None:
        lines = (line.split(": ", 2) for line in split.index.report.lines if line.count(": ") > 1)
        return sorted((Issue(kind, text, split.name, (), where) for where, kind, text in lines), key=lambda i: i.kind)
    images, names = split.scan.source.images, split.index.names
    issues = [Issue(f.kind, f.text, split.name, (), f.where) for f in split.scan.general]
    for p in split.scan.found:
        boxes = ()
        if p.xyxy_px and np.isfinite(p.xyxy_px).all():
            boxes = (Box(names[p.class_id], p.class_id, p.xyxy_px, where=p.finding.where),)
        f = p.finding
        issues.append(Issue(f.kind, f.text, split.name, (images[p.image].name,), f.where, boxes))
    return sorted(issues, key=lambda issue: issue.kind)
