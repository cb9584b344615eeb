"""Variants: training runs declared in a YAML file before they start.

finetune:                        # name, also of the folder; every key except epochs is optional
  weights: yolov8n.pt            # in the folder --weights-dir; without weights, from scratch
  model: yolov8n                 # required without weights
  epochs: 20
  imgsz: 320
  batch: 16
  subset: 50                     # the first n training images of a fixed shuffle; default: all
  flags: --set lr_mult=0.25      # further flags of train.py
peer:
  peer: ultralytics
  weights: yolov8n.pt
  epochs: 20
  set: {nbs: 16}                 # further settings of the peer
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from utils.config.yaml_files import load_yaml
from utils.errors import UserError
from utils.schema import Bounds, build, check


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way of training, ours or a peer's."""

    name: str
    weights: str = ""
    model: str = ""
    epochs: Annotated[int, Bounds(1)]
    imgsz: Annotated[int, Bounds(1)] = 320
    batch: Annotated[int, Bounds(1)] = 16
    subset: Annotated[int, Bounds(0)] = 0
    flags: tuple[str, ...] = ()
    peer: str = field(default="", metadata={"choices": ("ultralytics",)})
    set: dict[str, Any] = field(default_factory=dict)


def read_variants(path: Path) -> dict[str, Variant]:
    """Reads the variants of a file, by name. Raises UserError for malformed variants, and keys that a side ignores."""
    content = check(load_yaml(path), dict[str, dict], str(path))
    if not content:
        raise UserError(f"{path}: declares no variant")
    return {name: _read_variant(name, values, f"{path}: {name}") for name, values in content.items()}


def _read_variant(name: str, values: dict[str, Any], location: str) -> Variant:
    if not re.fullmatch(r"\w[\w.+-]*", name) or name == "data":
        raise UserError(f"{location}: a variant's name must be the name of a folder other than data")
    try:
        flags = tuple(shlex.split(check(values.get("flags", ""), str, f"{location}: flags")))
    except ValueError as error:
        raise UserError(f"{location}: flags: {error}") from None
    variant = build(Variant, values | {"flags": flags, "name": name}, location)
    if variant.flags if variant.peer else variant.set:
        raise UserError(f"{location}: flags are only for our side, set is only for the peer")
    if not variant.weights and not variant.model:
        raise UserError(f"{location}: model or weights must be given")
    return variant
