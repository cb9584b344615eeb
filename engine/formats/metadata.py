"""The metadata of an exported model: text by key, which every format stores in its own way.

The keys that readers of YOLO exports use (names, stride, imgsz, ...) hold Python literals. The key ``lockstep`` adds
JSON that only this program reads.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from utils.errors import UserError, one_line
from utils.pixels import GRAY, MAX_CHANNELS, PixelFormat
from utils.schema import Bounds, Fraction, build, check

KEY = "lockstep"
VERSION = 1
LAYOUTS = {"raw": False, "end2end": True}  # names of layouts, and `ExportMetadata.end2end` of each
_TEXTS = ("description", "date", "author", "version", "license")
# Fields of `ExportMetadata` in the key `KEY`.
_JSON_FIELDS = ("nms_iou", "box_voting", "validation_iou", "squares", "confidence", "voting_confidence", "bits", "data")
MAX_CLASSES = 100_000
MAX_SIDE_PX = 2**16
Side = Annotated[int, Bounds(1, MAX_SIDE_PX)]


def preprocessing(pixels: PixelFormat) -> dict[str, Any]:
    """Describes how samples of ``pixels`` become the input of a model."""
    largest = (1 << pixels.bits) - 1
    colors = {1: "gray", 3: "RGB"}.get(pixels.channels, f"{pixels.channels} channels")
    pad_value = round(GRAY * largest / 255)
    return {"colors": colors, "scale": f"1/{largest}", "resize": "letterbox", "pad_value": pad_value, "centered": True}


@dataclass(frozen=True, kw_only=True)
class ExportMetadata:
    """The description stored in an exported file. ``names`` and ``imgsz_hw`` may be None in foreign files."""

    is_ours: bool = False  # written by this program: ``end2end`` states the layout, which need not be inferred
    names: tuple[str, ...] | None = None
    stride: Annotated[int, Bounds(1, 4096)] = 32
    imgsz_hw: tuple[Side, Side] | None = None  # pixels
    batch: Side = 1
    dynamic: bool = False  # any batch and any canvas of whole strides
    end2end: bool = False  # rows of final detections; in a foreign file, maybe boxes of a head that needs no NMS
    task: str = "detect"
    channels: Annotated[int, Bounds(1, MAX_CHANNELS)] = 3
    bits: Annotated[int, Bounds(8, 16)] = 8  # bits per channel
    nms_iou: Fraction | None = None  # None: the detections need no NMS
    box_voting: bool = False  # whether the NMS inside uses box voting
    validation_iou: Fraction | None = None  # as published for the model's head
    squares: bool = False  # whether images are padded to squares
    # Thresholds with the best F1 in validation:
    confidence: Fraction | None = None  # for the output as it is, after NMS if it needs that
    voting_confidence: Fraction | None = None  # for the output after NMS with box voting, as detect.py applies it
    data: dict[str, str] = field(default_factory=dict)  # where the data set is, as a checkpoint stores it
    description: str = ""
    date: str = ""
    author: str = ""
    version: str = ""
    license: str = ""
    details: dict[str, Any] = field(default_factory=dict)  # further entries of the key `KEY`

    @property
    def input_shape(self) -> tuple[int | None, ...]:
        """B, C, H, W; None: any."""
        if self.dynamic or self.imgsz_hw is None:
            return (None, self.channels, None, None)
        return (self.batch, self.channels, *self.imgsz_hw)

    def as_strings(self) -> dict[str, str]:
        """Returns the entries for formats that hold text: values for readers of YOLO exports as Python literals, and
        those of the key `KEY` as JSON."""
        known = {key: getattr(self, key) for key in (*_TEXTS, "task", "stride", "batch", "channels", "end2end")}
        known["imgsz"] = self._imgsz
        known["names"] = self._numbered_names
        known["args"] = {"dynamic": self.dynamic}
        strings = {key: str(value) for key, value in known.items()}
        strings[KEY] = json.dumps(self._json_entries(), ensure_ascii=False)
        return strings

    def as_data(self) -> dict[str, Any]:
        """Returns the entries for formats that hold data, where readers expect some values that are not text."""
        data = {"stride": self.stride, "batch": self.batch, "imgsz": self._imgsz, "names": self._numbered_names}
        return self.as_strings() | data

    def _json_entries(self) -> dict[str, Any]:
        """Returns the content of the key `KEY`."""
        layout = next(name for name, is_end2end in LAYOUTS.items() if is_end2end == self.end2end)
        entries: dict[str, Any] = {"version": VERSION, "layout": layout, "needs_nms": self.nms_iou is not None}
        for key in _JSON_FIELDS:
            entries[key] = getattr(self, key)
        entries["preprocessing"] = preprocessing(PixelFormat(self.channels, self.bits))
        return entries | self.details

    @property
    def _imgsz(self) -> list[int]:
        return list(self.imgsz_hw or ())

    @property
    def _numbered_names(self) -> dict[int, str]:
        return dict(enumerate(self.names or ()))


def parse_metadata(text: Mapping[str, str]) -> ExportMetadata:
    """Reads the entries of `ExportMetadata.as_strings`, including files of other programs: keys may be missing, and no
    code in them is run. Raises UserError for invalid values."""
    task = text.get("task", "detect")
    if task != "detect":
        raise UserError(f"the model's task is '{str(task)[:60]}', not detection")
    args = _literal(text, "args")
    stride = _literal(text, "stride")
    if isinstance(stride, list | tuple) and stride:
        stride = stride[-1]  # the stride of the coarsest level
    values: dict[str, Any] = {
        "stride": stride,
        "imgsz_hw": _height_and_width(_literal(text, "imgsz")),
        "channels": _literal(text, "channels"),
        "batch": _literal(text, "batch"),
        "names": _names(_literal(text, "names")),
        "end2end": _literal(text, "end2end") is True,
        "dynamic": isinstance(args, dict) and args.get("dynamic") is True,
    }
    for key in _TEXTS:
        if key in text:
            values[key] = str(text[key])
    known = {key: value for key, value in values.items() if value is not None}
    if KEY in text:
        known |= _parse_json_entries(text[KEY])
    return build(ExportMetadata, known, "damaged metadata")


def _height_and_width(imgsz: Any) -> list[Any] | None:
    """Returns both sides, unchecked, of an ``imgsz`` of one number or two; None if there is none."""
    if imgsz in (None, []):
        return None
    sides = list(imgsz) if isinstance(imgsz, list | tuple) else [imgsz]
    return sides * 2 if len(sides) == 1 else sides


def _parse_json_entries(text: str) -> dict[str, Any]:
    """Reads the fields that only this program stores."""
    location = f"damaged metadata: {KEY}"
    try:
        entries = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise UserError(f"{location}: not JSON") from None
    entries = check(entries, dict, location)
    if check(entries.get("version", 0), int, f"{location}: version") > VERSION:
        raise UserError(f"exported by a newer version (format {entries['version']}); update this program")
    layout = check(entries.get("layout"), str, f"{location}: layout", Bounds(choices=tuple(LAYOUTS)))
    known = {key: entries[key] for key in _JSON_FIELDS if key in entries}
    not_details = {*known, "version", "layout", "needs_nms", "preprocessing"}
    details = {key: value for key, value in entries.items() if key not in not_details}
    return known | {"is_ours": True, "end2end": LAYOUTS[layout], "details": details}


def _literal(text: Mapping[str, str], key: str) -> Any:
    """Returns the value of a key: a Python literal as text, or plain data of a YAML; None if it is missing."""
    value = text.get(key)
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise UserError(f"damaged metadata ('{key}' is {value[:60]!r})") from None


def _names(value: Any) -> tuple[str, ...] | None:
    if value is None or value in ({}, []):
        return None
    if isinstance(value, dict):
        keys = {str(key): name for key, name in value.items()}
        numbers = [str(number) for number in range(len(keys))]
        value = [keys[number] for number in numbers] if set(keys) == set(numbers) else None
    if not isinstance(value, list | tuple) or len(value) > MAX_CLASSES:
        raise UserError("damaged metadata ('names' does not number the classes from 0)")
    return tuple(one_line(str(name)) for name in value)
