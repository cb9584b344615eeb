"""The catalog of public weights, configs/weights.yaml."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from models.spec import WEIGHTS_SUFFIXES, model_name_hint
from utils.config.words import other_task
from utils.config.yaml_files import load_yaml
from utils.errors import UserError
from utils.files.url import is_http
from utils.program_folders import CONFIGS
from utils.schema import Bounds, Count, build

CATALOG = CONFIGS / "weights.yaml"
UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class WeightsEntry:
    """One entry of the catalog."""

    url: str
    license: str = UNKNOWN
    sha256: str = ""  # hex digest; empty: not known
    size: Count = 0  # bytes; 0: not known
    ap: Annotated[float, Bounds(0, 100)] = 0.0  # published AP50-95 on COCO val2017, percent; 0: not known


def known_weights() -> dict[str, WeightsEntry]:
    """Reads the entries of the catalog by name, in its order: permissive licenses first."""
    return {name: build(WeightsEntry, entry, f"{CATALOG}: {name}") for name, entry in load_yaml(CATALOG).items()}


def weights_entry(name_or_path: str) -> WeightsEntry:
    """Returns the entry for a URL or a name in the catalog. Raises UserError for anything else, with a suggestion."""
    if not name_or_path.strip():
        raise UserError(f"weights {name_or_path!r}: the name is empty")
    if is_http(name_or_path):
        return WeightsEntry(url=name_or_path)
    catalog = known_weights()
    name = catalog_name(name_or_path)
    if name in catalog:
        return catalog[name]
    if os.path.isdir(name_or_path):
        raise UserError(f"{name_or_path}: is a folder; name a file in it, such as best.pt")
    if os.path.exists(name_or_path):
        raise UserError(f"{name_or_path}: is a pipe or device, not a file")
    if Path(name_or_path).name != name_or_path:
        raise UserError(f"{name_or_path}: no such file")
    other_task_message = other_task(name_or_path)
    if other_task_message:
        raise UserError(other_task_message)
    hint = model_name_hint(name, catalog)
    if not hint and Path(name).suffix:  # another kind of file, such as an exported one
        raise UserError(f"{name_or_path}: no such file")
    hint = hint or f"; public weights: {', '.join(catalog)}"
    raise UserError(f"{name_or_path}: neither a file nor the name of public weights{hint}")


def check_weights(name_or_path: str) -> None:
    """Raises UserError unless the file or folder exists, or can be downloaded."""
    if not os.path.exists(os.path.expanduser(name_or_path)):
        weights_entry(name_or_path)


def catalog_name(name: str) -> str:
    """Removes the suffix of a weights file: ``yolov8n`` for ``yolov8n.pt``."""
    return next((name.removesuffix(suffix) for suffix in WEIGHTS_SUFFIXES if name.endswith(suffix)), name)
