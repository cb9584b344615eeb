"""Variants: what is trained, declared in a YAML file before it runs.

finetune:                        # name, also of the folder; each key but epochs is optional
  weights: yolov8n.pt            # in the folder --weights-dir; without it, from scratch
  model: yolov8n                 # needed without weights
  epochs: 20
  imgsz: 320
  batch: 16
  subset: 50                     # the first n training images of a fixed shuffle; without it, all
  flags: --set lr_mult=0.25      # further flags of train.py
  revision: "807b914"            # a commit of this repository instead of the working tree
peer:
  peer: ultralytics
  weights: yolov8n.pt
  epochs: 20
  set: {nbs: 16}                 # further settings of the peer
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from utils.config.yaml_files import load_yaml
from utils.errors import UserError

_NUMBERS = ("epochs", "imgsz", "batch", "subset")
_OWN_FOLDERS = ("data", "trees")  # those that this program makes beside the variants'


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way of training, ours or a peer's."""

    name: str
    weights: str = ""
    model: str = ""
    epochs: int
    imgsz: int = 320
    batch: int = 16
    subset: int = 0
    flags: tuple[str, ...] = ()
    revision: str = ""
    peer: str = ""
    set: dict[str, float | bool | str] = field(default_factory=dict)


def read_variants(path: Path) -> dict[str, Variant]:
    """The variants of a file, by name. Raises UserError for malformed ones, and for keys that one side ignores."""
    content = load_yaml(path)
    if not isinstance(content, dict) or not content:
        raise UserError(f"{path}: expected 'name: {{key: value}}' lines")
    return {name: _read_variant(name, values, f"{path}: {name}") for name, values in content.items()}


def _read_variant(name: Any, values: Any, where: str) -> Variant:
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.+-]*", name) or name in _OWN_FOLDERS:
        raise UserError(f"{where}: a name is the name of a folder, other than data and trees; quote a number")
    known = [item.name for item in dataclasses.fields(Variant) if item.name != "name"]
    if not isinstance(values, dict):
        raise UserError(f"{where}: expected keys ({', '.join(known)}), got {values!r}")
    if unknown := set(values) - set(known):
        raise UserError(f"{where}: unknown keys {', '.join(sorted(map(str, unknown)))}")
    for key, value in values.items():
        _check_value(key, value, f"{where}: {key}")
    if "epochs" not in values:
        raise UserError(f"{where}: epochs must be given")
    try:
        flags = tuple(shlex.split(values.get("flags", "")))
    except ValueError as error:
        raise UserError(f"{where}: flags: {error}") from None
    variant = Variant(name=name, **values | {"flags": flags})
    if variant.peer not in ("", "ultralytics"):
        raise UserError(f"{where}: peer is ultralytics, or left out")
    if (variant.flags or variant.revision) if variant.peer else variant.set:
        raise UserError(f"{where}: flags and revision are for ours, set is for the peer")
    if not variant.weights and not variant.model:
        raise UserError(f"{where}: model or weights must be given")
    return variant


def _check_value(key: str, value: Any, where: str) -> None:
    if key in _NUMBERS:
        if type(value) is not int or value < 1:
            raise UserError(f"{where}: expected a whole number of at least 1, got {value!r}")
    elif key == "set":
        if not isinstance(value, dict) or not all(isinstance(v, int | float | str) for v in value.values()):
            raise UserError(f"{where}: expected 'setting: value' pairs, got {value!r}")
    elif not isinstance(value, str):
        raise UserError(f"{where}: expected text, got {value!r}; write it in quotes")
