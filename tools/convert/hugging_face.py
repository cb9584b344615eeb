"""Reads object detection data sets of Hugging Face: parquet files that contain the images, and ``metadata.jsonl`` of
image folders."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.convert.entry import Box, Entry, parse_boxes
from utils.errors import UserError, one_line
from utils.files.safe_io import read_text
from utils.machine.packages import require_package

_CATEGORIES = ("category", "categories", "label", "labels", "category_id", "class")  # possible names of the column
_ROWS_AT_ONCE = 16


def read_image_folder(file: Path) -> Iterator[Entry]:
    """Yields the rows of a ``metadata.jsonl``, which names its images in ``file_name``. Raises UserError for a
    malformed row."""
    for number, line in enumerate(read_text(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            name = str(row["file_name"])
            boxes = _boxes(row.get("objects"), {})
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise UserError(f"{file}:{number}: not a row with 'file_name' ({one_line(repr(error))[:100]})") from None
        yield Entry(name, boxes or [], f"{file}:{number}", file, is_labeled=boxes is not None)


def read_parquet(file: Path) -> Iterator[Entry]:
    """Yields the rows of a parquet file with ``image`` (its bytes) and ``objects``. Raises UserError for another
    file."""
    require_package("pyarrow", "tools.convert", "export the data set as COCO JSON")
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(file)
        names = _class_names((table.schema_arrow.metadata or {}).get(b"huggingface", b"{}"))
        number = -1
        for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=["image", "objects"]):
            for row in batch.to_pylist():
                number += 1
                boxes = _boxes(row["objects"], names)
                name = str(row["image"].get("path") or "")
                content = bytes(row["image"]["bytes"])
                where = f"{file}: row {number}"
                yield Entry(name, boxes or [], where, file, content=content, is_labeled=boxes is not None)
    except (pyarrow.ArrowException, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = one_line(str(error))[:100]
        raise UserError(f"{file}: not a parquet file with 'image' and 'objects' ({reason})") from None


def _boxes(objects: Any, names: dict[str, list[str]]) -> list[Box | str] | None:
    """Returns the boxes of an image; None if it is not labeled. ``objects``: lists by column, or a list of objects;
    ``bbox`` is x, y, width and height in pixels. ``names``: see `_class_names`."""
    if objects is None:
        return None
    if isinstance(objects, dict):
        columns = {key: values for key, values in objects.items() if isinstance(values, list)}
        if not columns:
            return None
        length = max(map(len, columns.values()))
        objects = [{key: values[i] for key, values in columns.items() if i < len(values)} for i in range(length)]

    def box(item: dict[str, Any]) -> Box:
        x, y, w, h = map(float, item["bbox"])
        column = next((key for key in _CATEGORIES if key in item), "category")
        name = item[column]
        if column in names and type(name) is int:
            name = names[column][name] if name >= 0 else ""
        return Box(name, x, y, x + w, y + h, bool(item.get("iscrowd") or item.get("is_crowd")))

    return parse_boxes(objects, box)


def _class_names(metadata: bytes) -> dict[str, list[str]]:
    """Returns the names of the classes by column, as the metadata of a parquet file describes ``objects``."""
    names: dict[str, list[str]] = {}

    def search(feature: Any, column: str) -> None:
        if isinstance(feature, Sequence) and not isinstance(feature, str):
            for element in feature[:1]:
                search(element, column)
        elif isinstance(feature, dict):
            if feature.get("_type") == "ClassLabel":
                names[column] = [str(name) for name in feature.get("names") or []]
            else:
                for key, value in feature.items():
                    search(value, column if key == "feature" else key)

    search(json.loads(metadata).get("info", {}).get("features", {}).get("objects"), "")
    return names
