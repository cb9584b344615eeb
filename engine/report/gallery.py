"""The gallery of label errors on a page: photos with labels, detections and corrections drawn over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from engine.issues.issue import LABEL_ERRORS, MISSING_LABEL, SPURIOUS, CheckedSplit, Issue, LabelBox, learned_names
from engine.report.photos import COLORS, CROP_SIDE, Album, Outline, Overlay, PhotoFile, in_window, outlines
from utils.boxes import clip_xyxy, scale_boxes, xywh_to_xyxy, xyxy_to_cxcywh
from utils.detections import DetectionTable
from utils.drawing.page import Card, LegendEntry, code

LABEL_LEGEND = (
    LegendEntry("label that the error is about", COLORS["label"]),
    LegendEntry("other labels", COLORS["correct"]),
    LegendEntry("detection, or suggested box", COLORS["location"]),
    LegendEntry("suggested box without a label", COLORS["missed"]),
)
STYLES = {MISSING_LABEL: "missed", SPURIOUS: "spurious"}  # style of an issue's box by kind; other kinds: location
MAX_LABEL_ERRORS = 60
MAX_DRAWN_LABELS = 60  # maximum number in a picture of a label error
MAX_DRAWN_DETECTIONS = 40


class DrawnDetections(NamedTuple):
    """Detections of detect.py in the images of a split, to be drawn next to label errors."""

    table: DetectionTable
    threshold: float  # detections with higher scores are drawn


class Galleries:
    """Builds the gallery of label errors; base class of galleries of other issues. ``detections``: by split, if there
    is a model."""

    def __init__(self, splits: Sequence[CheckedSplit], detections: Mapping[str, DrawnDetections]) -> None:
        self._detections = detections
        self._splits = {split.name: split for split in splits}
        self._names = splits[0].index.names
        # Numbers of images by split and name, without images that the scan left out.
        self._number = {(split.name, path): i for split in splits for i, path in enumerate(split.index.paths)}

    def label_errors(self, issues: Sequence[Issue], album: Album) -> list[Card]:
        """Creates cards of the most probable label errors: labels, detections, and corrected labels."""
        drawn = [issue for issue in issues if issue.kind in LABEL_ERRORS][:MAX_LABEL_ERRORS]
        return [self._label_error(issue, album) for issue in drawn]

    def _image(self, split: str, name: str) -> tuple[PhotoFile, np.ndarray] | None:
        """Returns an image, and the rows of its boxes in the index; None if the scan left it out."""
        number = self._number.get((split, name))
        if number is None:
            return None
        index = self._splits[split].index
        rows = np.arange(index.offsets[number], index.offsets[number + 1])
        return source_of(self._splits[split], number), rows

    def _labels(self, split: str, rows: np.ndarray, excluded: Sequence[LabelBox] = ()) -> list[Outline]:
        """Outlines the labels of an image, ``rows`` of the index, except ``excluded``."""
        boxes = xywh_to_xyxy(self._splits[split].index.boxes_xywh_px[rows])
        boxes = np.delete(boxes, [box.number for box in excluded if box.number is not None], axis=0)
        return outlines(boxes[:MAX_DRAWN_LABELS], "correct")

    def _label_error(self, issue: Issue, album: Album) -> Card:
        name = issue.images[0]
        split = self._splits[issue.split]
        image = self._number[issue.split, name]
        source = source_of(split, image)
        boxes = list(issue.boxes)
        suggested: list[Outline] = []
        if issue.suggestion is not None:
            boxes.append(issue.suggestion)
            style = STYLES.get(issue.kind, "location")
            suggested.append(Outline(issue.suggestion.xyxy_px, style, issue.suggestion.class_name))
        window = source.around(corners_of(boxes))
        rows = np.arange(split.index.offsets[image], split.index.offsets[image + 1])
        others = self._labels(issue.split, rows, issue.boxes)
        labels = [Outline(box.xyxy_px, "label", box.class_name) for box in issue.boxes]
        pictures = album.pictures(
            source,
            window,
            CROP_SIDE,
            Overlay("labels", f"Labels in {name}", labels + others),
            Overlay("detections", f"Detections in {name}", self._seen(window, issue)),
            Overlay("suggested labels", f"Corrected labels in {name}", suggested + others),
        )
        note = Markup("{}: {}<br>{}").format(issue.split, issue.where or name, self._correction(issue, source))
        return Card(pictures, f"{issue.score:.2f} {issue.kind}: {issue.text}", note, issue.kind)

    def _seen(self, window: np.ndarray, issue: Issue) -> list[Outline]:
        """Outlines the detections in an issue's image above the threshold, the most confident first, and the one that
        the issue is about, whatever its score."""
        table, threshold = self._detections[issue.split]
        image = self._number[issue.split, issue.images[0]]
        rows = np.flatnonzero((table.image_index == image) & (table.scores > threshold))
        rows = rows[in_window(table.boxes_xyxy_px[rows], window)]
        rows = rows[np.argsort(-table.scores[rows], kind="stable")][:MAX_DRAWN_DETECTIONS]
        texts = [f"{self._names[table.classes[row]]} {table.scores[row]:.2f}" for row in rows]
        drawn = [Outline(table.boxes_xyxy_px[row], "location", text) for row, text in zip(rows, texts)]
        suggestion = issue.suggestion
        if suggestion is not None and not (table.boxes_xyxy_px[rows] == suggestion.xyxy_px).all(1).any():
            drawn.append(Outline(suggestion.xyxy_px, "location", suggestion.class_name))
        return drawn

    def _correction(self, issue: Issue, source: PhotoFile) -> Markup:
        """Describes the change to the label file."""
        if issue.suggestion is None:
            return Markup("delete this label")
        box = np.array(issue.suggestion.xyxy_px)
        name = issue.suggestion.class_name
        labeled = self._splits[issue.split].labeled_image(self._number[issue.split, issue.images[0]])
        names = learned_names(labeled.part) if labeled is not None and labeled.source.normalized else []
        if name in names:
            box = clip_xyxy(box, source.width, source.height)
            cxcywh = scale_boxes(xyxy_to_cxcywh(box), 1 / source.width, 1 / source.height)
            row = " ".join([str(names.index(name)), *(f"{v:.6f}" for v in cxcywh)])
        else:
            row = f"{name}, corners {', '.join(f'{v:.1f}' for v in box)} px"
        return Markup("{} {}").format("write" if issue.boxes else "add", code(row))


def source_of(split: CheckedSplit, image: int) -> PhotoFile:
    """Returns the image file with number ``image`` of a split."""
    height, width = split.index.image_hw[image].tolist()
    return PhotoFile(split.index.path(image), height, width, split.index.pixels)


def corners_of(boxes: Sequence[LabelBox]) -> np.ndarray:
    """Returns the boxes as an array, float64 (n, 4), xyxy original pixels."""
    return np.array([box.xyxy_px for box in boxes], np.float64).reshape(-1, 4)
