"""Content of label files, and rows of labels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from data.labels.rows import LabelRow, RowProblem


def voc_file(*objects: tuple[object, ...], size: tuple[object, object] | None = (100, 200)) -> bytes:
    """Returns a Pascal VOC XML of ``objects`` (name, xmin, ymin, xmax, ymax), which begin on lines 3, 6, and so on.

    ``size``: height and width.
    """
    shown = f"<size><width>{size[1]}</width><height>{size[0]}</height><depth>3</depth></size>" if size else ""
    parts = [
        f"<object>\n<name>{name}</name><difficult>1</difficult><bndbox><xmin>{x1}</xmin><ymin>{y1}</ymin>"
        f"<xmax>{x2}</xmax><ymax>{y2}</ymax></bndbox>\n<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part></object>\n"
        for name, x1, y1, x2, y2 in objects
    ]
    return f"<annotation>\n<filename>x.jpg</filename>{shown}\n{''.join(parts)}</annotation>".encode()


def coco_file(
    annotations: Sequence[object],
    categories: Iterable[tuple[int, str]] = ((1, "a"), (5, "b")),
    images: Iterable[tuple[int, str]] = ((9, "x.jpg"),),
) -> dict[str, Any]:
    """Returns the content of a COCO JSON. ``categories`` and ``images``: ids and names."""
    return {
        "images": [{"id": i, "file_name": name, "height": 100, "width": 200} for i, name in images],
        "annotations": annotations,
        "categories": [{"id": i, "name": name} for i, name in categories],
    }


def label_row(
    x1: float,
    y1: float,
    x2: float,
    y2: float,
    *,
    class_id: int = 0,
    area: float | None = None,
    crowd: int = 0,
    number: int = 1,
    shape: int = 0,
) -> LabelRow:
    """Returns a row of a box. ``area``: None for that of the box; ``number``: the row number."""
    area = (x2 - x1) * (y2 - y1) if area is None else area
    return (class_id, x1, y1, x2, y2, area, crowd, number, shape)


def problem_kinds(problems: Iterable[RowProblem]) -> list[tuple[int, str]]:
    """Returns the row number and the kind of each problem."""
    return [(problem.row_number, problem.kind) for problem in problems]
