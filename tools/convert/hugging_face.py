"""Reads object detection data sets from Hugging Face: parquet files with the images inside, and image folders."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.dataset.folder import split_of
from tools.convert.annotations import AnnotatedBox, Annotations, Entry
from tools.convert.values import MAX_FILE_BYTES, image_name, name_of, number, parse_flag, parse_object
from utils.errors import UserError, one_line
from utils.files.safe_io import read_text
from utils.machine.packages import require_package
from utils.schema import check
from utils.strings import counted

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData, ParquetFile

MAX_UNPACKED_RATIO = 100  # bytes of images per byte of the file; BMP files may be compressed that well
_ROWS_AT_ONCE = 16
_CROWDS = ("iscrowd", "is_crowd")
_CATEGORIES = ("category", "categories", "label", "labels", "category_id", "class")  # possible names of the column


def check_one_configuration(source: Path, files: Sequence[Path]) -> None:
    """Raises UserError if parquet files belong to several configurations of a data set, such as
    ``full/train/0.parquet`` and ``mini/train/0.parquet``: these may contain the same images, even in other splits."""
    configurations = list(dict.fromkeys(_configuration(file, source) for file in files))
    if len(configurations) > 1:
        alone = [name for name in configurations if not _contains_another(name, configurations)]
        folders = ", ".join(str(source / name) for name in alone[:5])
        raise UserError(
            f"{source}: has parquet files in several folders, which may be configurations with the same images; "
            f"convert {'one of ' if len(alone) > 1 else ''}{folders}, or, if they are parts of one configuration, move "
            "all files to one folder, each with a name of its own"
        )


def _contains_another(folder: str, folders: Sequence[str]) -> bool:
    """Returns whether another of ``folders`` is below ``folder``, which cannot be converted alone."""
    return any(other != folder and Path(other).is_relative_to(folder) for other in folders)


def _configuration(file: Path, source: Path) -> str:
    """Returns the folders of a parquet file, without the folder of its split if it is in one; "." without folders."""
    folders = file.parent.relative_to(source).parts if source.is_dir() else ()
    return Path(*itertools.takewhile(lambda folder: not split_of(folder), folders)).as_posix()


def read_parquet(file: Path, annotations: Annotations) -> None:
    """Reads a parquet file with ``image`` (its bytes) and ``objects`` with ``bbox`` (x, y, width, height in pixels) and
    ``category``. The images are written next to the output, except unlabeled ones, without ``objects``. Raises
    UserError for a file that unpacks to far more than its size: a few bytes can encode gigabytes of zeros, or one image
    in a million rows."""
    require_package("pyarrow", "tools.convert", "export the data set as COCO JSON")
    from pyarrow import parquet

    with _parquet_errors(file):
        table = parquet.ParquetFile(file)
        metadata = table.schema_arrow.metadata or {}
    names = _names(metadata, file)
    for row, (content, name, objects) in enumerate(_rows(table, file)):
        location = f"{file}: row {row}"
        columns = _columns(objects, location)
        if columns is None:
            annotations.extracted.num_unused += 1
            continue
        boxes = _boxes(columns, names, location)
        path = annotations.extracted.write(content, name, file, row)
        annotations.add(Entry(image=path, boxes=boxes, location=location, file=file, is_complete=True))


@contextlib.contextmanager
def _parquet_errors(file: Path) -> Iterator[None]:
    """Converts errors of pyarrow, which is reading ``file``, to UserError."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, KeyError, ValueError) as error:
        reason = one_line(str(error))[:100]
        raise UserError(f"{file}: not a parquet file with 'image' and 'objects' ({reason})") from None


def _rows(table: ParquetFile, file: Path) -> Iterator[tuple[bytes, str, Any]]:
    """Yields the content of each image, its name in the file or "", and its objects."""
    allowance = MAX_UNPACKED_RATIO * file.stat().st_size
    if _declared_bytes(table.metadata) > allowance:
        raise _too_large(file)
    for row, (image, objects) in enumerate(_unpacked(table, file)):
        if not isinstance(image, dict) or not isinstance(image.get("bytes"), bytes):
            raise UserError(f"{file}: row {row}: has no image bytes")
        allowance -= len(image["bytes"])
        if allowance < 0:
            raise _too_large(file)
        yield image["bytes"], str(image.get("path") or ""), objects


def _unpacked(table: ParquetFile, file: Path) -> Iterator[tuple[Any, Any]]:
    """Yields the values of the columns ``image`` and ``objects``."""
    with _parquet_errors(file):  # an error of whoever takes the values is not raised here
        for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=["image", "objects"]):
            for entry in batch.to_pylist():
                yield entry["image"], entry["objects"]


def _declared_bytes(metadata: FileMetaData) -> int:
    """Returns the total uncompressed size, in bytes, that a parquet file declares for its columns."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return sum(group.column(i).total_uncompressed_size for group in groups for i in range(group.num_columns))


def _too_large(file: Path) -> UserError:
    return UserError(f"{file}: refused: its images have more than {MAX_UNPACKED_RATIO} times the bytes of the file")


def read_image_folder(file: Path, annotations: Annotations) -> None:
    """Reads the metadata.jsonl of an image folder: one image per row, with ``file_name``, and ``objects`` as in parquet
    files. The image of a row without ``objects`` is unlabeled."""
    for line, row in enumerate(read_text(file, max_bytes=MAX_FILE_BYTES).split("\n"), 1):
        if not row.strip():
            continue
        location = f"{file}:{line}"
        entry = parse_object(row, location)
        columns = _columns(entry.get("objects"), location)
        name = image_name(entry.get("file_name"), location)
        path = annotations.source_images.find(name, location, file)
        if columns is not None:
            boxes = _boxes(columns, {}, location)
            annotations.add(Entry(image=path, boxes=boxes, location=location, file=file, is_complete=True))


def _boxes(columns: dict[str, Any], names: dict[str, list[str]], location: str) -> list[AnnotatedBox]:
    """Returns the boxes of a labeled image.

    Args:
        columns: lists by column, as `_columns` returns them.
        names: class names by column, as `_names` returns them.
    """
    if not columns:  # a background
        return []
    if "bbox" not in columns:
        raise UserError(f"{location}: objects: has no 'bbox', only {', '.join(map(one_line, map(str, columns)))[:200]}")
    bboxes = check(columns["bbox"] or [], list, f"{location}: bbox")
    category_column = next((key for key in _CATEGORIES if key in columns), "category")
    categories = _column(columns, category_column, len(bboxes), location)
    crowd_column = next((key for key in _CROWDS if key in columns), "")
    crowds = _column(columns, crowd_column, len(bboxes), location) if crowd_column else [None] * len(bboxes)
    boxes = []
    for bbox, category, crowd in zip(bboxes, categories, crowds):
        name = _class_name(category, names.get(category_column, []), f"{location}: {category_column}")
        is_crowd = parse_flag(crowd, f"{location}: {crowd_column}")
        boxes.append(AnnotatedBox.of_xywh(name, *_xywh(bbox, location), crowd=is_crowd))
    return boxes


def _xywh(bbox: Any, location: str) -> tuple[float, float, float, float]:
    """Returns the corner and size of a box, in pixels. Raises UserError unless ``bbox`` is four numbers."""
    if not isinstance(bbox, list) or len(bbox) != 4:
        raise UserError(f"{location}: expected a bbox of four numbers, got {str(bbox)[:60]}")
    x, y, w, h = (number(value, location) for value in bbox)
    return x, y, w, h


def _columns(objects: Any, location: str) -> dict[str, Any] | None:
    """Returns ``objects`` as lists by column; in some files it is a list of objects, which is empty for a background.

    Returns None for an unlabeled image, without ``objects`` or with only null columns: as a background it would teach
    the model to ignore its objects.
    """
    if objects == []:
        return {}
    if isinstance(objects, list):
        rows = [check(item, dict, location) for item in objects]
        keys = dict.fromkeys(key for row in rows for key in row)  # only some objects may have iscrowd
        columns = {key: [row.get(key) for row in rows] for key in keys}
    else:
        columns = check({} if objects is None else objects, dict, f"{location}: objects")
    if all(values is None for values in columns.values()):  # also if there is no column
        return None
    return columns


def _column(columns: dict[str, Any], column: str, num_boxes: int, location: str) -> list[Any]:
    """Returns the values of a column. Raises UserError unless each box has one."""
    values = check(columns.get(column) or [], list, f"{location}: {column}")
    if len(values) != num_boxes:
        raise UserError(f"{location}: {num_boxes} of 'bbox', but {len(values)} of '{column}'")
    return values


def _class_name(category: Any, names: list[str], location: str) -> str:
    """Returns the name of a category, which is a name itself or an index into ``names``; "" if it is missing. Raises
    UserError for an index out of range, such as -1, which means no class."""
    if category is None or isinstance(category, str):
        return category or ""
    if isinstance(category, float) and category.is_integer():
        category = int(category)
    if type(category) is not int:
        raise UserError(f"{location}: expected the name or the number of a class, got {one_line(str(category))[:60]}")
    if category < 0 or (names and category >= len(names)):
        known = f"; there are {counted(len(names), 'class')}, numbered from 0" if names else ""
        raise UserError(f"{location}: {category} is not the number of a class{known}")
    return names[category] if names else str(category)


def _names(metadata: dict[bytes, bytes], file: Path) -> dict[str, list[str]]:
    """Returns the names of the categories by column, for the columns that the file's metadata describes."""
    try:
        feature = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]["objects"]
    except (KeyError, TypeError):
        return {}
    except (ValueError, RecursionError):
        raise UserError(f"{file}: its 'huggingface' metadata is not JSON") from None
    labels = _class_labels(feature)
    return {column: [name_of(name, f"{file}: names of {column}") for name in names] for column, names in labels}


def _class_labels(feature: Any, column: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yields the columns with class labels in ``feature``, the description of the column ``objects``, and their class
    names."""
    if isinstance(feature, list):  # with the description of its elements
        for element in feature[:1]:
            yield from _class_labels(element, column)
    elif isinstance(feature, dict):
        if feature.get("_type") == "ClassLabel" and isinstance(feature.get("names"), list):
            yield column, feature["names"]
            return
        for key, value in feature.items():
            yield from _class_labels(value, column if key == "feature" else key)
