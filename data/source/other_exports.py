"""Recognizes exports that neither training nor `tools.convert` reads, and suggests what to export instead."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from utils.config.commands import COMMANDS
from utils.errors import UserError
from utils.files.encoding import decode_loosely
from utils.files.safe_io import open_regular

EXPORT_SUFFIXES = frozenset({".json", ".ndjson", ".jsonl", ".csv"})
_CONVERTED_SUFFIXES = (".json", ".ndjson", ".jsonl", ".csv", ".xml", ".parquet")  # files that tools.convert reads
_HEAD = 1 << 16  # bytes that suffice to recognize an export


class _Export(NamedTuple):
    title: str
    sign: re.Pattern[str]  # in the first bytes of a file
    instead: str


def _has_keys(*alternatives: str) -> re.Pattern[str]:
    """Returns a pattern that matches any of these keys in JSON."""
    return re.compile(rf'"({"|".join(alternatives)})"\s*:')


_EXPORTS = (
    _Export(
        "Ultralytics' NDJSON",
        re.compile(r'"type"\s*:\s*"dataset"'),
        "it names images by their addresses, and nothing is downloaded; export images, YOLO labels and a data.yaml "
        "instead (convert_ndjson_to_yolo of the package ultralytics writes them)",
    ),
    _Export("Label Studio's JSON", _has_keys("rectanglelabels", "polygonlabels"), "export as YOLO or COCO instead"),
    _Export(
        "a project of VGG Image Annotator",
        re.compile("_via_img_metadata|region_attributes|region_shape_attributes"),
        "export its annotations as COCO instead",
    ),
    _Export("Supervisely's JSON", _has_keys("classTitle"), "export as YOLO or COCO instead"),
    _Export("V7's Darwin JSON", re.compile("darwin_json"), "export as COCO or YOLO instead"),
    _Export("Datumaro's JSON", _has_keys("dm_format_version"), "export as COCO instead (datum convert -f coco)"),
)


def unread_export(path: Path) -> str:
    """Returns the kind of export in a file, and what to export instead, or "" for other files. A YAML is only searched
    if it begins like JSON, because comments and paths can mention the words of an export."""
    head = _head(path)
    if path.suffix.lower() not in EXPORT_SUFFIXES and not head.lstrip().startswith(("{", "[")):
        return ""
    for export in _EXPORTS:
        if export.sign.search(head):
            return f"{export.title}: {export.instead}"
    return ""


def first_unread_export(paths: Iterable[Path]) -> str:
    """Returns a message about the first of ``paths`` that `unread_export` recognizes, or "" if there is none."""
    for path in paths:
        if path.suffix.lower() in EXPORT_SUFFIXES:
            message = unread_export(path)
            if message:
                return f"{path}: {message}"
    return ""


def check_no_export(path: Path) -> None:
    """Raises UserError if ``path``, which should be a data set's YAML, is the export of an annotation tool."""
    message = unread_export(path)
    if message:
        raise UserError(f"{path}: {message}")
    suffix = path.suffix.lower()
    if suffix == ".xml" and re.search(r"<annotation[\s>]", _head(path)):
        raise UserError(f"{path}: a Pascal VOC annotation, not the YAML of a data set; name the folder of all of them")
    if suffix not in _CONVERTED_SUFFIXES:
        return
    keys = set(re.findall(r'"(\w+)"\s*:', _head(path)))
    if "images" in keys and keys & {"annotations", "categories", "bbox"}:
        raise UserError(
            f"{path}: a COCO JSON, not the YAML of a data set; name the folder that has it and the images, or write a "
            "YAML with the images' folder as 'train:' and this file under 'annotations:'"
        )
    if suffix != ".json" or not keys & {"train", "val", "test"}:  # JSON is YAML
        raise UserError(
            f"{path}: not the YAML of a data set; for the export of an annotation tool: {COMMANDS['convert'].typed} "
            f"{path} OUT.json"
        )


def _head(path: Path) -> str:
    try:
        with open_regular(path) as file:
            return decode_loosely(file.read(_HEAD))
    except OSError:  # reported when the file is read
        return ""
