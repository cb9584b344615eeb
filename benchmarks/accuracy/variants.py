"""Variants: what is trained, declared in a YAML file before it runs.

finetune:                        # name; each key is optional
  weights: yolov8n.pt            # in the folder --weights-dir; without it, from scratch
  model: yolov8n                 # needed without weights
  epochs: 20
  imgsz: 320
  batch: 16
  subset: 50                     # the first n training images of a fixed shuffle; without it, all
  flags: --set lr_mult=0.25      # further flags of train.py
  revision: 807b914              # a commit of this repository instead of the working tree
peer:
  peer: ultralytics
  weights: yolov8n.pt
  epochs: 20
  set: {nbs: 16}                 # further settings of the peer
"""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import yaml


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
    """The variants of a file, by name. Raises SystemExit for keys that no variant has, or that one side ignores."""
    known = {item.name for item in dataclasses.fields(Variant)} - {"name"}
    found = {}
    for name, content in yaml.safe_load(path.read_text()).items():
        if unknown := set(content) - known:
            raise SystemExit(f"{path}: {name}: unknown keys {', '.join(sorted(unknown))}")
        variant = Variant(name=name, **content | {"flags": tuple(shlex.split(content.get("flags", "")))})
        if variant.peer not in ("", "ultralytics"):
            raise SystemExit(f"{path}: {name}: peer is ultralytics, or left out")
        if (variant.flags or variant.revision) if variant.peer else variant.set:
            raise SystemExit(f"{path}: {name}: flags and revision are for ours, set is for the peer")
        if not variant.weights and not variant.model:
            raise SystemExit(f"{path}: {name}: model or weights must be given")
        found[name] = variant
    return found
