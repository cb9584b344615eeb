"""Problems of labels: an `Issue` names boxes of a `CheckedSplit`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from data.index import DatasetIndex, LoadedSplit
from data.labels import Labels
from data.spec import IGNORED
from utils.boxes import clip_xyxy, scale_boxes, xywh_to_xyxy, xyxy_to_cxcywh
from utils.files.paths import path_of, relative_name


@dataclass(frozen=True, slots=True)
class LabelBox:
    """A labeled or suggested box."""

    class_name: str
    class_id: int
    xyxy_px: tuple[float, ...]  # original pixels
    number: int | None = None  # position in the image's labels without dropped rows, from 0; None: a suggestion
    where: str | None = None  # label file and line (COCO: and annotation id)

    @property
    def line(self) -> int | None:
        """Line number at the end of ``where``; None if it does not end in a number."""
        tail = (self.where or "").rpartition(":")[2]
        return int(tail) if tail.isdecimal() else None


@dataclass(frozen=True, slots=True)
class Issue:
    """A certain or probable problem of a data set. Files are relative to the data set's folder."""

    kind: str
    text: str  # the problem, in words
    split: str = ""  # empty: the whole data set
    images: tuple[str, ...] = ()
    where: str = ""  # file and line to correct; empty: the first image
    boxes: tuple[LabelBox, ...] = ()  # as labeled, all in the first image
    score: float | None = None  # of label errors, 0 to 1, see `find_label_errors`
    suggestion: LabelBox | None = None  # for label errors: the corrected label
    splits: tuple[str, ...] = ()  # splits of ``images``, if there are several

    def __str__(self) -> str:
        location = self.where or next(iter(self.images), self.split)
        score = "" if self.score is None else f"{self.score:.2f} "
        return f"{score}{location}: {self.text}" if location else f"{score}{self.text}"

    def content(self) -> dict[str, Any]:
        """Converts to plain data for JSON, without empty values."""
        values = asdict(self) | {"boxes": [_box_content(b) for b in self.boxes]}
        if self.suggestion is not None:
            values["suggestion"] = _box_content(self.suggestion)
        return {key: value for key, value in values.items() if value not in (None, "", (), [])}


def _box_content(box: LabelBox) -> dict[str, Any]:
    values = asdict(box) | {"line": box.line, "xyxy_px": [round(v, 2) for v in box.xyxy_px]}
    return {key: value for key, value in values.items() if value is not None}


def by_kind(issues: Iterable[Issue]) -> dict[str, list[Issue]]:
    """Groups issues by kind; kinds and issues keep their order."""
    groups: dict[str, list[Issue]] = {}
    for issue in issues:
        groups.setdefault(issue.kind, []).append(issue)
    return groups


class LabeledImage(NamedTuple):
    """An image in the label files of its data set."""

    part: LoadedSplit
    labels: Labels
    number: int  # in ``labels.images``


@dataclass(frozen=True)
class CheckedSplit:
    """A split of N usable images and M boxes, as training reads it."""

    name: str
    index: DatasetIndex
    parts: tuple[LoadedSplit, ...] = ()  # the joined data sets, or the split itself; empty: unknown
    refusals: tuple[str, ...] = ()  # messages with which training or scoring refuses the split
    objects_problem: str = ""  # message about a split without objects; empty if it has any

    def box(self, row: int) -> LabelBox:
        """Returns box ``row`` of the split."""
        index = self.index
        image = self.image_of(row)
        labeled = self.labeled_image(image)
        where = None
        if labeled is not None and index.row_number[row] >= 0:
            name = labeled.labels.where(labeled.number, int(index.row_number[row]))
            where = self.relative(labeled.part, name)
        return LabelBox(
            class_name=index.names[index.classes[row]],
            class_id=int(index.classes[row]),
            xyxy_px=tuple(xywh_to_xyxy(index.boxes_xywh_px[row]).tolist()),
            number=int(row - index.offsets[image]),
            where=where,
        )

    def image_of(self, row: int) -> int:
        """Returns the image of box ``row``."""
        return int(np.searchsorted(self.index.offsets, row, side="right")) - 1

    def labeled_image(self, image: int) -> LabeledImage | None:
        """Finds ``image`` in the label files; None if these are unknown, or several joined data sets have it."""
        return self._labeled_images.get(self.index.paths[image])

    @cached_property
    def _labeled_images(self) -> dict[str, LabeledImage | None]:
        """The images in the label files, by path."""
        labeled: dict[str, LabeledImage | None] = {}
        for part in self.parts:
            if part.labels is None:
                continue
            for number, name in enumerate(part.labels.images):
                path = self.relative(part, name)
                labeled[path] = None if path in labeled else LabeledImage(part, part.labels, number)
        return labeled

    def issue(self, kind: str, text: str, rows: tuple[int, ...]) -> Issue:
        """Creates an issue about boxes of one image."""
        return self.issue_of(kind, text, self.image_of(rows[0]), tuple(map(self.box, rows)))

    def issue_of(self, kind: str, text: str, image: int, boxes: tuple[LabelBox, ...]) -> Issue:
        """Creates an issue about ``boxes`` of the image with this number."""
        return Issue(kind, text, self.name, (self.index.paths[image],), boxes[-1].where or "", boxes)

    def relative(self, part: LoadedSplit, name: str) -> str:
        """Converts ``name``, a path relative to the folder of ``part``, to a path relative to the data set's folder."""
        if part.full.root == self.index.root:
            return name
        return relative_name(path_of(name, part.full.root), self.index.root)

    def corrected_row(self, image: int, box: LabelBox) -> str:
        """Returns ``box`` as a row of YOLO's format if the labels of ``image`` have it, else in words."""
        height, width = self.index.image_hw[image].tolist()
        corners = np.array(box.xyxy_px)
        labeled = self.labeled_image(image)
        names = learned_names(labeled.part) if labeled is not None and labeled.labels.format.name == "yolo" else []
        if box.class_name not in names:
            return f"{box.class_name}, corners {', '.join(f'{v:.1f}' for v in corners)} px"
        cxcywh = scale_boxes(xyxy_to_cxcywh(clip_xyxy(corners, width, height)), 1 / width, 1 / height)
        return " ".join([str(names.index(box.class_name)), *(f"{v:.6f}" for v in cxcywh)])


def learned_names(part: LoadedSplit) -> list[str | None]:
    """Returns the model's name for each class of the labels; None: the class is ignored."""
    names: dict[int, str | None] = {IGNORED: None}
    names.update(enumerate(part.spec.names))
    return [names[number] for number in part.spec.class_of or range(len(part.spec.names))]
