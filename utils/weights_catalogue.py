"""The catalogue of public weights: names that stand for files on the network (configs/weights.yaml)."""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from utils.config import from_mapping, load_yaml, setting, suggestion
from utils.errors import UserError

CATALOGUE = Path(__file__).parents[1] / "configs" / "weights.yaml"
SUFFIXES = (".pt", ".pth", ".safetensors")  # of weights; a name of the catalogue may be written with one


@dataclass(frozen=True, kw_only=True)
class WeightsEntry:
    """One entry of the catalogue."""

    url: str = setting(help="where the file is")
    licence: str = setting("unknown", help="the file's licence")
    sha256: str = setting("", help="hex digest; empty: not known")
    size: int = setting(0, low=0, help="bytes; 0: not known")


def is_url(text: str) -> bool:
    """Whether it is an address that can be fetched from."""
    return urllib.parse.urlsplit(text).scheme in ("http", "https")


def find_entry(name_or_path: str, catalogue: Path = CATALOGUE) -> WeightsEntry:
    """What a URL, or a name of the catalogue, stands for. Raises UserError for other text, with a suggestion."""
    if is_url(name_or_path):
        return WeightsEntry(url=name_or_path)
    known = load_yaml(catalogue) or {}
    name = catalogue_name(name_or_path)
    if name not in known:
        if Path(name_or_path).name != name_or_path:
            raise UserError(f"{name_or_path}: no such file")
        hint = suggestion(name, known) or f"; names: {', '.join(known)}"
        raise UserError(f"{name_or_path}: no such file, nor a name that can be fetched{hint}")
    entry = from_mapping(WeightsEntry, known[name], f"{catalogue}: {name}")
    if not is_url(entry.url):
        raise UserError(f"{catalogue}: {name}: url wants http:// or https://, got {entry.url!r}")
    return entry


def catalogue_name(text: str) -> str:
    """``yolov8n`` for ``yolov8n.pt``."""
    return next((text.removesuffix(suffix) for suffix in SUFFIXES if text.endswith(suffix)), text)
