"""The layout of an exported model's output: where its boxes and scores are.

Legend: B images, N boxes, C classes, D detections.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from engine.formats.layouts import END2END_ROWS
from engine.formats.metadata import ExportMetadata
from utils.boxes import cxcywh_to_xyxy
from utils.errors import UserError
from utils.logger import get_logger
from utils.strings import counted


class LayoutKind(enum.Enum):
    """The kinds of outputs that detectors have."""

    COLUMNS = "columns"  # (B, 4 + C, N): cx, cy, w, h, classes
    OBJECTNESS = "objectness"  # (B, N, 5 + C): cx, cy, w, h, objectness, classes
    DETECTIONS = "detections"  # (B, D, 6): x1, y1, x2, y2, score, class


@dataclass(frozen=True)
class OutputLayout:
    """The layout of an output, and the names of its classes."""

    kind: LayoutKind
    names: tuple[str, ...]

    @staticmethod
    def of(shape: tuple[int, ...], metadata: ExportMetadata, path: Path) -> OutputLayout:
        """Infers the layout of an output of this shape, of the file ``path``. Raises UserError for a shape that no
        detector's output has, or that does not fit the class names."""
        if len(shape) != 3:
            raise UserError(f"{path}: its output {list(shape)} is not a detector's")
        _, rows, width = shape
        kind = _kind_of(rows, width, metadata)
        names = metadata.names
        if names is None:
            names = _numbered_names(kind, rows, width, path)
        fits = {
            LayoutKind.COLUMNS: rows == 4 + len(names),
            LayoutKind.OBJECTNESS: width == 5 + len(names),
            LayoutKind.DETECTIONS: width == 6,
        }
        if not fits[kind] or not names:
            raise UserError(f"{path}: its output {list(shape)} does not fit {counted(len(names), 'class')}")
        return OutputLayout(kind, names)

    def decode(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Converts an output to boxes (B, N, 4), x1, y1, x2, y2, and scores (B, N, C). Raises UserError for a class
        that does not exist."""
        num_classes = len(self.names)
        if self.kind is LayoutKind.DETECTIONS:
            boxes, scores, classes = output.split((4, 1, 1), -1)
            return boxes, self._scores_by_class(scores, classes)
        if self.kind is LayoutKind.OBJECTNESS:
            boxes, objectness, classes = output.split((4, 1, num_classes), -1)
            return cxcywh_to_xyxy(boxes), objectness * classes
        boxes, scores = output.transpose(1, 2).split((4, num_classes), -1)
        return cxcywh_to_xyxy(boxes), scores.contiguous()

    def _scores_by_class(self, scores: Tensor, classes: Tensor) -> Tensor:
        """Returns the scores (B, D, 1) in the columns of their classes (B, D, 1), 0 elsewhere: (B, D, C)."""
        last = len(self.names) - 1
        unknown = ~((classes > -0.5) & (classes < last + 0.5)) & (scores > 0)
        if unknown.any():
            raise UserError(f"predicts class {classes[unknown][0].item():g}, but its classes are 0 to {last}")
        columns = scores.new_zeros((*scores.shape[:2], len(self.names)))
        numbers = classes.nan_to_num().round().long().clamp(0, last)
        return columns.scatter(-1, numbers, scores)


def _kind_of(rows: int, width: int, metadata: ExportMetadata) -> LayoutKind:
    """Infers the kind of an output (B, rows, width)."""
    if metadata.is_ours:
        return LayoutKind.DETECTIONS if metadata.end2end else LayoutKind.COLUMNS
    count = None if metadata.names is None else len(metadata.names)
    if width == 6 and (metadata.end2end or rows == END2END_ROWS or count != 1):
        return LayoutKind.DETECTIONS
    has_columns = rows < width if count is None else rows == 4 + count
    return LayoutKind.COLUMNS if has_columns else LayoutKind.OBJECTNESS


def _numbered_names(kind: LayoutKind, rows: int, width: int, path: Path) -> tuple[str, ...]:
    """Returns numbers as class names, for an output (B, rows, width) of a file without names. Raises UserError if the
    output does not show how many classes there are."""
    if kind is LayoutKind.DETECTIONS:
        raise UserError(f"{path}: holds no class names, nor their number; export it with its metadata")
    count = rows - 4 if kind is LayoutKind.COLUMNS else width - 5
    get_logger().info("%s: no class names in the file; they are numbered (%s)", path, counted(count, "class"))
    return tuple(str(number) for number in range(count))
