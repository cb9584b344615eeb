"""Reads object detection data sets of Hugging Face: parquet files that contain the images, and ``metadata.jsonl`` of
image folders."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data.layouts import split_of
from utils.errors import UserError, one_line
from utils.files.safe_io import read_text, write_whole
from utils.machine.packages import require_package

_CATEGORIES = ("category", "categories", "label", "labels", "category_id", "class")  # possible names of the column
_ONLY_CLASS = "object"  # of data sets without such a column
_ROWS_AT_ONCE = 16


class LabeledImage(NamedTuple):
    """An image, and its boxes as in a COCO JSON, with the ``name`` of the class (None: unknown) in place of an id."""

    path: Path
    boxes: list[dict[str, Any]]
    size_hw: tuple[int, int] | None = None  # None if it is unknown
    is_labeled: bool = True  # whether somebody has looked for objects


def find_tables(source: Path) -> list[Path]:
    """Returns the parquet files, or else each ``metadata.jsonl``, in a folder that is not hidden, or ``source`` itself;
    none for another data set."""
    files = sorted(source.rglob("*")) if source.is_dir() else [source]
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(source).parts)]
    parquets = [file for file in files if file.suffix == ".parquet" and file.is_file()]
    tables = (source.name,) if source.is_file() and source.suffix == ".jsonl" else ("metadata.jsonl",)
    return parquets or [file for file in files if file.name in tables and file.is_file()]


def read_tables(files: Sequence[Path], root: Path, image_folder: Path) -> dict[str, list[LabeledImage]]:
    """Returns the images of the rows by split: that after which a folder or the start of the file's name is named, such
    as ``train-00000-of-00001.parquet``. Images in parquet files are written to ``image_folder``. Raises UserError for a
    malformed file."""
    splits: dict[str, list[LabeledImage]] = {}
    for file in files:
        names = [*file.relative_to(root).parent.parts, file.stem.replace(".", "-").partition("-")[0]]
        split = next(filter(None, map(split_of, names)), "train")
        folder = image_folder / file.relative_to(root).parent
        rows = _read_image_folder(file) if file.suffix == ".jsonl" else _read_parquet(file, folder)
        splits.setdefault(split, []).extend(rows)
    return splits


def _read_image_folder(file: Path) -> Iterator[LabeledImage]:
    """Yields the rows of a ``metadata.jsonl``, which names its images in ``file_name``."""
    for number, line in enumerate(read_text(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            path = file.parent / str(row["file_name"])
            boxes = _boxes(row.get("objects"), {})
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise UserError(f"{file}:{number}: not a row with 'file_name' ({one_line(repr(error))[:100]})") from None
        yield LabeledImage(path, boxes or [], is_labeled=boxes is not None)


def _read_parquet(file: Path, folder: Path) -> Iterator[LabeledImage]:
    """Yields the rows of a parquet file with ``image`` (its bytes, which are written to ``folder``) and ``objects``."""
    require_package("pyarrow", "tools.convert", "export the data set as COCO JSON")
    import pyarrow
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    try:
        table = parquet.ParquetFile(file)
        names = _class_names((table.schema_arrow.metadata or {}).get(b"huggingface", b"{}"))
        number = -1
        for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=["image", "objects"]):
            for row in batch.to_pylist():
                number += 1
                boxes = _boxes(row["objects"], names)
                content = bytes(row["image"]["bytes"])
                suffix = ".jpg" if content.startswith(b"\xff\xd8") else ".png"
                path = folder / f"{file.stem}-{number:06}{suffix}"
                write_whole(path, content)
                yield LabeledImage(path, boxes or [], is_labeled=boxes is not None)
    except (pyarrow.ArrowException, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = one_line(str(error))[:100]
        raise UserError(f"{file}: not a parquet file with 'image' and 'objects' ({reason})") from None


def _boxes(objects: Any, names: Mapping[str, Sequence[str]]) -> list[dict[str, Any]] | None:
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
    boxes = []
    column = next((key for key in _CATEGORIES if any(key in item for item in objects)), "")
    column_names = names.get(column)
    for item in objects:
        name = item.get(column) if column else _ONLY_CLASS
        if column_names is not None and type(name) is int:
            name = column_names[name] if 0 <= name < len(column_names) else f"class {name}"
        crowd = int(bool(item.get("iscrowd") or item.get("is_crowd")))
        boxes.append({"name": None if name is None else str(name), "bbox": item.get("bbox"), "iscrowd": crowd})
    return boxes


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
