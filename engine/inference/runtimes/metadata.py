"""The metadata of an exported model: text by key, which every format stores in its own way.

The keys that readers of YOLO exports know (names, stride, imgsz, ...) hold Python literals. The key ``lockstep`` adds
JSON with what only this program knows.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from utils.config.pixels import PixelFormat
from utils.errors import UserError, one_line
from utils.structures import GRAY

KEY = "lockstep"
VERSION = 1
LAYOUTS = ("raw", "end2end", "deepstream")
MOST_CLASSES = 100_000
MOST_SIDE = 2**16  # pixels
LONGEST_PATH = 4096


def preprocessing(pixels: PixelFormat) -> dict[str, Any]:
    """How samples of ``pixels`` become the input of a model."""
    largest = (1 << pixels.bits) - 1
    colors = {1: "gray", 3: "RGB"}.get(pixels.channels, f"{pixels.channels} channels")
    pad_value = round(GRAY * largest / 255)
    return {"colors": colors, "scale": f"1/{largest}", "resize": "letterbox", "pad_value": pad_value, "centered": True}


@dataclass(frozen=True, kw_only=True)
class ExportMetadata:
    """What an exported file says about itself.

    ``names``, ``imgsz_hw`` and ``layout`` are None in foreign files that do not tell.
    """

    names: tuple[str, ...] | None = None
    stride: int = 32
    imgsz_hw: tuple[int, int] | None = None  # pixels
    batch: int = 1
    dynamic: bool = False  # any batch and any canvas of whole strides
    end2end: bool = False  # rows of final detections, or boxes of a head that needs no NMS
    task: str = "detect"
    channels: int = 3
    bits: int = 8  # of a channel
    layout: str | None = None
    nms_iou: float | None = None  # None: the detections need no NMS
    box_voting: bool = False  # by the NMS inside
    validation_iou: float | None = None  # as published for the model's head
    squares: bool = False  # whether validation pads images to squares by default
    confidence: float | None = None  # threshold with the best F1 in validation
    data: dict[str, str] = field(default_factory=dict)  # where the data set is, as a checkpoint stores it
    description: str = ""
    date: str = ""
    author: str = ""
    version: str = ""
    license: str = ""
    details: dict[str, Any] = field(default_factory=dict)  # further entries of the key `KEY`

    @property
    def is_ours(self) -> bool:
        return self.layout is not None

    @property
    def input_shape(self) -> tuple[int | None, ...]:
        """B, C, H, W; None: any."""
        is_any, c = self.dynamic or self.imgsz_hw is None, self.channels
        return (None, c, None, None) if is_any else (self.batch, c, *self.imgsz_hw)

    def as_text(self) -> dict[str, str]:
        """Text by key."""
        hw = list(self.imgsz_hw or ())
        values = {
            "description": self.description,
            "author": self.author,
            "date": self.date,
            "version": self.version,
            "license": self.license,
            "task": self.task,
            "stride": self.stride,
            "batch": self.batch,
            "imgsz": hw,
            "channels": self.channels,
            "names": dict(enumerate(self.names or ())),
            "end2end": self.end2end,
            "args": {"dynamic": self.dynamic},
        }
        own = {
            "version": VERSION,
            "layout": self.layout,
            "needs_nms": self.nms_iou is not None,
            "nms_iou": self.nms_iou,
            "box_voting": self.box_voting,
            "validation_iou": self.validation_iou,
            "squares": self.squares,
            "confidence": self.confidence,
            "preprocessing": preprocessing(PixelFormat(self.channels, self.bits)),
            "bits": self.bits,
            "data": self.data,
        }
        return {key: str(value) for key, value in values.items()} | {
            KEY: json.dumps(own | self.details, ensure_ascii=False)
        }

    def as_dict(self) -> dict[str, Any]:
        """All values, for `InferenceModel.info`."""
        return asdict(self)


def parse_metadata(text: Mapping[str, str]) -> ExportMetadata:
    """The inverse of `ExportMetadata.as_text`, also of files that others wrote: missing keys are allowed, no code in
    them is run. Raises UserError for values that no export has."""
    names = _names(_literal(text, "names"))
    task = text.get("task", "detect")
    if task != "detect":
        raise UserError(f"the model's task is '{str(task)[:60]}', not detection")
    channels = _literal(text, "channels")
    channels = 3 if channels is None else PixelFormat.checked(channels, 8, "its metadata").channels
    known: dict[str, Any] = {
        key: str(text[key]) for key in ("description", "date", "author", "version", "license") if key in text
    }
    stride = _literal(text, "stride")
    if isinstance(stride, list | tuple) and stride:
        stride = stride[-1]  # of the coarsest level
    if stride is not None:
        known["stride"] = int(_number("stride", stride, 1, 4096))
    if (batch := _literal(text, "batch")) is not None:
        known["batch"] = int(_number("batch", batch, 1, MOST_SIDE))
    args = _literal(text, "args")
    parsed = ExportMetadata(
        names=names,
        channels=channels,
        imgsz_hw=_image_size(_literal(text, "imgsz")),
        end2end=_literal(text, "end2end") is True,
        dynamic=isinstance(args, dict) and args.get("dynamic") is True,
        **known,
    )
    return _with_own(parsed, text[KEY]) if KEY in text else parsed


def _with_own(parsed: ExportMetadata, text: str) -> ExportMetadata:
    try:
        own = json.loads(text)
        if not isinstance(own, dict):
            raise TypeError
        if own.get("version", 0) > VERSION:
            raise UserError(f"exported by a newer version (format {own['version']}); update this program")
        if own.get("layout") not in LAYOUTS:
            raise ValueError
        fractions = {
            key: None if own.get(key) is None else _number(key, own[key], 0, 1)
            for key in ("nms_iou", "validation_iou", "confidence")
        }
        bits = PixelFormat.checked(3, own.get("bits", 8), f"damaged metadata ('{KEY}')").bits
        data = own.get("data", {})
        if not all(isinstance(value, str) and len(value) < LONGEST_PATH for value in data.values()):
            raise ValueError
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise UserError(f"damaged metadata ('{KEY}' is not ours)") from None
    known = {"version", "layout", "needs_nms", "box_voting", "squares", "preprocessing", "bits", "data", *fractions}
    details = {key: value for key, value in own.items() if key not in known}
    flags = {key: own.get(key) is True for key in ("box_voting", "squares")}
    return replace(parsed, layout=own["layout"], bits=bits, data=data, details=details, **flags, **fractions)


def _literal(text: Mapping[str, str], key: str) -> Any:
    """The value of a key: a Python literal as text, or plain data of a YAML; None if it is missing."""
    value = text.get(key)
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise UserError(f"damaged metadata ('{key}' is {value[:60]!r})") from None


def _number(key: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise UserError(f"damaged metadata ('{key}' is {str(value)[:60]!r})")
    return value


def _names(value: Any) -> tuple[str, ...] | None:
    if value is None or value in ({}, []):
        return None
    if isinstance(value, dict):
        keys = {str(key): name for key, name in value.items()}
        numbers = [str(number) for number in range(len(keys))]
        value = [keys[number] for number in numbers] if set(keys) == set(numbers) else None
    if not isinstance(value, list | tuple) or len(value) > MOST_CLASSES:
        raise UserError("damaged metadata ('names' does not number the classes from 0)")
    return tuple(one_line(str(name)) for name in value)


def _image_size(value: Any) -> tuple[int, int] | None:
    if value is None or value == []:
        return None
    sides = list(value) if isinstance(value, list | tuple) else [value]
    sides = sides * 2 if len(sides) == 1 else sides
    if len(sides) != 2:
        raise UserError(f"damaged metadata ('imgsz' is {str(value)[:60]!r})")
    height, width = (int(_number("imgsz", side, 1, MOST_SIDE)) for side in sides)
    return height, width
