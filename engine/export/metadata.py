"""The metadata of an exported model: text by key, which every format stores in its own way.

The keys that readers of YOLO exports use (names, stride, imgsz, ...) hold Python literals. The key ``lockstep`` adds
JSON that only this program reads.
"""

from __future__ import annotations

import ast
import enum
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import yaml

from utils.config.yaml_files import load_yaml
from utils.errors import UserError, one_line
from utils.files.safe_io import write_whole
from utils.pixels import GRAY, MAX_CHANNELS
from utils.schema import Bounds, Fraction, build, check
from utils.strings import counted

KEY = "lockstep"
VERSION = 1
DEFAULT_HW = (640, 640)  # canvas of files that state no size
FOREIGN_IOU = 0.7  # NMS threshold in validation for raw files that state none
METADATA_FILE = "metadata.yaml"  # in the folders of formats that have several files
MAX_BYTES = 10_000_000  # of metadata in an archive
MAX_CLASSES = 100_000
_TEXTS = ("description", "date", "author", "version", "license")
# Fields of `ExportMetadata` in the key `KEY`.
_JSON_FIELDS = ("nms_iou", "validation_iou", "squares", "confidence", "bits")
Side = Annotated[int, Bounds(1, 2**16)]


class OutputLayout(enum.Enum):
    """The outputs that detectors have. B images, N boxes, C classes, D detections."""

    COLUMNS = "columns"  # (B, 4 + C, N): cx, cy, w, h, classes
    OBJECTNESS = "objectness"  # (B, N, 5 + C): cx, cy, w, h, objectness, classes; of YOLOv5
    DETECTIONS = "detections"  # (B, D, 6): x1, y1, x2, y2, score, class


@dataclass(frozen=True, kw_only=True)
class ExportMetadata:
    """The description stored in an exported file. It names no path and no image, because files are given to others.
    Files of other programs have at least ``names``."""

    names: tuple[str, ...]
    stride: Annotated[int, Bounds(1, 4096)] = 32
    imgsz_hw: tuple[Side, Side] | None = None  # canvas, pixels
    batch: Side = 1
    dynamic: bool = False  # any batch and any canvas of whole strides
    end2end: bool = False  # rows of final detections, instead of all boxes
    channels: Annotated[int, Bounds(1, MAX_CHANNELS)] = 3
    bits: Annotated[int, Bounds(8, 16)] = 8  # bits per channel
    nms_iou: Fraction | None = None  # of the NMS in the file (``end2end``) or after it; None: the model needs none
    validation_iou: Fraction = FOREIGN_IOU  # as published for the model's head
    squares: bool = False  # whether images are padded to squares
    confidence: Fraction | None = None  # threshold chosen by F1 for what detect.py finds with the file
    description: str = ""
    date: str = ""
    author: str = ""
    version: str = ""
    license: str = ""
    details: dict[str, Any] = field(default_factory=dict)  # further entries of the key `KEY`

    @property
    def needs_nms(self) -> bool:
        """Whether NMS has to follow on the output."""
        return self.nms_iou is not None and not self.end2end

    @property
    def input_shape(self) -> tuple[int | None, ...]:
        """B, C, H, W; None: any."""
        if self.dynamic or self.imgsz_hw is None:
            return (None, self.channels, None, None)
        return (self.batch, self.channels, *self.imgsz_hw)

    def output_layout(self, shape: Sequence[int]) -> OutputLayout:
        """Returns the layout of an output of this shape. Raises UserError for a shape that does not fit ``end2end`` and
        the number of classes."""
        count = len(self.names)
        rows, columns = shape[1:] if len(shape) == 3 else (0, 0)
        if self.end2end and columns == 6:
            return OutputLayout.DETECTIONS
        if not self.end2end and rows == 4 + count:
            return OutputLayout.COLUMNS
        if not self.end2end and columns == 5 + count:
            return OutputLayout.OBJECTNESS
        expected = "[B, D, 6]" if self.end2end else f"[B, {4 + count}, N] or [B, N, {5 + count}]"
        raise UserError(
            f"its output {list(shape)} does not fit its metadata; expected {expected} for {counted(count, 'class')}"
        )

    def as_strings(self) -> dict[str, str]:
        """Returns the entries for formats that hold text: values for readers of YOLO exports as Python literals, and
        those of the key `KEY` as JSON."""
        known = {key: getattr(self, key) for key in (*_TEXTS, "stride", "batch", "channels", "end2end")}
        known |= {"task": "detect", "imgsz": list(self.imgsz_hw or ()), "names": dict(enumerate(self.names))}
        known["args"] = {"dynamic": self.dynamic}
        entries = {key: getattr(self, key) for key in _JSON_FIELDS}
        entries |= {"version": VERSION, "layout": "end2end" if self.end2end else "raw"}
        entries |= {"needs_nms": self.needs_nms, "preprocessing": self.preprocessing}
        strings = {key: str(value) for key, value in known.items()}
        return strings | {KEY: json.dumps(entries | self.details, ensure_ascii=False)}

    def as_data(self) -> dict[str, Any]:
        """Returns the entries for formats that hold data, where readers expect some values that are not text."""
        data = {"stride": self.stride, "batch": self.batch, "imgsz": list(self.imgsz_hw or ())}
        return self.as_strings() | data | {"names": dict(enumerate(self.names))}

    @property
    def preprocessing(self) -> dict[str, Any]:
        """Describes how samples become the input of the model."""
        largest = (1 << self.bits) - 1
        colors = {1: "gray", 3: "RGB"}.get(self.channels, f"{self.channels} channels")
        pad_value = round(GRAY * largest / 255)
        steps = {"colors": colors, "scale": f"1/{largest}", "resize": "letterbox"}
        return steps | {"pad_value": pad_value, "centered": True}


def parse_metadata(entries: Mapping[str, Any]) -> ExportMetadata:
    """Reads the entries of `ExportMetadata.as_strings`, and those of other programs' files: keys may be missing, and no
    code in them is run. Raises UserError for invalid values, and without class names."""
    if not isinstance(entries, Mapping):
        raise UserError("damaged metadata: not a mapping")
    task = entries.get("task", "detect")
    if task != "detect":
        raise UserError(f"the model's task is '{str(task)[:60]}', not detection")
    literals = {}
    for key in ("names", "stride", "imgsz", "batch", "channels", "end2end", "args"):
        literals[key] = _literal(entries, key)
    if not literals["names"]:
        raise UserError("has no class names; expected the metadata of YOLO exports: names, stride and imgsz")
    if isinstance(literals["stride"], list | tuple) and literals["stride"]:
        literals["stride"] = literals["stride"][-1]  # the coarsest level's
    imgsz = literals["imgsz"]
    args = literals["args"] if isinstance(literals["args"], dict) else {}
    values: dict[str, Any] = {key: literals[key] for key in ("stride", "channels", "batch")}
    values["names"] = _names(literals["names"])
    values["imgsz_hw"] = [imgsz, imgsz] if isinstance(imgsz, int) else imgsz or None
    values["end2end"] = literals["end2end"] is True or args.get("nms") is True
    values["dynamic"] = args.get("dynamic") is True
    values = {key: value for key, value in values.items() if value is not None}
    values |= {key: str(entries[key]) for key in _TEXTS if key in entries}
    if KEY in entries:
        values |= _parse_json(entries[KEY])
    elif not values["end2end"]:
        values["nms_iou"] = FOREIGN_IOU
    return build(ExportMetadata, values, "damaged metadata")


def _parse_json(text: Any) -> dict[str, Any]:
    """Reads the fields that only this program stores."""
    location = f"damaged metadata: {KEY}"
    try:
        entries = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise UserError(f"{location}: not JSON") from None
    entries = check(entries, dict, location)
    if check(entries.get("version", 0), int, f"{location}: version") > VERSION:
        raise UserError(f"exported by a newer version (format {entries['version']}); update this program")
    layout = check(entries.get("layout"), str, f"{location}: layout", Bounds(choices=("raw", "end2end")))
    known = {key: entries[key] for key in _JSON_FIELDS if key in entries}
    not_details = {*known, "version", "layout", "needs_nms", "preprocessing"}
    details = {key: value for key, value in entries.items() if key not in not_details}
    return known | {"end2end": layout == "end2end", "details": details}


def _literal(entries: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a key: a Python literal as text, or plain data of a YAML; None if it is missing."""
    value = entries.get(key)
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise UserError(f"damaged metadata ('{key}' is {value[:60]!r})") from None


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, dict):
        keys = {str(key): name for key, name in value.items()}
        numbers = [str(number) for number in range(len(keys))]
        value = [keys[number] for number in numbers] if set(keys) == set(numbers) else None
    if not isinstance(value, list | tuple) or len(value) > MAX_CLASSES:
        raise UserError("damaged metadata ('names' does not number the classes from 0)")
    return tuple(one_line(str(name)) for name in value)


def write_metadata_file(folder: Path, metadata: ExportMetadata) -> None:
    """Writes the metadata of a format that has several files, with a boolean ``end2end``, as readers of YOLO exports
    expect."""
    content = metadata.as_data() | {"end2end": metadata.end2end}
    write_whole(folder / METADATA_FILE, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def read_metadata_file(path: Path) -> Any:
    """Reads the file of `write_metadata_file` in the folder ``path``, or beside the file ``path``; {} if there is none.
    Raises UserError for a file that is not YAML."""
    file = (path if path.is_dir() else path.parent) / METADATA_FILE
    return load_yaml(file) if file.is_file() else {}


def read_archive_entry(path: Path, name: str) -> Any:
    """Reads the JSON of the entry ``name``, in any folder of an archive; {} if there is none. Raises UserError for a
    file that is not such an archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if entry.filename.rpartition("/")[2] == name]
            if not entries:
                return {}
            with archive.open(entries[0]) as file:
                return json.loads(file.read(MAX_BYTES) or b"{}")
    except OSError:
        raise
    except Exception:  # zipfile and its decompressors have many types
        raise UserError(f"not an archive with JSON in {name}, or a damaged one") from None
