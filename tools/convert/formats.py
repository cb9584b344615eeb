"""The annotation formats that can be converted, and how their files are recognized.

The formats are read without libraries because each takes only some dozens of lines, and the libraries silently drop
shapes that are not rectangles (CVAT's polygons, LabelMe's circles), or names without suffixes (Open Images).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tools.convert.annotations import Annotations
from tools.convert.createml import read_createml
from tools.convert.csv_table import is_csv, read_csv
from tools.convert.cvat import read_cvat
from tools.convert.hugging_face import check_one_configuration, read_image_folder, read_parquet
from tools.convert.kitti import is_kitti, read_kitti
from tools.convert.labelbox import read_labelbox
from tools.convert.labelme import read_labelme
from tools.convert.source_images import files_below
from tools.convert.vott import read_vott
from utils.errors import UserError
from utils.files.encoding import decode_loosely
from utils.files.safe_io import open_regular

_HEAD_BYTES = 1 << 16  # enough to recognize a format
_PARQUET = "PAR1"  # first bytes of a parquet file


class Format(NamedTuple):
    """An annotation format, and how to read it."""

    title: str
    suffixes: tuple[str, ...]
    fits: Callable[[str], bool]  # whether a file with this beginning has the format
    read: Callable[[Path, Annotations], None]  # adds the objects of a file; raises UserError
    is_per_image: bool = False  # whether each image has an annotation file of its name
    may_be_blank: bool = False  # whether the annotation file of an image without objects is blank
    check: Callable[[Path, list[Path]], None] | None = None  # raises UserError if ``source`` is not one export


def _has_key(names: str) -> Callable[[str], bool]:
    """Returns a function that searches JSON for one of the keys ``names``, separated by |."""
    key = re.compile(rf'"({names})"\s*:')
    return lambda head: key.search(head) is not None


FORMATS = {
    "cvat": Format("CVAT", (".xml",), lambda head: "<annotations>" in head, read_cvat),
    "labelbox": Format("Labelbox", (".ndjson", ".json"), _has_key("data_row"), read_labelbox),
    "labelme": Format("LabelMe", (".json",), _has_key("shapes"), read_labelme, is_per_image=True),
    "vott": Format("VoTT", (".json",), _has_key("assets?"), read_vott),
    "createml": Format("CreateML", (".json",), _has_key("coordinates"), read_createml),
    "csv": Format("CSV", (".csv",), is_csv, read_csv),
    "kitti": Format("KITTI", (".txt",), is_kitti, read_kitti, is_per_image=True, may_be_blank=True),
    "huggingface": Format(
        "Hugging Face parquet",
        (".parquet",),
        lambda head: head.startswith(_PARQUET),
        read_parquet,
        check=check_one_configuration,
    ),
    "imagefolder": Format("Hugging Face image folder", (".jsonl",), _has_key("file_name"), read_image_folder),
}


def detect(source: Path) -> dict[str, list[Path]]:
    """Returns the annotation files at ``source``, a file or a folder, by format."""
    suffixes = {suffix for known in FORMATS.values() for suffix in known.suffixes}
    files_of: dict[str, list[Path]] = {}
    for file in files_below(source, suffixes) if source.is_dir() else [source]:
        name = _format_of(file)
        if name:
            files_of.setdefault(name, []).append(file)
    return files_of


def _format_of(file: Path) -> str:
    """Returns the name of the first format that a file fits; "" if there is none."""
    try:
        with open_regular(file) as opened:
            head = _text_of(opened.read(_HEAD_BYTES))
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None
    suffix = file.suffix.lower()
    return next((name for name, known in FORMATS.items() if suffix in known.suffixes and known.fits(head)), "")


def _text_of(head: bytes) -> str:
    """Decodes the beginning of a file. The content of a parquet file is not text, but may look like UTF-16."""
    if head.startswith(_PARQUET.encode()):
        return head.decode("latin-1")
    return decode_loosely(head).lstrip()
